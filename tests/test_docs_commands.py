"""The commands of the README and of `docs/`, and the Python there that needs a bucket or torch.

A line of a shell block, a line after `$` on a screen, and code in a sentence that begins with a
program are commands. Of this package's each is parsed, and runs where what it names can be made
here. Not run, and why:

- with SOURCE and TARGET, or parts of commands: they are forms, and are parsed where they are whole;
- on Llama-3.1-405B and Llama-small: tests/cli/test_screens.py runs them, and compares what they
  print;
- `pip install`: they would change the environment; their extras exist;
- `.ci/do.py`: `.ci/run` and the workflows run them; their names exist;
- `benchmarks/`: minutes to hours, they print the documented figures; their files exist;
- `hf`, `python3 -m venv` and `export`: not of this package; they are of a fixed list.

`python` blocks run in tests/test_readme.py.
"""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from backends import running
from checkpoints import assert_same_bits, nested
from documents import README, TENSORS, TEXTS, blocks, save_llama
from libraries import need
from programs import REPOSITORY

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.cli.main import parser

PROGRAM = "orbax-safetensors"
PAGES = TEXTS | {
    REPOSITORY / name: (REPOSITORY / name).read_text()
    for name in ("CONTRIBUTING.md", "SECURITY.md")
}
SHELLS = ("sh",)
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Neither whole nor to be parsed.
PARTS = {f"{PROGRAM} {rest}" for rest in ("plan --plot", "convert", "COMMAND --help")}
# What is not the package's, apart from what `known` looks at.
FOREIGN = {
    "export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8",
    "hf download TinyLlama/TinyLlama-1.1B-Chat-v1.0 --local-dir llama",
    "hf download ... --local-dir",
    "hf auth login",
    "hf buckets sync",
    "pip install safetensors",
    "pip install gcsfs",
    "pip install .",
    "python3 -m venv .venv",
    ". .venv/bin/activate",
}


