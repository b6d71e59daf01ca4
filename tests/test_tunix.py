"""Ready mappings into the models of Tunix itself, where it is installed: torch's logits.

`.ci/do.py` installs it beside torch. What else it requires is for training, and so is what the
package imports by itself: it is left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import every

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from family_models import copy, make, unused_keys_and_values
from flax import nnx
from vision_models import make_whole

import orbax_safetensors_layout as osl

FOUND = importlib.util.find_spec("tunix")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch, transformers and Tunix
    pytest.mark.skipif(FOUND is None, reason="google-tunix is not installed"),
]

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
SCALAR = {"query_pre_attn_scalar": 16}

# Module and class in Tunix, and what its model wants of a configuration.
MODELS = {
    "llama": ("llama3", "Llama3", ROPE),
    "qwen2": ("qwen2", "Qwen2", ROPE),
    "qwen3": ("qwen3", "Qwen3", ROPE),
    "qwen3_moe": ("qwen3", "Qwen3", {**ROPE, "norm_topk_prob": True}),
    "gemma2": ("gemma", "Gemma", SCALAR),
    "gemma3": ("gemma3", "Gemma3", SCALAR),
    "gemma3_full_heads": ("gemma3", "Gemma3", SCALAR),
    "gemma4_unshared": ("gemma4", "Gemma4", {}),
    "gemma4_moe": ("gemma4", "Gemma4", {}),
    "gemma4_e2b": ("gemma4", "Gemma4", {}),
}


@pytest.fixture(autouse=True)
def without_trainers(monkeypatch):
    """The package without what its `__init__` imports."""
    package = types.ModuleType("tunix")
    package.__path__ = FOUND.submodule_search_locations
    monkeypatch.setitem(sys.modules, "tunix", package)


def model_config(module, name, config):
    """The configuration of Tunix's model for one of Hugging Face's."""
    gemma, heads = name.startswith("gemma"), config["num_attention_heads"]
    fields = {
        "num_layers": config["num_hidden_layers"],
        "num_embed" if gemma else "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config.get("moe_intermediate_size") or config["intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_kv_heads": config["num_key_value_heads"],
    }
    if not gemma:
        fields |= {"rope_theta": 1_000_000, "norm_eps": config["rms_norm_eps"]}
    if name == "qwen2":
        fields["use_tied_embedding"] = True
    if name == "qwen3_moe":
        fields |= {"num_experts": 5, "num_experts_per_tok": 2}
    if name == "gemma2":
        kinds = module.AttentionType
        fields |= {
            "final_logit_softcap": config["final_logit_softcapping"],
            "attn_logits_soft_cap": config["attn_logit_softcapping"],
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attention_types": (kinds.LOCAL_SLIDING, kinds.GLOBAL) * 2,
            "sliding_window_size": config["sliding_window"],
        }
    if name.startswith("gemma3"):
        fields |= {
            "sliding_window_size": config["sliding_window"],
            "global_base_frequency": 1_000_000,
            "param_dtype": jnp.float32,
        }
    if name.startswith("gemma4"):
        kinds = {"sliding": "LOCAL_SLIDING", "full": "GLOBAL"}
        types = [kinds[kind.removesuffix("_attention")] for kind in config["layer_types"]]
        full = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]
        fields |= {
            "hidden_dim": config["intermediate_size"],
            "sliding_window_size": config["sliding_window"],
            "attention_pattern": tuple(getattr(module.AttentionType, kind) for kind in types),
            "global_key_size": full["head_dim"],
            "num_global_kv_heads": full.get("num_key_value_heads"),
            "k_eq_v_global": config["attention_k_eq_v"],
            "per_layer_input_dim": config["hidden_size_per_layer_input"],
            "enable_moe": config["enable_moe_block"],
            "num_experts": config["num_experts"],
            "num_experts_per_tok": config["top_k_experts"],
            "expert_dim": config["moe_intermediate_size"],
            "moe_dense_hidden_dim": config["intermediate_size"],
            "frac_shared_layers": config["num_kv_shared_layers"] / config["num_hidden_layers"],
            "override_kv_shared_ffw_hidden": config["intermediate_size"]
            * (2 if config["use_double_wide_mlp"] else 1),
        }
    return module.ModelConfig(**fields)


@pytest.mark.parametrize("name", every(2, MODELS))
def test_logits_of_the_real_model(tmp_path, name):
    where, kind, more = MODELS[name]
    module = importlib.import_module(f"tunix.models.{where}.model")
    folder, config, _, theirs = make(name, tmp_path, dtype="float32", **more)
    if name == "gemma4_moe":
        # Tunix's router takes what this norm returns, that of transformers what it is given.
        for layer in theirs.model.layers:
            torch.nn.init.ones_(layer.pre_feedforward_layernorm_2.weight)
        theirs.save_pretrained(folder, max_shard_size="40KB")
    if name == "gemma4_e2b":
        folder = copy(folder, tmp_path / "published", more=unused_keys_and_values(config))
    tokens = np.random.default_rng(0).integers(3, 96, (2, 11))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        make_model = getattr(module, kind)
        ours = model_config(module, name, config)
        graph, state = nnx.split(nnx.eval_shape(lambda: make_model(ours, rngs=nnx.Rngs(0))))
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), state)
        mapping = osl.families.mapping(folder, target="tunix")
        model = nnx.merge(graph, osl.load(folder, abstract, mapping=mapping))
        positions = jnp.broadcast_to(jnp.arange(11), (2, 11))
        mask = jnp.broadcast_to(jnp.tri(11, dtype=bool), (2, 11, 11))
        run = nnx.jit(lambda model: model(jnp.asarray(tokens, jnp.int32), positions, None, mask))
        logits, _ = run(model)
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=3e-4, atol=3e-4)


def test_images_of_the_real_model(tmp_path):
    """What Gemma 3's vision encoder and projector make of them, as those of transformers."""
    module = importlib.import_module("tunix.models.gemma3.model")
    vision = importlib.import_module("tunix.models.gemma3.vision")
    folder, config, _, theirs = make_whole("gemma3", tmp_path, dtype="float32")
    tower = vision.SigLIPConfig(
        num_mm_tokens_per_image_prepool=36, num_mm_tokens_per_image=9, image_height=84,
        image_width=84, width=24, depth=2, mlp_dim=40, num_heads=2,
    )  # fmt: skip
    images = np.random.default_rng(0).random((2, 3, 84, 84), np.float32)
    with torch.no_grad():
        expected = theirs.model.get_image_features(torch.from_numpy(images)).pooler_output
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        ours = model_config(module, "gemma3", config["text_config"])
        ours = dataclasses.replace(ours, vision_config=tower)
        made = nnx.eval_shape(lambda: module.Gemma3(ours, rngs=nnx.Rngs(0)))
        graph, params, rest = nnx.split(made, nnx.Param, ...)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
        mapping = osl.families.mapping(folder, target="tunix", vision=True)
        filled = osl.load(folder, abstract, mapping=mapping)
        features = nnx.merge(graph, filled, rest)._encode_vision(
            jnp.asarray(images).transpose(0, 2, 3, 1)[:, None]
        )
    np.testing.assert_allclose(np.asarray(features)[:, 0], expected, rtol=3e-4, atol=3e-4)
