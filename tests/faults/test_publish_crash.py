"""Publishers and pullers that are killed before any system call: what stands is whole."""

import shutil
import signal

import pytest
from published import read_version

import orbax_safetensors_layout as osl

PROGRAM = "publish_crash.py"
every = pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.soak)])


def run(fork_server, folder, own, version, kill=-1):
    child = {"folder": str(folder), "own": own and str(own), "version": version, "kill": kill}
    (ended,) = fork_server.run([child])
    return ended.status, ended.said[-1] if ended.said else None


@pytest.fixture(scope="module")
def versions(tmp_path_factory, fork_server):
    """The bytes of each version, of a publisher that nobody killed."""
    folder = tmp_path_factory.mktemp("all")
    for version in range(1, 5):
        assert run(fork_server, folder, None, version)[0] == 0
    return folder, {version: read_version(folder, version) for version in range(1, 5)}


def copied(source, target, last):
    for version in range(1, last + 1):
        name = f"weight_v{version:06d}"
        shutil.copytree(source / name, target / name)


@pytest.mark.slow
@every
@pytest.mark.parametrize("version", [2, 3])  # differences, and a whole one
def test_a_killed_publisher(versions, fork_server, tmp_path, version, step):
    source, seen = versions
    for kill in range(0, 1000, step):
        folder = tmp_path / str(kill)
        copied(source, folder, version - 1)
        status, calls = run(fork_server, folder, None, version, kill)
        newest = osl.pull(folder, folder / "own").version
        assert newest in (version - 1, version)
        assert read_version(folder, 0, folder / "own") == seen[newest]
        for following in range(newest + 1, 5):
            assert run(fork_server, folder, None, following)[0] == 0
            assert read_version(folder, following) == seen[following]
        assert sorted(path.name for path in folder.iterdir()) == [
            "own",
            *(f"weight_v{number:06d}" for number in range(1, 5)),
        ]
        shutil.rmtree(folder)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 10 < calls <= kill


@every
@pytest.mark.parametrize(("held", "version"), [(None, 2), (1, 2), (2, 4)])
def test_a_killed_pull(versions, fork_server, tmp_path, held, version, step):
    folder, seen = versions
    for kill in range(0, 1000, step):
        own = tmp_path / str(kill) / "own"
        if held is not None:
            osl.pull(folder, own, version=held)
        status, calls = run(fork_server, folder, own, version, kill)
        if own.exists():
            found = read_version(tmp_path, 0, own)
            assert found in [seen[number] for number in (held, version) if number]
        osl.pull(folder, own, version=version)
        assert read_version(tmp_path, 0, own) == seen[version]
        assert [path.name for path in own.parent.iterdir()] == ["own"]
        shutil.rmtree(own.parent)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 10 < calls <= kill
