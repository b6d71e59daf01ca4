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


def test_every_name_of_a_face_that_it_names_exists():
    for room, name in re.findall(r"`(\w+)\.([A-Za-z_]+)(?:\.\w+)?`", TEXT):
        if (PACKAGE / room).is_dir():
            assert re.search(rf"\b{name}\b", (PACKAGE / room / "__init__.py").read_text()), name


def test_it_draws_the_floors_of_the_import_test():
    lines = re.findall(r"^ ?\d+ .*$", TEXT, re.M)
    for floor, line in zip(reversed(FLOORS), lines, strict=True):
        assert floor <= set(re.findall(r"\w+", line)), line
