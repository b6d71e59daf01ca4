"""Manifests that record PRNG keys, or tensors, which the files do not hold."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from orbax_calls import layout_context
from safetensors.numpy import save_file

import orbax_safetensors_layout as osl

MANIFEST = "orbax_safetensors_layout.json"


def check_refused(folder, error, text):
    for read in (osl.load, osl.SafetensorsCheckpointHandler().metadata):
        with pytest.raises(error, match=text) as caught:
            read(folder)
        assert caught.value.tensor == "k"
    # Orbax makes a warning of a handler's ValueError.
    assert ocp.Checkpointer(osl.SafetensorsLayout()).metadata(folder).item_metadata is None
    assert not osl.verify(folder).ok
    with layout_context(osl.SafetensorsLayout), pytest.raises(error, match=text):
        ocp_v1.metadata(folder)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_an_unknown_implementation_is_refused_before_anything_is_read(tmp_path, layout):
    options = osl.WriteOptions(layout=layout, digests=True)
    osl.save(tmp_path, {"k": jax.random.key(0), "w": np.ones(2)}, options=options)
    manifest = tmp_path / MANIFEST
    manifest.write_text(manifest.read_text().replace("fry2x32", "fry9x32"))
    with pytest.raises(osl.InvalidManifestError, match=r"'k'.*threefry9x32"):
        osl.load(tmp_path, options=osl.ReadOptions(verify=True))
    findings = osl.verify(tmp_path, digests=False).findings
    assert ["'k'" in finding.text and "fry9x32" in finding.text for finding in findings] == [True]


@pytest.mark.parametrize("data", [np.zeros(3, np.uint32), np.zeros(2, np.float32)])
def test_keys_of_other_data_are_refused(tmp_path, data):
    osl.save(tmp_path, {"k": jax.random.key(0)})
    save_file({"k": data}, tmp_path / "model.safetensors")
    check_refused(tmp_path, osl.InvalidManifestError, "threefry2x32")


def test_a_tensor_that_no_file_holds_is_named(tmp_path):
    osl.save(tmp_path, {"a": np.ones(2), "k": np.ones(2)})
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    check_refused(tmp_path, osl.MissingTensorError, "'k'")
