"""The screens and the picture of the documentation are what the tool makes now."""

import importlib.util

import matplotlib
import numpy as np
import pytest
from matplotlib import image
from programs import REPOSITORY


@pytest.fixture(scope="module")
def screens():
    spec = importlib.util.spec_from_file_location("screens", REPOSITORY / "docs" / "screens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.checkpoint():
        yield module


def test_the_screens_are_what_is_printed(screens):
    (page,) = (path.read_text(encoding="utf-8") for path in screens.PAGES)
    assert screens.with_screens(page) == page, "run `python docs/screens.py`"
    for command in screens.SCREENS.values():
        assert f"$ {screens.shown(command)}\n" in page


def test_the_picture_is_what_is_drawn(screens, tmp_path):
    target = tmp_path / "reads.png"
    screens.draw(target)
    drawn, committed = (image.imread(path) for path in (target, screens.PICTURE))
    assert drawn.shape == committed.shape
    # Letters are drawn otherwise by another version.
    if f"Matplotlib version{matplotlib.__version__}".encode() in screens.PICTURE.read_bytes():
        assert np.array_equal(drawn, committed), "run `python docs/screens.py`"
    for page in (REPOSITORY / "README.md", *screens.PAGES):
        target = screens.PICTURE.relative_to(page.parent)
        assert f"]({target})" in page.read_text(encoding="utf-8")
