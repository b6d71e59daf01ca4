#!/usr/bin/env python3
"""Makes the screens of the command line in the documentation, and its picture.

    python docs/screens.py            rewrites docs/command_line.md and docs/reads.png
    python docs/screens.py --check    says whether the screens are what the tool prints now

The checkpoint is of the size of Llama-3.1-405B: an index, real headers and holes, which take no
disk; one of the same form and 132 MB is converted. Of stderr the messages are shown, not the
progress, whose times differ. A screen is in a page between `<!-- screen: ID -->` and the
next `<!-- end -->`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = (REPOSITORY / "docs" / "command_line.md",)
PICTURE = REPOSITORY / "docs" / "reads.png"
PROGRAM = "orbax-safetensors"

CLUSTER = (
    "Llama-3.1-405B --mesh fsdp=64,tensor=4 --hosts 64 --latency 1ms --bandwidth 2GB/s"
    " --concurrency 32"
)
SPEC = (
    "--spec \"'.*(q|k|v|gate|up)_proj.weight' = tensor,fsdp\""
    " --spec \"'.*(o|down)_proj.weight' = fsdp,tensor\" --spec \"'.*' = auto\""
)
SCREENS = {
    "inspect": "inspect Llama-3.1-405B",
    "plan": f"plan {CLUSTER} {SPEC}",
    "compare": f"plan {CLUSTER} --compare '--mesh fsdp=256,tensor=4 --hosts 256'",
    "convert": "convert Llama-small llama-orbax --mesh fsdp=16,tensor=4"
    " --spec \"'.*norm.weight' = replicated\" --spec \"'.*' = fsdp,tensor\"",
}
DRAW = f"plan {CLUSTER} {SPEC} --plot reads.png --plot-files model-00003-* --quiet"
_WIDTH = 96


@contextlib.contextmanager
def checkpoint() -> Iterator[None]:
    """Inside the block the working folder has the checkpoint."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    try:
        from deepseek import make_index
        from llama405b import llama_tensors, make_llama_index
    finally:
        sys.path.remove(str(REPOSITORY / "benchmarks"))
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        make_llama_index(Path(folder) / "Llama-3.1-405B")
        make_index(Path(folder) / "Llama-small", llama_tensors(layers=4, scale=16), files=2)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def printed(command: str) -> str:
    """What a command prints, with paths as a reader would have them."""
    from orbax_safetensors_layout.cli import main

    before = set(os.listdir())
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(shlex.split(command))
    if code:
        raise SystemExit(f"{command} has failed with {code}:\n{out.getvalue()}")
    for name in set(os.listdir()) - before:
        if os.path.isdir(name):
            shutil.rmtree(name)
    text = re.sub(r"^(\w+: )? *[0-9]+%  .*\n", "", out.getvalue(), flags=re.MULTILINE)
    return text.replace(f"{os.path.realpath(os.getcwd())}/", "").rstrip("\n")


def shown(command: str) -> str:
    """A command as a reader types it, over several lines where it is long."""
    lines = [PROGRAM]
    for part in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", command):
        joins = not part.startswith("--") and lines[-1].rpartition(" ")[2].startswith("--")
        if len(lines[-1]) + len(part) + 1 > _WIDTH - 2 and not joins:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


@functools.cache
def screen(name: str) -> str:
    """A screen as it is in a page."""
    command = SCREENS[name]
    return f"```text\n$ {shown(command)}\n{printed(command)}\n```"


def with_screens(text: str) -> str:
    """A page with all its screens made anew."""
    pattern = re.compile(r"(<!-- screen: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{screen(found[2])}\n{found[3]}", text)


def draw(target: Path) -> None:
    """Draws the picture."""
    printed(DRAW)
    target.write_bytes(Path("reads.png").read_bytes())


def main() -> None:
    """Rewrites the pages, or checks them."""
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    with checkpoint():
        after = {page: with_screens(text) for page, text in before.items()}
        if "--check" in sys.argv[1:]:
            old = [page.name for page in PAGES if before[page] != after[page]]
            raise SystemExit(f"{', '.join(old)}: python docs/screens.py" if old else 0)
        draw(PICTURE)
    for page, text in after.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
