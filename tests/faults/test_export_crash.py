"""Training that exports every second step and is killed: the last step and export are whole."""

import os
import signal

import pytest
from checkpoints import values_of
from saving import opened

import orbax_safetensors_layout as osl

PROGRAM = "export_crash.py"
CONFIG = '{"model_type": "llama"}'


def check(root, steps):
    """Checks the last step and the last export of a run."""
    saved = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    assert saved == steps or saved == steps[:-1]
    for step in saved[-2:]:
        state = osl.load(root / str(step) / "state")
        assert state["step"] == step
        same_bits(state["params"], step)
        if step % 2 == 0:
            export = root / str(step) / "hf"
            same_bits(opened(export), step)
            assert (export / "config.json").read_text() == CONFIG
            assert osl.verify(export).ok
    return saved


def same_bits(values, step):
    expected = values_of(step)
    assert values.keys() == expected.keys()
    assert all(values[n].tobytes() == expected[n].tobytes() for n in expected)


@pytest.mark.parametrize("most", [12, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.timeout(1500)
def test_a_kill_leaves_the_last_step_and_export_whole(fork_server, tmp_path, most):
    model, root = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    root.mkdir()
    (model / "config.json").write_text(CONFIG)

    def run(step, kill=-1):
        child = {"root": str(root), "model": str(model), "step": step, "kill": kill}
        (ended,) = fork_server.run([child])
        return ended

    steps = [0, 1, 2]
    calls = [run(step).said[-1] for step in steps]
    check(root, steps)
    kills = 0
    while kills < most:
        step = steps[-1] + 1
        ended = run(step, kills * 7 % calls[1 + step % 2])
        if ended.status == 0:
            calls[1 + step % 2] = ended.said[-1]
        else:
            assert ended.status == -signal.SIGKILL
            kills += 1
        steps = check(root, [*steps, step])
    assert check(root, [*steps, steps[-1] + 1]) == steps