def commands(text: str) -> list[str]:
    """The commands of a page, each on one line and without its comment."""
    found = []
    for block in blocks(text):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "text":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif block.language not in SHELLS:
            continue
        found += [part for line in lines for part in line.split(" && ")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    start = re.compile(r"(orbax-safetensors|pip|python3?|hf|git|export) ")
    found += [code for code in re.findall(r"`([^`]+)`", prose) if start.match(code)]
    plain = (" ".join(shlex.join(shlex.split(line, comments=True)).split()) for line in found)
    return [line for line in plain if line]


COMMANDS = {page: commands(text) for page, text in PAGES.items()}
OURS = sorted({line for lines in COMMANDS.values() for line in lines if line.startswith(PROGRAM)})
OTHERS = sorted({line for lines in COMMANDS.values() for line in lines}.difference(OURS))
WHOLE = [line for line in OURS if line not in PARTS]
# Forms, and what tests/cli/test_screens.py runs.
NOT_RUN = ("SOURCE", "Llama-3.1-405B", "Llama-small")
RUN = [line for line in WHOLE if not any(word in line.split() for word in NOT_RUN)]


def test_there_are_commands():
    assert set(OURS) >= PARTS
    assert len(RUN) >= 10
    assert {line.split()[1] for line in RUN} == {
        "inspect",
        "plan",
        "verify",
        "convert",
        "consolidate",
        "families",
    }


@pytest.mark.parametrize("line", WHOLE)
def test_commands_are_what_the_program_takes(line):
    parsed = parser().parse_args(shlex.split(line)[1:])
    assert parsed.command.name == line.split()[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the commands name."""
    folder = tmp_path_factory.mktemp("made")
    llama = save_llama(folder / "llama")
    osl.save(folder / "export", osl.load(llama))
    osl.save(folder / "pieces", osl.load(llama), options=osl.WriteOptions(layout="sharded"))
    # The file that the README speaks of: the mapping "above", and the import.
    (block,) = (b for b in blocks(TEXTS[README]) if "osl.Mapping(" in b.text)
    text = block.text.partition("\n\n\ndef leaf(")[0]
    (folder / "maps.py").write_text(f"import orbax_safetensors_layout as osl\n\n{text}\n")
    mapping = runpy.run_path(str(folder / "maps.py"))["mapping"]
    state = {"params": osl.load(llama, mapping=mapping), "step": 10}
    with ocp_v1.training.Checkpointer(folder / "run", context=osl.context("state")) as run:
        run.save(10, {"params": nested(state["params"]), "step": 10})
    maxtext = osl.families.mapping(llama, target="maxtext")
    params = nested(osl.load(llama, mapping=maxtext))
    with ocp.CheckpointManager(folder / "runs" / "a") as manager:
        manager.save(1000, args=ocp.args.StandardSave({"params": params, "step": 1000}))
    return folder


@pytest.mark.parametrize("line", RUN)
def test_commands_run(made, tmp_path, monkeypatch, capsys, line):
    for path in made.iterdir():
        name = "exported" if path.name == "export" and "verify" in line else path.name
        (tmp_path / name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    (target,) = {path.name for path in tmp_path.iterdir()} - before or {None}
    _, verb, *rest = shlex.split(line)
    if verb in ("convert", "consolidate"):
        assert target == rest[1]
    if target in ("exported", "step-1000"):
        exported = osl.load(target)
        assert exported.keys() == TENSORS.keys()
        if "--mapping" not in rest or "maps.py:mapping" in rest:  # others scale, and round
            for name, tensor in TENSORS.items():
                np.testing.assert_array_equal(
                    exported[name].astype("f4"), tensor.astype("f4"), name
                )


@pytest.mark.parametrize("line", OTHERS)
def test_other_commands_are_known(line):
    program, *rest = shlex.split(line)
    if line in FOREIGN:
        return
    if program == "pip":
        (extra,) = re.fullmatch(r"\.\[([\w-]+)\]", rest[1]).groups()
        assert rest[0] == "install"
        assert extra in PYPROJECT["optional-dependencies"]
        return
    assert program in ("python", "python3")
    if rest[0] == ".ci/do.py":
        program = runpy.run_path(str(REPOSITORY / ".ci" / "do.py"))
        assert rest[1] in {*program["TASKS"], "beside", "release"}
    else:
        assert rest[0].startswith("benchmarks/")
        assert (REPOSITORY / rest[0]).is_file()


# The blocks of Python that test_readme.py's program has no bucket for, or no model.

SPECIAL = {
    (p.name, b.text) for p, text in TEXTS.items() for b in blocks(text) if b.language == "py"
}


def special(page: str, word: str) -> str:
    (text,) = (text for name, text in SPECIAL if name == page and word in text)
    return text


def test_the_other_blocks_are_those_that_run_here():
    languages = {block.language for text in PAGES.values() for block in blocks(text)}
    assert languages == {"python", "py", "text", *SHELLS}
    places = (("load.md", "gs://"), ("families.md", "leave_out"), ("families.md", "vision=True"))
    assert {(page, special(page, word)) for page, word in places} == SPECIAL


def test_buckets(tmp_path, monkeypatch):
    flat = {"a": np.arange(12, dtype=np.float32).reshape(3, 4)}
    with running("gs") as gs, running("s3") as s3:
        for name, value in (gs.environment | s3.environment).items():
            monkeypatch.setenv(name, value)
        osl.save("gs://bucket/llama", flat)
        names = {"osl": osl, "abstract": osl.load("gs://bucket/llama")}
        exec(special("load.md", "gs://"), names)
        assert_same_bits(osl.load("s3://bucket/export")["a"], flat["a"])


@pytest.mark.filterwarnings("ignore")  # of torch and transformers
def test_models_with_vision(tmp_path, monkeypatch):
    need("torch")
    need("transformers")
    from vision_models import make_whole

    folder, _, tensors, _ = make_whole("gemma3", tmp_path / "gemma3")
    monkeypatch.chdir(tmp_path)
    names = {"osl": osl, "folder": folder}
    exec(special("families.md", "vision=True"), names)
    with_vision = osl.load(folder, mapping=names["mapping"])
    names["mapping"] = osl.families.mapping(folder, target="maxtext")
    names["model"] = osl.load(folder, mapping=names["mapping"])
    assert with_vision.keys() > names["model"].keys()
    exec(special("families.md", "leave_out"), names)
    whole = osl.load("whole")
    assert whole.keys() == tensors.keys()
    for name in names["vision"]:
        assert any(osl.load(folder, only=name))
    for name, array in osl.load(folder, only=names["vision"]).items():
        assert_same_bits(whole[name], array)
