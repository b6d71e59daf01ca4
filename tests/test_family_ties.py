"""Ties of ready mappings, and what is refused, against transformers itself."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from family_models import DIMS

from orbax_safetensors_layout.mapping.families.dims import dims_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

# Models with vision, and the text model in each.
OUTER = {
    "gemma3": "gemma3_text",
    "got_ocr2": "qwen2",
    "idefics3": "llama",
    "internvl": "qwen2",
    "janus": "llama",
    "lighton_ocr": "qwen3",
    "llava": "llama",
    "llava_next": "mistral",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "qianfan_ocr": "qwen3",
    "video_llama_3": "qwen2",
    "vipllava": "llama",
}
FLAGS = list(itertools.product((None, True, False), repeat=2))


def nested(outer, text, tied, inner_tied):
    """A configuration with the flags that are not None."""
    config = {"model_type": outer, "text_config": {"model_type": text, **DIMS}}
    for part, flag in ((config, tied), (config["text_config"], inner_tied)):
        if flag is not None:
            part["tie_word_embeddings"] = flag
    return config


@pytest.mark.parametrize("outer", OUTER)
def test_outer_and_inner_flags_as_transformers_reads_them(outer):
    from transformers import AutoConfig

    for tied, inner_tied in FLAGS:
        config = nested(outer, OUTER[outer], tied, inner_tied)
        family = OUTER[outer].removesuffix("_text")
        expected = AutoConfig.for_model(**config).tie_word_embeddings
        assert dims_of(family, config).tied == expected, (tied, inner_tied)
