"""The house's rules, enforced from the source: who may import whom, and what from outside.

Every import statement counts: those inside functions and under `TYPE_CHECKING` too.
"""

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from house import FLOORS

PACKAGE = "orbax_safetensors_layout"
ROOT = Path(__file__).parent.parent / PACKAGE

FLOOR_OF = {part: number for number, floor in enumerate(FLOORS) for part in floor}
MOST_ROOMS, MOST_MODULES_AT_THE_TOP, MOST_FLOORS = 16, 8, 15
SMALL_LINES, MOST_SMALL_MODULES = 40, 8

MAY_IMPORT_JAX = (
    "mapping.live",  # on first use
    "sharding.serialize",
    "sharding.shards",
    "pytree.abstract",
    "pytree.prng",
    "pytree.treedef",
    "reading._jax",
    "reading.all_gather",
    "reading.leaf_builder",
    "reading.replica_exchange",
    "reading.resolve",
    "reading.saved_metadata",
    "load",
    "writing.host",
    "writing.prepare_tree",
    "save",
    "conversion.checkpoint_reader",
    "conversion.target_tree",
    "conversion.pulled_version",
    "conversion.updated_arrays",
    "adapters",
    "analysis.tree_estimate",
    "convert",
)
MAY_IMPORT_ORBAX = ("adapters",)
MAY_IMPORT_PRIVATE_ORBAX = ("adapters._orbax",)

# Import names that may appear anywhere; jax and orbax have their own rules above.
OUTSIDE = frozenset(sys.stdlib_module_names) | {
    "absl",
    "ml_dtypes",
    "numpy",
    "tensorstore",
    "tqdm",
    "matplotlib",
    # the libraries that storage/ is made of
    "fsspec",
    "huggingface_hub",
    "obstore",
    "urllib3",
}

# These work on a machine without an accelerator stack, or before one is set up.
PURE_FOLDERS = ("catalog", "format", "geometry", "mapping", "plan", "runtime", "storage")


class Import(NamedTuple):
    """One import: `target` is the dotted module, of the package relative to it.

    `source` is the module that `name` is taken from, likewise.
    """

    module: str
    target: str
    line: int
    inside: bool
    source: str
    name: str
    is_relative: bool

    def __str__(self) -> str:
        return f"{self.module} (line {self.line}) imports {self.target}"


def module_name(path: Path) -> str:
    """`geometry.box` for geometry/box.py, `geometry` for its __init__.py, "" for the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def package_of(module: str) -> str:
    """The folder that a module's relative imports begin at."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def imported_names(module: str) -> Iterator[tuple[str, str, int, bool]]:
    """Absolute name of everything imported, the module that it is taken from, line, relative."""
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name, node.lineno, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = [PACKAGE, *package_of(module).split(".")]
                above = parents[: len(parents) - node.level + 1]
                source = ".".join([*above, *source.split(".")]).rstrip(".")
            for alias in node.names:
                yield f"{source}.{alias.name}", source, node.lineno, bool(node.level)


