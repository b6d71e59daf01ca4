"""Gives the site the pages that are not in `docs/`: the README, the references and the notebook.

MkDocs runs it as a hook, see mkdocs.yml. Links of a page to files elsewhere in the repository, such
as examples, lead to copies of these. Of the built site every link is followed: one that leads
nowhere is a warning, and a strict build fails.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import json
import logging
import os
import re
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.structure.files import File, Files

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli.main import COMMANDS, parser

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOK = "examples/walkthrough.ipynb"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
# What is public in these.
MODULES = {"families": ["mapping"], "peft": ["load", "config", "merge", "save"]}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
LOG = logging.getLogger("mkdocs.hooks.site")  # what is under `mkdocs` counts in a strict build
NOT_A_PAGE = {"404.html"}  # its links start at the root of a server


def on_files(files: Files, config: Any) -> Files:
    """Adds pages and the files that they link to."""
    texts = {"index.md": _moved((REPOSITORY / "README.md").read_text())}
    for name in PAGES:
        texts[name] = _moved((REPOSITORY / name).read_text())
    texts["reference.md"] = _reference()
    texts["commands.md"] = _commands()
    texts[str(Path(NOTEBOOK).with_suffix(".md"))] = _notebook(files, config)
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    sources = [*texts.values()]
    sources += [page.read_text() for page in (REPOSITORY / "docs").glob("*.md")]
    linked = {target for text in sources for _, target, _ in LINK.findall(text)}
    for target in sorted(linked):
        place = _in_site(target)
        file = REPOSITORY / place
        if "://" not in target and file.is_file() and files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes links of `docs/` to the files above it those of the site, where all lie together."""
    return LINK.sub(lambda m: m[1] + _in_site(m[2]) + m[3], markdown)


def on_post_build(config: Any) -> None:
    """Warns of each link of the built site that leads nowhere."""
    for problem in dead_links(Path(config["site_dir"])):
        LOG.warning(problem)


def dead_links(site: Path) -> list[str]:
    """Return each link, picture and script of a built site that is not in it, with its page."""
    pages = {page: _Page(page) for page in sorted(site.rglob("*.html"))}
    dead = []
    for page, parsed in pages.items():
        for link in () if page.name in NOT_A_PAGE else parsed.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(address.fragment)
            known = pages.get(target)
            if not target.is_file() or (known and anchor and anchor not in known.anchors):
                dead.append(f"'{page.relative_to(site)}' links to '{link}', which is not there")
    return dead


class _Page(HTMLParser):
    """What a page links to, and what of it can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")


def _in_site(target: str) -> str:
    inner = target.removeprefix("../")
    return "index.md" if inner == "README.md" else inner if inner != target else target


def _moved(text: str) -> str:
    return LINK.sub(lambda m: m[1] + m[2].removeprefix("docs/") + m[3], text)


def _reference() -> str:
    """Return the page of all public names, each in its section, by the docstrings."""
    named = {name: getattr(osl, name) for name in osl.__all__ if not name.startswith("_")}
    for module, names in MODULES.items():
        parent = named.pop(module)
        named |= {f"{module}.{name}": getattr(parent, name) for name in names}
    sections: dict[str, list[str]] = {title: [] for title in ("Functions", "Classes", "Errors")}
    for name, value in named.items():
        title = "Functions"
        if inspect.isclass(value):
            title = "Errors" if issubclass(value, Exception) else "Classes"
        place = f"{value.__module__}.{value.__qualname__}"
        shown = [f"      {option}: osl.{name}" for option in ("heading", "toc_label")]
        sections[title] += [f"::: {place}", "    options:", *shown, ""]
    lines = ["# Reference", "", "`import orbax_safetensors_layout as osl`", ""]
    for title, parts in sections.items():
        lines += [f"## {title}", "", *parts]
    return "\n".join(lines) + "\n"


def _commands() -> str:
    """Return the page of all commands, as their `--help` shows them."""
    os.environ["COLUMNS"] = "100"  # of what is shown
    lines = ["# Commands", "", "What they are for is in [the command line](command_line.md).", ""]
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            parser().parse_args([command.name, "--help"])
        lines += [f"## {command.name}", "", "```text", shown.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


def _notebook(files: Files, config: Any) -> str:
    """The notebook as a page, with its pictures as files."""
    lines: list[str] = []
    for number, cell in enumerate(json.loads((REPOSITORY / NOTEBOOK).read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                name = f"examples/walkthrough-{number}.png"
                picture = base64.b64decode("".join(data["image/png"]))
                files.append(File.generated(config, name, content=picture))
                lines += [f"![What this cell draws]({PurePosixPath(name).name})", ""]
            elif text:
                lines += ["```text", text.rstrip(), "```", ""]
    return "\n".join(lines)
