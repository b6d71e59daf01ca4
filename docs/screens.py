#!/usr/bin/env python3
"""Makes the screens of the command line in the documentation, and its picture.

    python docs/screens.py            rewrites docs/command_line.md and docs/reads.png
    python docs/screens.py --check    says whether the screens are what the tool prints now

The checkpoint is of the size of Llama-3.1-405B: an index, real headers and holes, which take no
disk. A screen stands there between `<!-- screen: ID -->` and the next `<!-- end -->`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "command_line.md"
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
}
DRAW = f"plan {CLUSTER} {SPEC} --plot reads.png --plot-files model-00003-* --quiet"
_WIDTH = 96


@contextlib.contextmanager
def checkpoint() -> Iterator[None]:
    """Inside the block the working folder has the checkpoint."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    try:
        from llama405b import make_llama_index
    finally:
        sys.path.remove(str(REPOSITORY / "benchmarks"))
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        make_llama_index(Path(folder) / "Llama-3.1-405B")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def printed(command: str) -> str:
    """What a command prints, with paths as a reader would have them."""
    from orbax_safetensors_layout.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(shlex.split(command))
    if code:
        raise SystemExit(f"{command} has failed with {code}")
    return out.getvalue().replace(f"{os.path.realpath(os.getcwd())}/", "").rstrip("\n")


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


def screen(name: str) -> str:
    """A screen as it stands in the page."""
    command = SCREENS[name]
    return f"```text\n$ {shown(command)}\n{printed(command)}\n```"


def with_screens(text: str) -> str:
    """The page with all its screens made anew."""
    for name in SCREENS:
        pattern = re.compile(rf"(<!-- screen: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        made = screen(name)
        text, count = pattern.subn(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for the screen {name!r}")
    return text


def draw(target: Path) -> None:
    """Draws the picture."""
    printed(DRAW)
    target.write_bytes(Path("reads.png").read_bytes())


def main() -> None:
    """Rewrites the page, or checks it."""
    before = PAGE.read_text(encoding="utf-8")
    with checkpoint():
        after = with_screens(before)
        if "--check" in sys.argv[1:]:
            raise SystemExit(f"{PAGE.name}: python docs/screens.py" if before != after else 0)
        draw(PICTURE)
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
