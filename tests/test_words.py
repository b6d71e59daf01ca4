"""Names and phrases that were given up for plainer ones do not come back, nor do they in the docs.

Names are compared whole, without leading underscores; the glossary of docs/architecture.md has the
words to use.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "orbax_safetensors_layout"
MODULES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

RETIRED_NAMES = """
agreement alike band bands below brief builders cells checks cloud_publish companions computed
console contents design destination destinations device_grid division facts fetches file_set
filling firsts fleet forecast functions held_boxes holdings interrupts joins leaf_values lease
leave local_boxes located made meet mine most_told nearest nodes_json one origins publication
publishing pulse recorded refine refined refined_view refuse region_read room rooms settle
shaping sharing sides silent some soundness spread streaming structure survey tell telling told
verb verbs want wanted wanted_leaf wanted_tree wants
"""
# Names that are good for other things.
RETIRED_CLASSES = """
Agreement Bound DeviceGrid Destination Exchange Fact Fetch Filling Group HeldBoxes Kind Lease
LocalBoxes Location Mapped Plain Recorded Region RegionRead Room Shape Side Slots Step Sums Tell
Verb Want WantedLeaf WantedTree
"""
RETIRED_MODULES = """
assembly checkpoint_folder nodes owners patches placements run saved_tree saving stage
"""
RETIRED_PHRASES = (
    r"\balike\b",
    r"\bcan not\b",
    r"(?<![Tt]here )\b(is|are) no (?! *(longer|more))",
    r"\b(is|are) told\b",
    r"\ball meet\b",
    r"\b[Cc]ompanions?\b",
    r"\b[Ss]preads?\b",
    r"\b[Ww]anted (tree|leaf)\b",
    r"\bmanieth\b",
    r"\bwhat shall\b",
)
RETIRED_OPENINGS = r"(How|Of|What|When|Where|Which|Who|Why)\b"


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of all that a module defines, assigns to or takes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield node.lineno, name
            case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant(str(text))) as first, *_]:
                yield first.lineno, text


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields docstrings, the parts of all other strings, errors among them, and comments."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(str(text)):
                yield node.lineno, " ".join(text.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.fixture(scope="module")
def sources():
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in MODULES}


@pytest.fixture(scope="module")
def trees(sources):
    return {module: ast.parse(source) for module, source in sources.items()}


def is_message(function: ast.FunctionDef) -> bool:
    """Whether a function gives its `found` to an error, which says what was found."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and re.search("[Ee]rror$|^cls$", ast.unparse(node.func)):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if "found" in map(ast.unparse, given):
                return True
    return False


def test_retired_names_are_gone(trees):
    modules = {*RETIRED_NAMES.split(), *RETIRED_MODULES.split()}
    assert [path.stem for path in MODULES if path.stem in modules] == []
    retired = set(RETIRED_NAMES.split())
    assert [
        f"{module}:{line}: {name}"
        for module, tree in trees.items()
        for line, name in names(tree)
        if name.strip("_").lower() in retired
    ] == []


def test_retired_classes_are_gone(trees):
    assert [
        f"{module}:{node.lineno}: {node.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.strip("_") in RETIRED_CLASSES.split()
    ] == []


def test_found_is_what_an_error_found(trees):
    assert [
        f"{module}:{node.lineno}: {function.name}"
        for module, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and not is_message(function)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "found"
    ] == []


def test_docstrings_errors_and_comments_are_free_of_retired_phrases(sources):
    assert [
        f"{module}:{line}: {match[0]!r} in {text[:80]!r}"
        for module, source in sources.items()
        for line, text in texts(source)
        for match in re.finditer("|".join(RETIRED_PHRASES), text)
    ] == []


def test_documents_are_free_of_retired_words():
    quoted = "|".join(f"`_?{name}`" for name in RETIRED_NAMES.split())
    assert [
        f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for path in DOCUMENTS
        for text in [path.read_text()]
        for match in re.finditer("|".join((*RETIRED_PHRASES, quoted)), text.replace("\n", " "))
    ] == []


def test_docstrings_lead_with_a_verb_or_a_noun(trees):
    assert [
        f"{module}:{line}: {text.splitlines()[0]}"
        for module, tree in trees.items()
        for line, text in docstrings(tree)
        if re.match(RETIRED_OPENINGS, text)
    ] == []
