"""Training that is killed while it saves a step: the last committed step is there, bit by bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from pathlib import Path

import pytest
from checkpoints import values_of
from programs import Ended, free_port, run_alone
from sampling import every
from saving import opened

PROGRAM = "save_crash_steps.py"
APIS = ["v0 sync", "v0 async", "v1 sync", "v1 async"]


class Run:
    """A training run: what stands in its folder, and what its processes do next."""

    def __init__(self, root: Path, api: str, layout: str, processes: int) -> None:
        self.root = root
        self._arguments = {"root": str(root), "api": api, "layout": layout}
        self._processes = processes
        self.step: int | None = None
        self.outcomes: set[str] = set()
        self.kills = 0  # runs that were killed

    @property
    def next_step(self) -> int:
        return 0 if self.step is None else self.step + 1

    def children(self, kill: dict[int, int] | None = None, **more) -> list[dict]:
        """Processes that restore the last step and save the next.

        Args:
            kill: For each process to be killed, before which system call.
            more: More arguments of `main`. `heartbeat` is the seconds after which
                `jax.distributed` takes a process for dead, and ends all. A machine that is busy
                with other work can keep a live one silent for ten: ask for so few only where
                somebody is killed and the others have to notice.
        """
        kill = kill or {}
        port = free_port() if self._processes > 1 else 0
        return [
            {
                **self._arguments, "kill": kill.get(index, -1), "step": self.next_step,
                "index": index, "count": self._processes, "port": port, **more,
            }
            for index in range(self._processes)
        ]  # fmt: skip

    def check(self, ended: list[Ended]) -> None:
        """Checks that the folder has what it had, or the next step, complete."""
        steps = [int(name) for name in os.listdir(self.root) if name.isdigit()]
        latest = max(steps, default=None)
        assert latest in (self.step, self.next_step)
        for child in ended:
            for said in child.said:
                if isinstance(said, dict):
                    assert said == {"latest": self.step, "same": True}
                elif said == "saved":
                    assert latest == self.next_step
            # An error is no more than what a process meets when another has been killed.
            statuses = [child.status for child in ended]
            assert child.status <= 0 or any(map(killed, ended)), f"{statuses}\n{child.errors}"
        self.kills += any(map(killed, ended))
        self.outcomes.add("new" if latest == self.next_step else "old")
        self.step = latest
        if latest is not None and self._arguments["layout"] == "hf":
            stored = opened(self.root / str(latest) / "state")
            assert {name: value.tobytes() for name, value in stored.items()} == {
                f"params.{name}": value.tobytes() for name, value in values_of(latest).items()
            }

    def check_saved(self, ended: list[Ended]) -> int:
        """The next step was saved, and nothing of crashes is left; how many calls that took."""
        before = self.next_step
        self.check(ended)
        for child in ended:
            assert child.status == 0, child.errors
        assert self.step == before
        left = [path.name for path in self.root.rglob("*") if "tmp" in path.name]
        left += [path.name for path in self.root.rglob("*") if path.name.endswith(".partial")]
        assert left == []
        return min(child.said[-1] for child in ended)


def killed(ended: Ended) -> bool:
    return ended.status == -signal.SIGKILL


@pytest.mark.parametrize("api", every(2, APIS))
def test_killed_while_saving(fork_server, tmp_path, api):
    """Each crash is followed by processes that go on from the last step."""
    run = Run(tmp_path, api, "hf", 1)
    calls = [run.check_saved(fork_server.run(run.children())) for _ in range(3)][-1]
    rng = random.Random(api)
    points = sorted(rng.sample(range(calls), 9))
    for number, point in enumerate(points):
        ended = fork_server.run(run.children({0: point}))
        assert killed(ended[0])
        run.check(ended)
        if number % 3 == 2:
            run.check_saved(fork_server.run(run.children()))
    assert run.outcomes == {"old", "new"}
    run.check_saved(fork_server.run(run.children()))


@pytest.mark.parametrize("api", every(2, ["v1 async", "v0 async"]))
def test_both_processes_are_killed_while_saving(fork_server, tmp_path, api):
    run = Run(tmp_path, api, "hf", 2)
    calls = [run.check_saved(fork_server.run(run.children())) for _ in range(3)][-1]
    rng = random.Random(api)
    for number in range(5):
        point = rng.randrange(calls)
        ended = fork_server.run(run.children({number % 2: point}), together=True)
        assert any(map(killed, ended))
        run.check(ended)
    run.check_saved(fork_server.run(run.children()))


def test_one_of_two_processes_is_killed_while_saving(fork_server, tmp_path):
    """The other ends, too: `jax.distributed` ends it, at once or when heartbeats are missed."""
    runs = []
    for api in APIS[1::2]:
        for index in range(2):
            runs.append((index, Run(tmp_path / f"{api} {index}", api, "hf", 2)))
    rng = random.Random(0)
    for index, run in runs:
        run.root.mkdir()
        calls = [run.check_saved(fork_server.run(run.children())) for _ in range(2)][-1]
        run.kill = {index: rng.randrange(calls // 2, calls - 5)}
    ended = fork_server.run(
        [child for _, run in runs for child in run.children(run.kill, heartbeat=10)]
    )
    for (index, run), number in zip(runs, range(0, len(ended), 2), strict=True):
        both = ended[number : number + 2]
        assert killed(both[index])
        other = both[1 - index]
        if other.status == 0:  # nothing was left to wait for
            assert "saved" in other.said
        assert other.seconds < 60
        run.check(both)
        run.check_saved(fork_server.run(run.children()))


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("api", APIS)
def test_killed_at_hundreds_of_moments(fork_server, tmp_path, api, processes, layout):
    """Before random system calls of random processes, and from outside at random times."""
    run = Run(tmp_path, api, layout, processes)
    rng = random.Random(f"{api} {processes} {layout}")
    for _ in range(3):
        ended = fork_server.run(run.children())
        calls = run.check_saved(ended)
    seconds = ended[0].seconds
    for number in itertools.count():
        if run.kills == 40:  # of 640 in all
            break
        if rng.random() < 0.3:
            after_seconds = rng.uniform(0, 1.1 * seconds)
            run.check(fork_server.run(run.children(), after_seconds=after_seconds))
        else:
            kill = {rng.randrange(processes): rng.randrange(calls + 10)}
            run.check(fork_server.run(run.children(kill), together=True))
        if number % 10 == 9:
            run.check_saved(fork_server.run(run.children()))
    assert run.outcomes == {"old", "new"}
    assert number < 100


@pytest.mark.soak
def test_one_of_many_processes_is_killed_at_many_moments(fork_server, tmp_path):
    """Whoever is left ends, and nothing is lost, with two and with four processes."""
    rng = random.Random(1)
    for processes in (2, 4):
        runs = [
            Run(tmp_path / f"{processes} {api} {layout}", api, layout, processes)
            for api in APIS
            for layout in ("hf", "sharded")
        ]
        for run in runs:
            run.root.mkdir()
            run.check_saved(fork_server.run(run.children()))
        for _ in range(10):
            kills = [{rng.randrange(processes): rng.randrange(200)} for _ in runs]
            ended = fork_server.run(
                [
                    child
                    for run, kill in zip(runs, kills, strict=True)
                    for child in run.children(kill, heartbeat=10)
                ]
            )
            assert max(ending.seconds for ending in ended) < 60
            for number, run in enumerate(runs):
                run.check(ended[number * processes :][:processes])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("api", APIS)
def test_a_full_disk(fork_server, tmp_path, api, processes):
    """It is an error in every process; what stood there stands, and the next save succeeds."""
    run = Run(tmp_path, api, "hf", processes)
    run.check_saved(fork_server.run(run.children()))
    ended = fork_server.run(run.children(full=True))
    for child in ended:
        (error,) = [said for said in child.said if isinstance(said, str) and said != "saved"]
        assert error.startswith(("StorageError", "PeerError"))
        assert "File too large" in error
    run.check_saved(ended)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_small_disk(tmp_path, processes):
    """A real file system of 6 MB, which holds the first step and not the second."""
    report = json.loads(
        run_alone("run_save_steps_small_disk.py", tmp_path, processes, mount=("6m", tmp_path))
    )
    for error, *after in report:
        assert error.startswith(("StorageError", "PeerError"))
        assert "No space left" in error
        assert after == [0, True, 1]
