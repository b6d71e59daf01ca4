"""`docs/architecture.md` names modules and tests that exist, and draws the house as it is."""

import re
from pathlib import Path

from house import FLOORS

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "docs" / "architecture.md").read_text()
PACKAGE = REPOSITORY / "orbax_safetensors_layout"


def test_every_file_that_it_names_exists():
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|txt)|(?:\w+/)+)(?::\w+)?`", TEXT)
    assert len(named) > 40
    rooms = [PACKAGE, REPOSITORY, *(path.parent for path in PACKAGE.rglob("__init__.py"))]
    missing = {name for name in named if not any((room / name).exists() for room in rooms)}
    assert not missing


def test_every_name_of_a_file_is_in_it():
    pairs = re.findall(r"`(\w+)(?:\.\w+)?` (?:of |\()`((?:\w+/)*\w+\.py)`", TEXT)
    assert len(pairs) > 25
    for name, file in pairs:
        found = [
            path for path in PACKAGE.rglob(file.rpartition("/")[2]) if str(path).endswith(file)
        ]
        assert any(re.search(rf"\b{name}\b", path.read_text()) for path in found), (name, file)


def test_every_name_of_a_face_that_it_names_exists():
    for room, name in re.findall(r"`(\w+)\.([A-Za-z_]+)(?:\.\w+)?`", TEXT):
        if (PACKAGE / room).is_dir():
            assert re.search(rf"\b{name}\b", (PACKAGE / room / "__init__.py").read_text()), name


def test_it_draws_the_floors_of_the_import_test():
    lines = re.findall(r"^ ?\d+ .*$", TEXT, re.M)
    for floor, line in zip(reversed(FLOORS), lines, strict=True):
        assert floor <= set(re.findall(r"\w+", line)), line