def resolve(name: str) -> str:
    """The longest prefix of a name that is a module of the package: `errors.Foo` -> `errors`."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports_of(module: str) -> list[Import]:
    imports = []
    for name, source, line, is_relative in imported_names(module):
        top, _, rest = name.partition(".")
        inside = top == PACKAGE
        source = source.partition(".")[2] if inside else source
        target = resolve(rest) if inside else name
        last = name.rpartition(".")[2]
        imports.append(Import(module, target, line, inside, source, last, is_relative))
    return imports


HOUSE = [module for module in MODULES if module]  # the package's own __init__.py stands outside
IMPORTS = [imported for module in HOUSE for imported in imports_of(module)]
INSIDE = [imported for imported in IMPORTS if imported.inside]
OUTER = [imported for imported in IMPORTS if not imported.inside]


def part(module: str) -> str:
    """The folder, or the top-level module, that a module belongs to."""
    return module.partition(".")[0]


def is_room(module: str) -> bool:
    return (ROOT / module).is_dir() and module in MODULES and "." not in module


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def offenders(imports: list[Import]) -> str:
    return "\n".join(map(str, imports))


def test_every_module_is_on_a_floor():
    assert {part(module) for module in HOUSE} == set(FLOOR_OF)


def lines_of(module: str) -> int:
    return len(MODULES[module].read_text().splitlines())


def house_table() -> Iterator[str]:
    """Yields a line for each room and module at the top, by floor, and one for the package."""
    yield "floor  room           modules   lines  longest module"
    for number, floor in enumerate(FLOORS, 1):
        for room in sorted(floor):
            sizes = {module: lines_of(module) for module in HOUSE if part(module) == room}
            longest = max(sizes, key=sizes.__getitem__)
            yield (
                f"{number:>5}  {room:<14} {len(sizes):>7} {sum(sizes.values()):>7,}"
                f"  {longest} ({sizes[longest]:,})"
            )
    yield f"{'':>5}  {'package':<14} {len(MODULES):>7} {sum(map(lines_of, MODULES)):>7,}"


def test_the_house_is_small_enough_to_be_known(capsys):
    rooms = {module for module in HOUSE if is_room(module)}
    at_the_top = {module for module in MODULES if "." not in module} - rooms
    with capsys.disabled():
        print("", *house_table(), sep="\n")
    assert len(rooms) <= MOST_ROOMS
    assert len(at_the_top) <= MOST_MODULES_AT_THE_TOP
    assert len(FLOORS) <= MOST_FLOORS


def test_few_modules_are_small_and_have_one_user():
    """A face is no user. Such a module is better a part of the module that imports it."""
    users: dict[str, set[str]] = {}
    for imported in INSIDE:
        if MODULES[imported.module].name != "__init__.py" and imported.target != imported.module:
            users.setdefault(imported.target, set()).add(imported.module)
    small = [
        module
        for module in HOUSE
        if MODULES[module].name != "__init__.py"
        and lines_of(module) < SMALL_LINES
        and len(users.get(module, ())) <= 1
    ]
    assert len(small) <= MOST_SMALL_MODULES, small


def test_nothing_imports_the_package_root():
    forbidden = [imported for imported in INSIDE if imported.target == ""]
    assert not forbidden, offenders(forbidden)


def test_imports_go_down_or_stay_on_their_floor():
    forbidden = [
        imported
        for imported in INSIDE
        if imported.target and FLOOR_OF[part(imported.target)] > FLOOR_OF[part(imported.module)]
    ]
    assert not forbidden, offenders(forbidden)


def test_imports_across_rooms_come_from_a_face_and_those_within_one_are_relative():
    forbidden = [
        imported
        for imported in INSIDE
        if imported.is_relative is not (part(imported.module) == part(imported.source))
        or (not imported.is_relative and "." in imported.source)
    ]
    assert not forbidden, offenders(forbidden)


def test_tests_import_from_a_face_what_it_exports():
    faces = {
        f"{PACKAGE}.{room}": {
            imported.name for imported in imports_of(room) if imported.is_relative
        }
        for room in MODULES
        if is_room(room)
    }
    past = [
        f"{path.name} (line {node.lineno}) imports {alias.name} from {node.module}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.count(".") > 1
        for alias in node.names
        if alias.name in faces.get(".".join(node.module.split(".")[:2]), ())
    ]
    assert not past, "\n".join(past)


def test_tests_import_nothing_private():
    private = [
        f"{path.name} (line {node.lineno}) imports {alias.name} from {node.module}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private, "\n".join(private)


def test_faces_offer_what_exists():
    """Nothing is known of a lazy name before it is asked for."""
    names = [
        (imported.source, imported.name)
        for imported in INSIDE
        if is_room(imported.source) and not imported.is_relative
    ]
    run_python(
        "import importlib\n"
        f"for module, name in {sorted(set(names))}:\n"
        f"    getattr(importlib.import_module('{PACKAGE}.' + module), name)\n"
    )


def test_names_are_used_once():
    """Names of modules (but the commands of `cli`), and of classes but for underscores."""
    modules = Counter(
        module.rpartition(".")[2]
        for module in HOUSE
        if part(module) != "cli" and MODULES[module].name != "__init__.py"
    )
    classes = Counter(
        node.name.lstrip("_")
        for module in HOUSE
        for node in ast.parse(MODULES[module].read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (modules + classes).items() if count > 1] == []


def test_no_circles():
    graph: dict[str, set[str]] = {module: set() for module in HOUSE}
    for imported in INSIDE:
        if imported.target != imported.module:
            graph[imported.module].add(imported.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("circle: " + " -> ".join(error.args[1]))


def test_jax_is_imported_only_where_arrays_and_shardings_are_handled():
    forbidden = [
        imported
        for imported in OUTER
        if part(imported.target) in {"jax", "jaxlib"}
        and not within(imported.module, MAY_IMPORT_JAX)
    ]
    assert not forbidden, offenders(forbidden)


def test_orbax_is_imported_only_by_adapters():
    forbidden = [
        imported
        for imported in OUTER
        if part(imported.target) == "orbax" and not within(imported.module, MAY_IMPORT_ORBAX)
    ]
    assert not forbidden, offenders(forbidden)


def test_private_orbax_is_imported_by_one_module():
    forbidden = [
        imported
        for imported in OUTER
        if part(imported.target) == "orbax"
        and any(name.startswith("_") for name in imported.target.split("."))
        and not within(imported.module, MAY_IMPORT_PRIVATE_ORBAX)
    ]
    assert not forbidden, offenders(forbidden)


def test_only_declared_libraries_are_imported():
    forbidden = [
        imported
        for imported in OUTER
        if part(imported.target) not in OUTSIDE | {"jax", "jaxlib", "orbax"}
    ]
    assert not forbidden, offenders(forbidden)


def test_package_root_imports_nothing_of_the_house_at_run_time():
    tree = ast.parse(MODULES[""].read_text())
    names = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert {part(name or "") for name in names} <= sys.stdlib_module_names


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", PURE_FOLDERS)
def test_pure_folder_runs_without_jax_and_orbax(folder):
    in_folder = [module for module in HOUSE if part(module) == folder]
    modules = [f"{PACKAGE}.{m}" for m in in_folder if not within(m, MAY_IMPORT_JAX)]
    assert modules, f"{folder}/ is missing"
    run_python(
        "import importlib, sys\n"
        "sys.modules['jax'] = sys.modules['jaxlib'] = sys.modules['orbax'] = None\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
    )


def test_what_a_version_of_orbax_lacks_is_no_riddle():
    run_python(
        "import sys\n"
        "import orbax.checkpoint as ocp\n"
        "del ocp._src.path.atomicity\n"
        "sys.modules['orbax.checkpoint._src.path.atomicity'] = None\n"
        f"import {PACKAGE} as osl\n"
        "osl.load, osl.save\n"
        "try:\n    osl.SafetensorsLayout\n"
        "except ImportError as error:\n    assert 'Install 0.12.6' in str(error), error\n"
        "else:\n    raise AssertionError\n"
    )


def test_the_command_line_starts_without_jax_and_orbax():
    run_python(
        "import sys\n"
        f"from {PACKAGE}.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as error:\n    assert not error.code\n"
        "heavy = {'jax', 'jaxlib', 'orbax'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\n"
    )


def test_public_names_of_pure_modules_load_neither_jax_nor_orbax():
    run_python(
        "import sys\n"
        f"import {PACKAGE} as osl\n"
        "osl.is_safetensors_checkpoint, osl.ReadPlan, osl.Cost, osl.ReadOptions, osl.FormatError\n"
        "osl.Mapping, osl.rule, osl.tensor, osl.stack, osl.concat, osl.opaque, osl.WritePlan\n"
        "heavy = {'jax', 'jaxlib', 'orbax'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\n"
    )
