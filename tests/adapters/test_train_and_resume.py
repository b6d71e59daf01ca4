"""The example of a training loop that is killed, run as users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from programs import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "train_and_resume.py"


@pytest.mark.slow
def test_the_whole_story(tmp_path):
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    kept.pop("JAX_NUMPY_DTYPE_PROMOTION", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE],
        env=kept | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "bit by bit" in done.stdout.splitlines()[-1]
    (left,) = re.findall(r"left behind: (.*)", done.stdout)
    assert "9.orbax-checkpoint-tmp" in left
    assert "resumed after step 6" in done.stdout
    assert re.search(r"  0\.hidden\.kernel +float32 +\[256, 1024\]", done.stdout)
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"
