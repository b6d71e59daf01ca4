"""Orbax cannot make a folder of a step: all processes fail at once, with the cause."""

import pytest
from programs import run_processes


@pytest.mark.parametrize("items", [["state"], ["more", "state"]])
def test_the_folder_of_an_item(tmp_path, items):
    results = run_processes(
        "save_folder_fails.py", processes=2, devices=1, root=str(tmp_path), items=items
    )
    for result in results:
        assert "Input/output error" in result["error"]
        assert result["seconds"] < 60
        assert result["steps"] == [0]
        assert result["after"] == [0, 2]
    assert results[1]["error"].startswith("PeerError: process 0 failed while making the folder")


def test_every_way_to_save_fails_at_once(tmp_path):
    first, second = run_processes(
        "save_every_way_fails.py", processes=2, devices=1, root=str(tmp_path)
    )
    assert len(first) == 19
    for name in first:
        for error, seconds in (first[name], second[name]):
            assert "Input/output error" in error, name
            assert seconds < 30, name
        assert second[name][0].startswith("PeerError: process 0 failed while making the folder")
