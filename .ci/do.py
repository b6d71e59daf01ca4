#!/usr/bin/env python3
"""Sets up what a task needs and runs it. Needs Python 3.11 or newer and pip, nothing else.

python3 .ci/do.py quickstart [PATH]      install, run examples/quickstart.py
python3 .ci/do.py test [PYTEST ARGS]     install, run the whole test suite
python3 .ci/do.py test-oldest [...]      with the oldest supported dependencies, the tests of what
                                         calls them, without what is slow (all: tests -m "not soak")
python3 .ci/do.py lint                   install, run ruff and mypy
python3 .ci/do.py docs                   install, build the site into `site/`, test its links
python3 .ci/do.py beside                 resolve an installation beside Tunix, and beside MaxText
python3 .ci/do.py release [PYTEST ARGS]  build sdist and wheel, check them, install the wheel in an
                                         empty environment, run the quickstart and the tests out
                                         of the sdist there, and leave both in `dist/`

The environments are in `.venv` and `.venv-oldest` beside this folder (with OSL_VENV=path in
`path` and `path-oldest`) and are used again until pyproject.toml or the pins change.

`test` installs torch and transformers, too, where pip finds a CPU build of torch; elsewhere the
tests that need them are skipped. With OSL_TRANSFORMERS=1 it takes any build (PyPI's for Linux
brings several GB of CUDA libraries), and those tests fail where they would be skipped.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
PYPROJECT = REPOSITORY / "pyproject.toml"
OLDEST = REPOSITORY / ".ci" / "oldest.txt"
PACKAGE = "orbax_safetensors_layout"
RETRY_AFTER_SECONDS = (5, 30)
REQUIRE_TORCH = "OSL_TRANSFORMERS"
UV_SETTINGS = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS"}
# MaxText needs Python 3.12, this may be 3.11; its extra for TPUs has wheels for this alone.
FOR_MAXTEXT = ("--python-version=3.12", "--python-platform=x86_64-manylinux_2_31")


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
# The tests of what calls JAX, Orbax and the libraries of storage.
ROOMS = ("adapters", "conversion", "load", "lora", "multiprocess")
ROOMS += ("pytree", "reading", "save", "sharding", "storage")
FILES = ("mapping/test_live_arrays.py", "test_hf_to_jax.py", "test_readme.py")
CALLERS = tuple(f"tests/{path}" for path in (*ROOMS, *FILES))
# Of the soak set single tests take minutes.
LONG = ("-o", "timeout=3600", "-o", "faulthandler_timeout=3660")
TASKS = {
    "quickstart": Task("examples", (("examples/quickstart.py",),)),
    "test": Task("test", (PYTEST,), models=True, torch_extra="test-transformers"),
    "test-oldest": Task("test", ((*PYTEST, "-m", QUICK, *CALLERS),), models=True, oldest=True),
    "lint": Task(
        "dev",
        (("-m", "ruff", "check"), ("-m", "ruff", "format", "--check"), ("-m", "mypy")),
    ),
    # Without --quiet, which drops warnings before --strict counts them.
    "docs": Task(
        "docs",
        (
            ("-m", "mkdocs", "build", "--strict"),
            ("-m", "pytest", "--noconftest", "--quiet", "tests/test_site.py"),
        ),
    ),
}


@functools.cache
def clean_environment() -> dict[str, str]:
    """The caller's environment without what would mix foreign packages into ours.

    And without what keeps Python from storing what it compiles: uv leaves that to it.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    dropped += ("PYTHONDONTWRITEBYTECODE",)
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    quiet = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_MKDOCS_2_WARNING": "1"}
    # uv asks neither the system for certificates nor pip for its configuration.
    kept = {"UV_SYSTEM_CERTS": "1"} | kept | quiet
    asked = (sys.executable, "-m", "pip", "config", "list")
    listed = subprocess.run(asked, env=kept, capture_output=True, text=True, check=False).stdout
    for setting, value in re.findall(r"\.([a-z-]+)='(.*)'", listed):
        if setting in UV_SETTINGS:
            kept.setdefault(UV_SETTINGS[setting], ",".join(value.split()))
    return kept


def run(*command: str | Path, quiet: bool = False, folder: Path = REPOSITORY) -> int:
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), stdout=output, stderr=output, check=False
    ).returncode


def give_up(message: str) -> NoReturn:
    sys.exit(f"{Path(__file__).name}: {message}")


def folder(*, oldest: bool = False) -> Path:
    base = Path(os.environ.get("OSL_VENV") or REPOSITORY / ".venv").absolute()
    return base.with_name(f"{base.name}-oldest") if oldest else base


