"""Saves through Orbax by two real processes: everything comes back, and both fail together."""

import pytest
from checkpoints import assert_same_bits, llama_like
from programs import run_processes
from saving import opened, tensor_files

import orbax_safetensors_layout as osl

TENSORS = llama_like()


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_a_manager_of_v0(tmp_path, layout):
    results = run_processes(
        "save_orbax_multiprocess_v0.py", processes=2, devices=2, root=str(tmp_path), layout=layout
    )
    assert results == [[[0, 1], True, True]] * 2
    if layout == "hf":
        tensors = opened(tmp_path / "1" / "state")
        for name, value in TENSORS.items():
            assert_same_bits(tensors[f"params.{name}"], value)
    else:
        assert len(list((tmp_path / "1" / "state").glob("*.safetensors"))) == 2
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]


@pytest.mark.parametrize("route", ["handler", "layout"])
def test_v1(tmp_path, route):
    results = run_processes(
        "save_orbax_multiprocess_v1.py", processes=2, devices=2, root=str(tmp_path), route=route
    )
    assert results == [[True, True, True]] * 2
    tensors = opened(tmp_path / "training" / "1" / "state")
    for name, value in TENSORS.items():
        assert_same_bits(tensors[f"params.{name}"], value)


def test_the_files_are_those_of_one_process(tmp_path):
    run_processes(
        "save_orbax_multiprocess_v1.py", processes=2, devices=2, root=str(tmp_path), route="handler"
    )
    tree = {"params": TENSORS, "step": 1}
    osl.save(tmp_path / "direct", tree, options=osl.WriteOptions(max_file_bytes=100_000))
    for name, data in tensor_files(tmp_path / "direct").items():
        if name != "orbax_safetensors_layout.json":  # names shardings, or numpy arrays
            assert (tmp_path / "one" / "state" / name).read_bytes() == data


@pytest.mark.parametrize("api", ["v0", "v1"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_all_processes_fail_at_once_and_with_the_first_cause(tmp_path, api, guilty):
    results = run_processes(
        "save_orbax_multiprocess_fail.py",
        processes=2,
        devices=2,
        root=str(tmp_path),
        api=api,
        guilty=guilty,
    )
    assert "StorageError" in results[guilty]["error"]
    assert results[1 - guilty]["error"].startswith("PeerError")
    for result in results:
        assert "File too large" in result["error"]
        assert result["seconds"] < 60
        assert result["steps"] == [0]
    assert opened(tmp_path / "2" / "state").keys() == {f"params.{name}" for name in TENSORS}


@pytest.mark.parametrize("api", ["v0", "v1"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_what_one_process_cannot_save_is_an_error_of_all(tmp_path, api, guilty):
    """Before Orbax lets them wait for each other, some in another place than others."""
    results = run_processes(
        "save_orbax_multiprocess_refuse.py",
        processes=2,
        devices=2,
        root=str(tmp_path),
        api=api,
        guilty=guilty,
    )
    assert results[guilty]["error"].startswith("UnsupportedDtypeError")
    assert results[1 - guilty]["error"].startswith("PeerError")
    for result in results:
        assert "'bad'" in result["error"]
        assert result["seconds"] < 60
        assert result["steps"] == [0, 2]


@pytest.mark.parametrize("api", ["v0", "v1", "training"])
def test_the_arrays_may_go_under_a_memory_budget(tmp_path, api):
    run_processes(
        "save_orbax_multiprocess_budget.py", processes=2, devices=2, root=str(tmp_path), api=api
    )
    for step in range(3):
        tensors = opened(tmp_path / str(step) / "state")
        for name, value in TENSORS.items():
            assert_same_bits(tensors[f"params.{name}"], value)


@pytest.mark.parametrize("route", ["layout", "handlers"])
def test_items_that_one_process_writes_and_cannot_hold(tmp_path, route):
    """Process 1 has nothing to write, and goes on to the next item when process 0 does."""
    run_processes(
        "save_orbax_multiprocess_items.py", processes=2, devices=1, root=str(tmp_path), route=route
    )
    for number, name in enumerate("abc"):
        assert (opened(tmp_path / "0" / name)["w"] == number).all()
