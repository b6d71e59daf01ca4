"""A folder that is a checkpoint of Orbax's is not saved into: two would stand in it."""

import shutil

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

import orbax_safetensors_layout as osl

OLD = {"w": np.zeros((8, 4), np.float32), "step": 1}
NEW = {"w": np.ones((8, 4), np.float32), "step": 2}


def in_orbaxs_format(folder):
    ocp.PyTreeCheckpointer().save(folder, OLD)


def step_of_v0(folder):
    args = {"state": osl.SafetensorsSave(OLD), "other": osl.SafetensorsSave(OLD)}
    ocp.Checkpointer(ocp.CompositeCheckpointHandler()).save(folder, ocp.args.Composite(**args))


def step_of_v1(folder):
    with osl.context("state"):
        ocp_v1.save(folder, OLD)


def step_in_orbaxs_format(folder):
    ocp_v1.save(folder, OLD)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KINDS = [in_orbaxs_format, step_of_v0, step_of_v1, step_in_orbaxs_format]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", KINDS)
def test_a_checkpoint_of_orbaxs_is_refused_and_stays(tmp_path, make, overwrite):
    folder = tmp_path / "there"
    make(folder)
    before = content(folder)
    with pytest.raises(osl.CheckpointExistsError, match="would stay beside") as caught:
        osl.save(folder, NEW, overwrite=overwrite)
    assert content(folder) == before
    hint, item = caught.value.hint, caught.value.file
    assert ("remove the step first" in hint) == (item != str(folder))
    assert ("into that of the item" in hint) == (make in (step_of_v0, step_of_v1))
    if "into that of the item" in hint:
        osl.save(item, NEW, overwrite=True)
        assert osl.load(item)["step"] == 2
    shutil.rmtree(folder)
    osl.save(folder, NEW)


@pytest.mark.parametrize("make", KINDS)
def test_a_conversion_replaces_it_when_told_to(tmp_path, make):
    folder = tmp_path / "there"
    make(folder)
    before = content(folder)
    osl.save(tmp_path / "plain", NEW)
    if make is step_of_v0:  # of two items
        with pytest.raises(osl.CheckpointExistsError, match="Give the folder of the item to rep"):
            osl.convert(tmp_path / "plain", folder, format="hf", overwrite=True)
        assert content(folder) == before
        folder = folder / "state"
        before = content(folder)
    with pytest.raises(osl.CheckpointExistsError, match="overwrite=True"):
        osl.convert(tmp_path / "plain", folder, format="hf")
    assert content(folder) == before
    osl.convert(tmp_path / "plain", folder, format="hf", overwrite=True)
    assert osl.load(folder)["step"] == 2
    left = {path.relative_to(folder).name for path in content(folder)}
    if make is step_of_v0:  # whose item it still is
        left -= {"_METADATA", "commit_success.txt"}
    assert left == {"model.safetensors", "orbax_safetensors_layout.json"}


def test_what_orbax_made_of_safetensors_alone_is_replaced(tmp_path):
    """One checkpoint stands in the folder, before and after."""
    folder = tmp_path / "there"
    ocp.Checkpointer(osl.SafetensorsLayout()).save(folder, OLD)
    with pytest.raises(osl.CheckpointExistsError, match="overwrite=True"):
        osl.save(folder, NEW)
    osl.save(folder, NEW, overwrite=True)
    assert osl.load(folder)["step"] == 2
    assert ocp.Checkpointer(osl.SafetensorsLayout()).restore(folder)["step"] == 2
    osl.save(folder / "exported", NEW)  # a folder in it is another one
    assert osl.load(folder / "exported")["step"] == 2
