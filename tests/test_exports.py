"""The public names: all there, all documented, none beside them."""

import ast
import importlib
import inspect
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from programs import REPOSITORY, run_alone

import orbax_safetensors_layout as osl

PACKAGE = Path(osl.__file__).parent
NAMES = [name for name in osl.__all__ if name != "__version__"]


def type_checker_names() -> dict[str, str]:
    """Public name -> module, as the `if TYPE_CHECKING` block tells a type checker."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or "": f"{osl.__name__}.{node.module}"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


@pytest.mark.parametrize("name", NAMES)
def test_public_name_resolves_to_a_documented_object_of_this_package(name):
    value = getattr(osl, name)
    assert isinstance(value, ModuleType) == (name in {"families", "peft"})
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    assert module.split(".")[0] == osl.__name__
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isclass(value):
        assert vars(value).get("__doc__"), f"{name} has no docstring of its own"


def test_all_is_sorted_and_without_repeats():
    assert osl.__all__ == sorted(set(osl.__all__))


def test_dir_shows_all_public_names():
    assert set(osl.__all__) <= set(dir(osl))


def test_lazy_table_and_type_checker_block_and_all_agree():
    static = type_checker_names()
    assert set(static) == set(NAMES)
    for name, module in static.items():
        assert getattr(importlib.import_module(module), name) is getattr(osl, name)


def test_nothing_public_is_missing_from_all():
    for name in NAMES:
        getattr(osl, name)
    folders_and_modules = {path.stem for path in PACKAGE.iterdir()}
    helpers = {"annotations", "importlib", "sys", "ModuleType", "TYPE_CHECKING"}
    public = {name for name in vars(osl) if not name.startswith("_")}
    assert public - folders_and_modules - helpers <= set(osl.__all__)


def test_every_error_class_is_public():
    errors = importlib.import_module("orbax_safetensors_layout.errors")
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert defined <= set(osl.__all__)
    assert all(issubclass(getattr(osl, name), osl.SafetensorsLayoutError) for name in defined)


def test_star_import_gives_exactly_all():
    namespace: dict[str, object] = {}
    exec("from orbax_safetensors_layout import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(osl.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'orbax_safetensors_layout' has no attribute 'lod'"):
        osl.lod  # noqa: B018


def test_submodule_import_does_not_replace_the_function_of_that_name():
    run_alone("import_submodule.py")


def test_version_is_pyprojects():
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert osl.__version__ == pyproject["project"]["version"]


def test_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()
