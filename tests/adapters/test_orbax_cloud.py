"""Orbax's own paths in buckets: what its path layer does there, and this package's files in it."""

from __future__ import annotations

from programs import run_processes


def atomicity(place):
    """Orbax commits by a file on gs:// by itself; for s3:// it has to be told."""
    return "auto" if place.server.kind == "gs" else "commit_file"


def test_a_checkpoint_manager_of_two_processes(place):
    done = run_processes(
        "orbax_cloud_manager.py", processes=2, devices=2, root=place.url, atomicity=atomicity(place)
    )
    assert done == [[[2, 3], [2, 3], True]] * 2
    names = place.names()
    assert {name.partition("/")[0] for name in names} == {"2", "3"}
    for step in ("2", "3"):
        assert f"{step}/commit_success.txt" in names
        assert f"{step}/default/model.safetensors" in names


def test_v1_and_steps_without_their_commit_file(place):
    done = run_processes(
        "orbax_cloud_v1.py", processes=1, devices=4, root=place.url, atomicity=atomicity(place)
    )
    assert done == [[True] * 6]
    assert "saved/commit_success.txt" in place.names()
