"""Names and phrases that the package has given up for plainer ones do not come back.

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

PACKAGE = Path(__file__).parents[1] / "orbax_safetensors_layout"
MODULES = sorted(PACKAGE.rglob("*.py"))

RETIRED_NAMES = """
agreement alike band bands below brief checks companions computed contents design destination
destinations division facts fetches firsts fleet forecast holdings lease made mine most_told
nearest one origins publication publish publishing pulse refine refined refined_view refuse room
rooms settle sharing sides silent some spread survey tell telling told verb verbs want wanted wants
"""
RETIRED_PHRASES = (
    r"\balike\b",
    r"\bcan not\b",
    r"(?<![Tt]here )\b(is|are) no (?!longer|more)",
)
RETIRED_OPENINGS = r"(What|Who|Which|Of)\b"


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


def test_retired_names_are_gone(trees):
    modules = [path.stem for path in MODULES if path.stem in RETIRED_NAMES.split()]
    assert not modules
    assert [
        f"{module}:{line}: {name}"
        for module, tree in trees.items()
        for line, name in names(tree)
        if name.strip("_").lower() in RETIRED_NAMES.split()
    ] == []


def test_docstrings_errors_and_comments_are_free_of_retired_phrases(sources):
    assert [
        f"{module}:{line}: {match[0]!r} in {text[:80]!r}"
        for module, source in sources.items()
        for line, text in texts(source)
        for match in re.finditer("|".join(RETIRED_PHRASES), text)
    ] == []


def test_docstrings_lead_with_a_verb_or_a_noun(trees):
    assert [
        f"{module}:{line}: {text.splitlines()[0]}"
        for module, tree in trees.items()
        for line, text in docstrings(tree)
        if re.match(RETIRED_OPENINGS, text)
    ] == []
