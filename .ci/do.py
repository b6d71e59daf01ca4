#!/usr/bin/env python3
"""Sets up what a task needs and runs it. Needs Python 3.11 or newer and pip, nothing else.

python3 .ci/do.py quickstart [PATH]      install, run examples/quickstart.py
python3 .ci/do.py test [PYTEST ARGS]     install, run the whole test suite
python3 .ci/do.py test-oldest [...]      the same with the oldest supported dependencies, without
                                         what is slow (-m "not soak": with it)
python3 .ci/do.py lint                   install, run ruff and mypy
python3 .ci/do.py docs                   install, build the site into `site/`
python3 .ci/do.py beside                 resolve an installation beside Tunix, and beside MaxText
python3 .ci/do.py install TASK           what one of these needs, to run it later

The environments are in `.venv`, `.venv-oldest` and `.venv-beside` beside this folder (with
OSL_VENV=path in `path`, `path-oldest`, ...) and are used again until pyproject.toml or the pins
change.

`test` installs torch and transformers, too, where pip finds a CPU build of torch; elsewhere the
tests that need them are skipped. With OSL_TRANSFORMERS=1 it takes any build (PyPI's for Linux
brings several GB of CUDA libraries), and those tests fail where they would be skipped.
"""

import email
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
PYPROJECT = REPOSITORY / "pyproject.toml"
OLDEST = REPOSITORY / ".ci" / "oldest.txt"
RETRY_AFTER_SECONDS = (5, 30)
REQUIRE_TORCH = "OSL_TRANSFORMERS"
RESOLVE = ("install", "--dry-run", "--ignore-installed")
# MaxText needs Python 3.12, this may be 3.11.
FOR_3_12 = ("--python-version=3.12", "--only-binary=:all:", "--ignore-requires-python")


class Task(NamedTuple):
    """What to install and what to run.

    Attributes:
        extra: The extra of the package to install with it; "" is none.
        commands: Each the arguments of the environment's Python.
        models: Whether the published weights of the tests are needed.
        torch_extra: The extra to install in place of `extra` where torch is to be had.
        oldest: Whether to install the oldest supported dependencies.
    """

    extra: str
    commands: tuple[tuple[str, ...], ...]
    models: bool = False
    torch_extra: str = ""
    oldest: bool = False


PYTEST = ("-m", "pytest", "--numprocesses=auto", "--dist=loadfile")
QUICK = "not soak and not slow"
# Of the soak set single tests take minutes.
LONG = ("-o", "timeout=3600", "-o", "faulthandler_timeout=3660")
TASKS = {
    "quickstart": Task("examples", (("examples/quickstart.py",),)),
    "test": Task("test", (PYTEST,), models=True, torch_extra="test-transformers"),
    "test-oldest": Task("test", ((*PYTEST, "-m", QUICK),), models=True, oldest=True),
    "lint": Task(
        "dev",
        (("-m", "ruff", "check"), ("-m", "ruff", "format", "--check"), ("-m", "mypy")),
    ),
    "docs": Task("docs", (("-m", "mkdocs", "--quiet", "build", "--strict"),)),
}


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would mix foreign packages into ours."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    quiet = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_MKDOCS_2_WARNING": "1"}
    return kept | quiet


def run(*command: str | Path, quiet: bool = False) -> int:
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), stdout=output, stderr=output, check=False
    ).returncode


def give_up(message: str) -> NoReturn:
    sys.exit(f"{Path(__file__).name}: {message}")


def folder(suffix: str = "") -> Path:
    base = Path(os.environ.get("OSL_VENV") or REPOSITORY / ".venv").absolute()
    return base.with_name(base.name + suffix)


