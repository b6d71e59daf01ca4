#!/usr/bin/env python3
"""Sets up what a task needs and runs it. Needs Python 3.11 or newer and pip, nothing else.

python3 .ci/do.py quickstart [PATH]      install, run examples/quickstart.py
python3 .ci/do.py test [PYTEST ARGS]     install, run the whole test suite
python3 .ci/do.py test-oldest [...]      the same with the oldest supported dependencies
python3 .ci/do.py lint                   install, run ruff and mypy

The environments stand in `.venv` and `.venv-oldest` beside this folder (with OSL_VENV=path in
`path` and `path-oldest`) and are used again until pyproject.toml or the pins change.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
PYPROJECT = REPOSITORY / "pyproject.toml"
OLDEST = REPOSITORY / ".ci" / "oldest.txt"
RETRY_AFTER_SECONDS = (5, 30)


class Task(NamedTuple):
    """What to install and what to run.

    Attributes:
        extra: The extra of the package to install with it; "" is none.
        commands: Each the arguments of the environment's Python.
        models: Whether the published weights of the tests are needed.
        oldest: Whether to install the oldest supported dependencies.
    """

    extra: str
    commands: tuple[tuple[str, ...], ...]
    models: bool = False
    oldest: bool = False


PYTEST = ("-m", "pytest")
TASKS = {
    "quickstart": Task("", (("examples/quickstart.py",),)),
    "test": Task("test", (PYTEST,), models=True),
    "test-oldest": Task("test", (PYTEST,), models=True, oldest=True),
    "lint": Task(
        "dev",
        (("-m", "ruff", "check"), ("-m", "ruff", "format", "--check"), ("-m", "mypy")),
    ),
}


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would mix foreign packages into ours."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str | Path) -> int:
    return subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), check=False).returncode


def give_up(message: str) -> NoReturn:
    sys.exit(f"{Path(__file__).name}: {message}")


def folder(task: Task) -> Path:
    base = Path(os.environ.get("OSL_VENV") or REPOSITORY / ".venv").absolute()
    return base.with_name(f"{base.name}-oldest") if task.oldest else base


def python_in(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create(environment: Path) -> None:
    """A fresh environment; without `ensurepip` (Debian splits it off) it has no pip of its own."""
    pip = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
    if run(sys.executable, "-m", "venv", "--clear", *pip, environment):
        give_up(f"could not create a virtual environment in {environment}")


def install(environment: Path, *arguments: str) -> None:
    """`pip install`, tried again when it fails: package indexes and networks have bad moments."""
    python = python_in(environment)
    pip: list[str | Path] = [python, "-m", "pip"]
    if not importlib.util.find_spec("ensurepip"):
        pip = [sys.executable, "-m", "pip", "--python", python]
    for pause in (*RETRY_AFTER_SECONDS, None):
        if run(*pip, "install", "--quiet", *arguments) == 0:
            return
        if pause is not None:
            print(f"pip install failed, next try in {pause} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    give_up(f"pip install {' '.join(arguments)} failed")


def fingerprint(task: Task) -> str:
    """Changes with everything that decides what is installed."""
    pins = OLDEST.read_bytes() if task.oldest else b""
    parts = (repr(task).encode(), sys.version.encode(), PYPROJECT.read_bytes(), pins)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def prepare(task: Task) -> Path:
    """The environment's Python, with all that the task needs."""
    environment = folder(task)
    stamp = environment / f"ready-{task.extra or 'package'}"
    target = f".[{task.extra}]" if task.extra else "."
    if stamp.is_file() and stamp.read_text() == fingerprint(task):
        return python_in(environment)
    print(f"installing {target} into {environment}", flush=True)
    if not python_matches(environment):
        create(environment)
    constraints = ("--constraint", str(OLDEST)) if task.oldest else ()
    install(environment, *constraints, "--editable", target)
    if task.models:
        import tomllib  # here, so that an older Python reaches the message at the end of this file

        groups = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["dependency-groups"]
        install(environment, "--no-deps", *groups["models"])
    stamp.write_text(fingerprint(task))
    return python_in(environment)


def python_matches(environment: Path) -> bool:
    """Whether an environment is there and was made by the Python that runs this."""
    python = python_in(environment)
    if not python.is_file():
        return False
    asked = (python, "-c", "import sys; print(sys.version)")
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return answer.stdout.strip() == sys.version.strip()


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in TASKS:
        print(__doc__, file=sys.stderr)
        return 2
    task = TASKS[arguments[0]]
    if len(task.commands) > 1 and arguments[1:]:
        give_up(f"{arguments[0]} takes no arguments")
    python = prepare(task)
    # Commands run in the repository; a path is meant from where the caller stands.
    given = [str(Path(a).absolute()) if Path(a).exists() else a for a in arguments[1:]]
    codes = [run(python, *command, *given) for command in task.commands]
    return max(codes, key=abs)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - this check is for the others
        give_up(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    sys.exit(main(sys.argv[1:]))
