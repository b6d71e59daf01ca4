"""Progress as lines and as a bar."""

import io
import os
import pty
import re
import subprocess
import sys
import termios

from programs import program_path

from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.runtime.progress import ProgressLines


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_lines_come_at_intervals_and_at_the_end():
    clock, stream = Clock(), io.StringIO()
    lines = ProgressLines(stream, clock)
    for second in range(25):
        clock.now = 100.0 + second
        lines(Progress(second * 10**6, 50 * 10**6, f"tensor {second}"))
    lines(Progress(50 * 10**6, 50 * 10**6, "last"))
    lines.close()
    assert stream.getvalue().splitlines() == [
        " 20%  10.0 MB of 50.0 MB, 1.00 MB/s, 40.0 s left, tensor 10",
        " 40%  20.0 MB of 50.0 MB, 1.00 MB/s, 30.0 s left, tensor 20",
        "100%  50.0 MB of 50.0 MB, 2.08 MB/s, in 24.0 s",
    ]


def test_each_phase_ends_with_a_line():
    clock, stream = Clock(), io.StringIO()
    lines = ProgressLines(stream, clock)
    for state in (Progress(10, 10, "a"), Progress(5, 20, "b"), Progress(20, 20, "b")):
        clock.now += 1
        lines(state)
    lines.close()
    assert [line[:18] for line in stream.getvalue().splitlines()] == [
        "100%  10 B of 10 B",
        "100%  20 B of 20 B",
    ]


def test_nothing_to_do_writes_nothing():
    stream = io.StringIO()
    ProgressLines(stream).close()
    assert not stream.getvalue()


def test_a_terminal_gets_a_bar():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, program_path("progress_bar.py")]
    subprocess.run(command, stderr=theirs, check=True, timeout=120)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux's way to say that the terminal is closed
        pass
    finally:
        os.close(ours)
    assert b"100%" in shown
    assert b"next.phase" in shown
    assert b"nothing to do" not in shown
    assert re.search(r"100%\|█{7,}\| 7.00/7.00 .*norm\.next\.phase\]", shown.decode())