def python_in(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create(environment: Path) -> None:
    """A fresh environment; without `ensurepip` (Debian splits it off) it has no pip of its own."""
    pip = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
    if run(sys.executable, "-m", "venv", "--clear", *pip, environment):
        give_up(f"could not create a virtual environment in {environment}")


def pip_command(environment: Path, command: str) -> list[str | Path]:
    """A command of pip, up to its arguments."""
    python = python_in(environment)
    if importlib.util.find_spec("ensurepip"):
        return [python, "-m", "pip", command, "--quiet"]
    return [sys.executable, "-m", "pip", "--python", python, command, "--quiet"]


def pip(environment: Path, command: str, *arguments: str) -> None:
    """Runs pip, again when it fails: package indexes and networks have bad moments."""
    for pause in (*RETRY_AFTER_SECONDS, None):
        if run(*pip_command(environment, command), *arguments) == 0:
            return
        if pause is not None:
            print(f"pip {command} failed, next try in {pause} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    give_up(f"pip {command} {' '.join(arguments)} failed")


def resolve_beside() -> None:
    """That pip finds versions of all that the package and its neighbours require, together."""
    environment = folder("-beside")  # stays empty
    create(environment)
    tunix, maxtext = pyproject()["dependency-groups"]["beside"]
    pip(environment, *RESOLVE, ".", tunix)
    with tempfile.TemporaryDirectory() as scratch:
        target = f"--target={scratch}"  # pip asks for one beside --python-version
        pip(environment, *RESOLVE, *FOR_3_12, target, ".", maxtext)
        # To resolve all 235 requirements for a TPU takes ten minutes: here they bound ours.
        pip(environment, "download", "--no-deps", *FOR_3_12, f"--dest={scratch}", maxtext)
        (wheel,) = Path(scratch).glob("*.whl")
        bounds = Path(scratch) / "bounds.txt"
        bounds.write_text("\n".join(requirements(wheel, extra="tpu")))
        pip(environment, *RESOLVE, *FOR_3_12, target, ".", f"--constraint={bounds}")


def requirements(wheel: Path, extra: str) -> list[str]:
    """What a wheel requires for an extra, without markers and what is not a constraint."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = [text.split(";") for text in metadata.get_all("Requires-Dist", ())]
    wanted = [text.strip() for text, *marker in found if f"extra == '{extra}'" in str(marker)]
    if not wanted:
        give_up(f"{wheel.name} has no requirements for {extra}")
    return [text for text in wanted if "[" not in text and "@" not in text]


def pyproject() -> dict[str, Any]:
    import tomllib  # here, so that an older Python reaches the message at the end of this file

    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def torch_required() -> bool:
    return os.environ.get(REQUIRE_TORCH) == "1"


def extra_for(task: Task, environment: Path) -> str:
    """The extra to install: that with torch where it is required, or is to be had without CUDA."""
    if not task.torch_extra or torch_required():
        return task.torch_extra or task.extra
    extra = pyproject()["project"]["optional-dependencies"][task.torch_extra]
    (torch,) = (requirement for requirement in extra if requirement.startswith("torch=="))
    cpu_build = f"{torch}+cpu" if sys.platform == "linux" else torch
    asked = (*pip_command(environment, "install"), "--dry-run", "--no-deps", cpu_build)
    if run(*asked, quiet=True) == 0:
        return task.torch_extra
    print(f"pip finds no {cpu_build}: the tests that need torch will be skipped", flush=True)
    return task.extra


def fingerprint(task: Task) -> str:
    """Changes with everything that decides what is installed."""
    pins = OLDEST.read_bytes() if task.oldest else b""
    wanted = repr((task, torch_required())).encode()
    parts = (wanted, sys.version.encode(), PYPROJECT.read_bytes(), pins)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def prepare(task: Task) -> Path:
    """The environment's Python, with all that the task needs."""
    environment = folder("-oldest" if task.oldest else "")
    stamp = environment / f"ready-{task.extra or 'package'}"
    if stamp.is_file() and stamp.read_text() == fingerprint(task):
        return python_in(environment)
    if not python_matches(environment):
        create(environment)
    extra = extra_for(task, environment)
    target = f".[{extra}]" if extra else "."
    print(f"installing {target} into {environment}", flush=True)
    constraints = ("--constraint", str(OLDEST)) if task.oldest else ()
    # Python compiles what is imported; to compile all of torch takes a minute.
    pip(environment, "install", "--no-compile", *constraints, "--editable", target)
    groups = pyproject()["dependency-groups"]
    if task.models:
        pip(environment, "install", "--no-deps", *groups["models"])
    if extra and extra == task.torch_extra:
        pip(environment, "install", "--no-deps", *groups["tunix"])
        # Some are built from source, or for few platforms; each is for one test.
        for packer in groups["packers"]:
            if run(*pip_command(environment, "install"), "--no-deps", packer):
                print(f"pip cannot install {packer}: its test will be skipped", flush=True)
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
    if arguments == ["beside"]:
        resolve_beside()
        return 0
    is_run = arguments[:1] != ["install"]
    arguments = arguments if is_run else arguments[1:]
    if not arguments or arguments[0] not in TASKS:
        print(__doc__, file=sys.stderr)
        return 2
    task = TASKS[arguments[0]]
    if not task.torch_extra:
        os.environ.pop(REQUIRE_TORCH, None)
    if not is_run:
        prepare(task)
        return 0
    if len(task.commands) > 1 and arguments[1:]:
        give_up(f"{arguments[0]} takes no arguments")
    python = prepare(task)
    # Commands run in the repository; a path is meant from where the caller is.
    given = [str(Path(a).absolute()) if Path(a).exists() else a for a in arguments[1:]]
    given += LONG if "soak" in given else ()
    codes = [run(python, *command, *given) for command in task.commands]
    return max(codes, key=abs)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - this check is for the others
        give_up(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    sys.exit(main(sys.argv[1:]))
