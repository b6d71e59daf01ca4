"""The property tests of the suite, with examples that no run before had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_the_property_tests_pass_with_other_examples():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis and not soak", "tests"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    ended = subprocess.run(
        [*command, "--hypothesis-profile=default", "-n", "2"],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]