def python_in(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create(environment: Path) -> None:
    """Makes an environment of this Python, with uv, which takes a tenth of the time that pip does.

    Without `ensurepip` (Debian splits it off) it has no pip of its own.
    """
    if not python_matches(environment):
        pip = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
        if run(sys.executable, "-m", "venv", "--clear", *pip, environment):
            give_up(f"could not create a virtual environment in {environment}")
    run(*pip_command(environment, "install"), "uv")


def pip_command(environment: Path, command: str) -> list[str | Path]:
    """A command of pip, up to its arguments."""
    python = python_in(environment)
    if importlib.util.find_spec("ensurepip"):
        return [python, "-m", "pip", command, "--quiet"]
    return [sys.executable, "-m", "pip", "--python", python, command, "--quiet"]


def uv_command(environment: Path, command: str) -> list[str | Path]:
    """A command of uv, up to its arguments."""
    python = python_in(environment)
    return [python, "-m", "uv", "pip", command, "--quiet", f"--python={python}"]


def install(environment: Path, *arguments: str) -> None:
    """Installs, again when it fails: package indexes and networks have bad moments.

    First with uv, then with pip, whose configuration may name what uv does not find.
    """
    if run(*uv_command(environment, "install"), *arguments) == 0:
        return
    for pause in (*RETRY_AFTER_SECONDS, None):
        if run(*pip_command(environment, "install"), *arguments) == 0:
            return
        if pause is not None:
            print(f"pip failed, next try in {pause} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    give_up(f"pip install {' '.join(arguments)} failed")


def resolve_beside() -> int:
    """That there are versions of all that the package and its neighbours require, together."""
    environment = folder()
    create(environment)
    tunix, maxtext = pyproject()["dependency-groups"]["beside"]
    with tempfile.TemporaryDirectory() as scratch:
        asked, found = Path(scratch) / "asked.in", Path(scratch) / "found.txt"
        for neighbour, target in ((tunix, ()), (maxtext, FOR_MAXTEXT)):
            asked.write_text(f".\n{neighbour}\n")
            command = uv_command(environment, "compile")
            if code := run(*command, *target, asked, f"--output-file={found}"):
                return code
    return 0


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


def install_for(task: Task, environment: Path, *package: str) -> None:
    """Installs all that a task needs, the package from what the last of `package` names."""
    extra = extra_for(task, environment)
    target = f"{package[-1]}[{extra}]" if extra else package[-1]
    print(f"installing {target} into {environment}", flush=True)
    constraints = ("--constraint", str(OLDEST)) if task.oldest else ()
    install(environment, *constraints, *package[:-1], target)
    groups = pyproject()["dependency-groups"]
    if task.models:
        install(environment, "--no-deps", *groups["models"])
    if extra and extra == task.torch_extra:
        install(environment, "--no-deps", *groups["tunix"])
        # Some are built from source, or for few platforms; each is for one test.
        for packer in groups["packers"]:
            if run(*uv_command(environment, "install"), "--no-deps", packer):
                print(f"{packer} cannot be installed: its test will be skipped", flush=True)


def release(arguments: list[str]) -> int:
    """What a user gets of a version, tried as a user has it: the wheel, and the sdist's tests."""
    with tempfile.TemporaryDirectory() as scratch:
        tools, empty = Path(scratch) / "tools", Path(scratch) / "empty"
        built, sources = Path(scratch) / "dist", Path(scratch) / "sources"
        create(tools)
        install(tools, "build", "twine")
        if code := run(
            python_in(tools), "-m", "build", "--outdir", built
        ):  # the wheel of the sdist
            return code
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        if code := run(python_in(tools), "-m", "twine", "check", "--strict", wheel, sdist):
            return code
        with tarfile.open(sdist) as archive:
            archive.extractall(sources, filter="data")
        (unpacked,) = sources.iterdir()
        create(empty)
        for name, command in (("quickstart", ()), ("test", arguments)):
            task = TASKS[name]
            install_for(task, empty, str(wheel))
            use_installed(empty, unpacked)
            for program in task.commands:
                if code := run(python_in(empty), *program, *command, folder=unpacked):
                    return code
        shutil.copytree(built, REPOSITORY / "dist", dirs_exist_ok=True)
        print(f"{wheel.name} and {sdist.name} are in dist/", flush=True)
    return 0


def use_installed(environment: Path, unpacked: Path) -> None:
    """Makes the wheel's files those that tests find beside themselves, too, if it has them all."""
    schemes = {"base": str(environment), "platbase": str(environment)}
    installed = Path(sysconfig.get_path("purelib", "venv", schemes)) / PACKAGE
    beside = unpacked / PACKAGE
    if beside.is_symlink():
        return
    for file in beside.rglob("*"):
        copy = installed / file.relative_to(beside)
        if file.is_file() and not (copy.is_file() and copy.read_bytes() == file.read_bytes()):
            give_up(f"the wheel lacks {file.relative_to(unpacked)}, or has another")
    shutil.rmtree(beside)
    beside.symlink_to(installed, target_is_directory=True)


def prepare(task: Task) -> Path:
    """The environment's Python, with all that the task needs."""
    environment = folder(oldest=task.oldest)
    stamp = environment / f"ready-{task.extra or 'package'}"
    if stamp.is_file() and stamp.read_text() == fingerprint(task):
        return python_in(environment)
    create(environment)
    install_for(task, environment, "--editable", ".")
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
        return resolve_beside()
    if arguments[:1] == ["release"]:
        return release(arguments[1:])
    if not arguments or arguments[0] not in TASKS:
        print(__doc__, file=sys.stderr)
        return 2
    task = TASKS[arguments[0]]
    if not task.torch_extra:
        os.environ.pop(REQUIRE_TORCH, None)
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
