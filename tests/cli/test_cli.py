"""The command line, as a shell runs it."""

import argparse
import importlib
import json
import os
import signal
import tomllib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits
from command_line import run

import orbax_safetensors_layout as osl
from orbax_safetensors_layout import cli
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.cli.main import COMMANDS


def test_consolidate(tmp_path):
    tree = {"a": np.arange(12.0).reshape(3, 4), "b": {"c": np.arange(3)}}
    osl.save(tmp_path / "pieces", tree, options=osl.WriteOptions(layout="sharded"))
    done = run("consolidate", tmp_path / "pieces", tmp_path / "out", "--max-file-bytes", "30", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    stored = {}
    for file in (tmp_path / "out").glob("model-*.safetensors"):
        stored |= safetensors.numpy.load_file(file)
    assert_same_bits(stored["a"], tree["a"])
    assert_same_bits(stored["b.c"], tree["b"]["c"])
    assert (tmp_path / "pieces" / "shard-00001-of-00001.safetensors").exists()
    done = run("consolidate", tmp_path / "pieces")
    assert done.returncode == 0
    assert "100%" in done.stderr
    assert_same_bits(osl.load(tmp_path / "pieces")["a"], tree["a"])


def test_errors_take_one_line(tmp_path):
    (tmp_path / "whole").mkdir()
    safetensors.numpy.save_file({"a": np.arange(3)}, tmp_path / "whole" / "model.safetensors")
    done = run("consolidate", tmp_path / "whole")
    assert done.returncode == 1
    assert done.stderr.startswith("orbax-safetensors: the checkpoint is not stored in pieces")
    assert done.stderr.count("\n") == 1
    assert "Traceback" in run("consolidate", tmp_path / "whole", "--debug").stderr
    for arguments in (("consolidate",), ("nothing",), ("plan", "x", "--mesh", "foo=")):
        done = run(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("orbax-safetensors: ")
        assert done.stderr.endswith(" (see --help)\n")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_verb_has_help_with_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main([command.name, "--help"])
    assert not stopped.value.code
    shown = capsys.readouterr().out
    assert "example" in shown
    assert max(map(len, shown.splitlines())) <= 80
    typed = shown.replace(" \\\n     ", "")  # as a shell joins them
    for example in command.examples:
        assert f"  orbax-safetensors {example}" in typed
        assert example.split()[0] == command.name


def test_the_help_of_all_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("inspct here", "orbax-safetensors: argument COMMAND: invalid choice: 'inspct'"),
        ("plan here --mesh foo", "orbax-safetensors: plan: argument --mesh: 'foo' is not a mesh;"),
        (
            "plan here --mesh x=2 --compare=--mesh=x",
            "orbax-safetensors: --compare: argument --mesh",
        ),
        ("verify", "orbax-safetensors: verify: the following arguments are required: path"),
    ],
)
def test_misuse_fits_80_columns_without_the_usage(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("orbax_safetensors_layout.cli.output._columns", lambda stream: 80)
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 3
    shown = " ".join(text.split())
    assert shown.startswith(said)
    assert shown.endswith("(see --help)")


def test_without_a_command_all_are_named(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n    {command.name}" in shown for command in COMMANDS)


def test_the_version_and_the_families(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert not stopped.value.code
    assert capsys.readouterr().out == f"orbax-safetensors {osl.__version__}\n"
    assert main(["families", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {name: tuple(families) for name, families in listed.items()} == osl.families.TARGETS
    assert main(["families"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["family", *osl.families.TARGETS]
    for family in osl.families.TARGETS["plain"]:
        assert f"\n{family} " in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (osl.FormatError("bad\nbytes"), 1),
        (OSError("no disk"), 1),
        (ValueError("no sense"), 2),
        (KeyError("lost"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code):
    def fail(*_, **__):
        raise error

    module = importlib.import_module("orbax_safetensors_layout.conversion")
    monkeypatch.setattr(module, "consolidate", fail)
    assert main(["consolidate", "here"]) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1 + str(error).count("\n")  # an error keeps its lines in a log, too
    if isinstance(error, KeyError | MemoryError):  # whose text alone says too little
        assert type(error).__name__ in err
        assert "--debug" in err
    if code == 130:
        assert "interrupted" in err
        assert "run the same command again" in err


def test_an_interrupt_leaves_a_clean_state_and_says_how_to_continue(tmp_path):
    tree = {f"w{n}": np.arange(1000.0) + n for n in range(5)}
    osl.save(tmp_path / "pieces", tree, options=osl.WriteOptions(layout="sharded"))
    before = {file.name: file.read_bytes() for file in (tmp_path / "pieces").iterdir()}
    command = ["consolidate", str(tmp_path / "pieces"), str(tmp_path / "out")]
    done = run(*command, program="cli_interrupted.py")
    assert done.returncode == 130
    assert not done.stdout
    assert done.stderr.splitlines()[-1] == (
        "orbax-safetensors: interrupted. The checkpoint is as it was; run the same command again."
    )
    assert "Traceback" not in done.stderr
    assert {file.name for file in tmp_path.iterdir()} <= {"pieces", ".out.partial.lock"}
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "pieces").iterdir()}
    assert run(*command).returncode == 0
    assert osl.verify(tmp_path / "out", tmp_path / "pieces").ok


@pytest.mark.parametrize("swallow", ["pass", "raise ImportError('numpy')"])
def test_an_interrupt_amid_an_import(tmp_path, swallow):
    """Modules make something else of it; whoever pressed Ctrl-C shall not see that."""
    osl.save(tmp_path / "some", {"a": np.arange(3)})
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"except KeyboardInterrupt:\n    {swallow}\n"
        "def tree(): return {}\n"
    )
    arguments = ["plan", "some", "--mesh", "a=2", "--abstract", "slow:tree"]
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "orbax-safetensors: interrupted. Nothing was changed; run it again.\n"


def test_interrupts_that_are_somebody_elses_stay(tmp_path, capsys):
    osl.save(tmp_path, {"a": np.arange(3)})
    codes = []
    before = signal.signal(signal.SIGINT, lambda *_: codes.append(True))
    try:
        with pytest.MonkeyPatch.context() as patch:
            module = importlib.import_module("orbax_safetensors_layout.cli.inspect")
            patch.setattr(module, "inspect", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
            assert main(["inspect", str(tmp_path)]) == 1  # None is no inspection
    finally:
        signal.signal(signal.SIGINT, before)
    assert codes
    assert "interrupted" not in capsys.readouterr().err


def test_a_size_that_is_none_is_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["consolidate", "here", "--max-file-bytes", "much"])
    assert stopped.value.code == 2
    assert "'much' is not a size; write for instance 5GB" in capsys.readouterr().err


def test_the_script_is_declared():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    scripts = tomllib.loads(text)["project"]["scripts"]
    assert scripts == {"orbax-safetensors": "orbax_safetensors_layout.cli:main"}
    assert callable(cli.main)


def test_a_terminal_of_80_columns_breaks_no_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orbax_safetensors_layout.cli.output._columns", lambda stream: 80)
    long = "model.language_model.layers.{}.post_attention_layernorm.linear.weight"
    tensors = {long.format(n): np.zeros((2048, 4), np.float32) for n in range(2)}
    osl.save("model", tensors, options=osl.WriteOptions(max_file_bytes=1))
    Path("maps.py").write_text(
        "import orbax_safetensors_layout as osl\n"
        "rules = [osl.rule(f'leaf_{n}', osl.tensor(f'absent.{n}')) for n in range(9)]\n"
        "wrong = osl.Mapping(rules)\n"
    )
    mesh = ("--mesh", "fsdp=64", "--hosts", "64")
    shown = {}
    for arguments in (
        ("inspect", "model"),
        ("inspect", "absent"),
        ("plan", "model", *mesh),
        ("plan", "model", *mesh, "--mapping", "maps.py:wrong"),
    ):
        main(arguments)
        out, err = capsys.readouterr()
        path = os.fspath(tmp_path)
        broken = [line for line in (out + err).splitlines() if len(line) > 80 and path not in line]
        assert not broken, arguments
        shown[arguments] = out + err
    assert "\n    dtype  shape      tensors " in shown["inspect", "model"]
    # The problems of a mapping have a line each.
    assert shown[arguments].count("\n  - leaf ") == 9


def test_misuse_shows_no_password(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", "a", "https://me:hunter2@host/m?sig=hunter2"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "unrecognized arguments" in told
    assert "hunter2" not in told


@pytest.mark.parametrize("path", ["folder", "gs://bucket/folder"])
def test_what_an_interrupted_consolidation_leaves_is_told(path):
    command = next(command for command in COMMANDS if command.name == "consolidate")
    told = command.resume(argparse.Namespace(path=path, target=None))
    assert ("partial-save" in told) == ("://" in path)
