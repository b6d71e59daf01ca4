"""What configurations leave out: the value of the class in `transformers`, or an error."""

import json

import pytest
from libraries import need

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping.families.dims import dims_of
from orbax_safetensors_layout.mapping.families.ready import FAMILIES

transformers = need("transformers")
NAMES = sorted(name for name in FAMILIES if name in transformers.CONFIG_MAPPING)
SIZES = ("num_key_value_heads", "tie_word_embeddings", "attention_bias", "num_local_experts")


def sizes_of(family, config):
    dims = dims_of(family, config)
    fields = ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "tied", "experts")
    return {field: getattr(dims, field) for field in fields} | {"biased": dims.biased}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_out_is_the_value_of_the_class(name):
    whole = transformers.CONFIG_MAPPING[name]()
    document = json.loads(json.dumps(whole.to_dict(), default=str))
    document = document.get("thinker_config", document)
    inner = document.get("text_config", document)
    expected = sizes_of(name, document)
    left_out = [key for key in SIZES if key in inner]
    assert left_out
    for key in left_out:
        value = inner.pop(key)
        assert sizes_of(name, document) == expected, key
        inner[key] = value


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}),
        ("mistral", {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32064}),
    ],
)
def test_llava_leaves_the_sizes_of_its_language_model_out(kind, said):
    """As published: 1.5 of 7B, and 1.6 with Mistral."""
    text = {"model_type": kind, **said}
    config = {"model_type": "llava", "text_config": text}
    whole = transformers.LlavaConfig(text_config=dict(text)).text_config
    dims = dims_of(kind, config)
    assert (dims.layers, dims.hidden) == (whole.num_hidden_layers, whole.hidden_size)
    assert (dims.heads, dims.vocab) == (whole.num_attention_heads, whole.vocab_size)
    assert dims.kv_heads == whole.num_key_value_heads
    with pytest.raises(osl.MappingError, match="lacks 'num_hidden_layers'"):
        dims_of(kind, text)  # one by itself says its sizes
