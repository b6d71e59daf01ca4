"""Several real processes that load a model with an adapter merged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from programs import run_processes

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping import fingerprint

LAYERS = [f"layers.{i}.q" for i in range(3)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A base, and two adapters that differ in values alone."""
    folder = tmp_path_factory.mktemp("merged")
    random = np.random.default_rng(0)
    osl.save(
        folder / "base",
        {f"{n}.weight": random.standard_normal((64, 32), np.float32) for n in LAYERS},
    )
    adapters = []
    for name in ("one", "two"):
        path = folder / name
        path.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3}
        (path / "adapter_config.json").write_text(json.dumps(config))
        factors = {"lora_A": (2, 32), "lora_B": (64, 2)}
        tensors = {
            f"base_model.model.{layer}.{part}.weight": random.standard_normal(shape, np.float32)
            for layer in LAYERS
            for part, shape in factors.items()
        }
        safetensors.numpy.save_file(tensors, path / "adapter_model.safetensors")
        adapters.append(str(path))
    return str(folder / "base"), adapters


def test_all_processes_have_the_values_and_the_mapping_of_one(paths):
    base, (adapter, _) = paths
    results = run_processes("merged_load.py", processes=2, devices=2, base=base, adapters=[adapter])
    expected = fingerprint(osl.peft.merge(None, adapter, base=base))
    assert results == [expected, expected]


def test_processes_that_exchange_what_they_merged_have_merged_the_same(paths):
    base, adapters = paths
    results = run_processes("merged_load.py", processes=2, devices=2, base=base, adapters=adapters)
    for text in results:
        assert text.startswith("read_once: ")
        assert ": it has something else" in text
        assert "merged adapters=" in text
