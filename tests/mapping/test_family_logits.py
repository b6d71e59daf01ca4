"""Models loaded through `plain` mappings compute what transformers computes."""

import json

import jax
import numpy as np
import pytest
from family_models import make
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from plain_forward import logits

import orbax_safetensors_layout as osl

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers


@pytest.mark.parametrize(
    "name", ["qwen3", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_next_mixed"]
)
def test_logits_are_those_of_transformers(tmp_path, name):
    from transformers import AutoModelForCausalLM

    make(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(5).integers(0, 90, 11)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    mapping = osl.families.mapping(tmp_path, scan=False)
    sharding = NamedSharding(mesh_of(x=2), P("x"))
    tree = {
        name: jax.ShapeDtypeStruct(
            spec.shape, np.float32, sharding=sharding if spec.shape[0] % 2 == 0 else None
        )
        for name, spec in mapping.leaf_facts(tmp_path).items()
    }
    params = {n: np.asarray(a) for n, a in osl.load(tmp_path, tree, mapping=mapping).items()}
    config = json.loads((tmp_path / "config.json").read_text())
    ours = np.asarray(logits(params, tokens, config))
    np.testing.assert_allclose(ours, expected, atol=2e-4 * np.abs(expected).max())
