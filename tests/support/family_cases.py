"""Which tiny models are tested with which ready mappings."""

from family_models import MODELS

FAMILY = {"llama3": "llama", "llama_biased": "llama", "qwen3_moe_mixed": "qwen3_moe"}
FAMILY |= {
    "gemma2_scaled": "gemma2",
    "gemma3_full_heads": "gemma3",
    "deepseek_v2_biased": "deepseek_v2",
    "deepseek_v2_lite": "deepseek_v2",
    "deepseek_v3_biased": "deepseek_v3",
    "glm4_moe_air": "glm4_moe",
    "phi4_mini": "phi3",
    "granite_biased": "granite",
    "granitemoehybrid_dense": "granitemoehybrid",
    "starcoder2_unbiased": "starcoder2",
    "cohere_unnormed": "cohere",
    "llama4_scout": "llama4",
    "llama4_blocks": "llama4",
    "qwen2_moe_unbiased": "qwen2_moe",
    "qwen3_next_mixed": "qwen3_next",
    "gemma4_dense": "gemma4",
    "gemma4_e2b": "gemma4",
    "gemma4_moe": "gemma4",
    "gemma4_unshared": "gemma4",
    "mamba2_biased": "mamba2",
}
ONLY_PLAIN = (
    *(
        "glm4_moe",
        "olmo2",
        "phi3",
        "granite",
        "granitemoehybrid",
        "starcoder2",
        "cohere",
        "cohere2",
    ),
    *("qwen2_moe", "qwen2_vl", "qwen3_5", "gemma3n", "mamba2"),
)
NOT_IN_MAXTEXT = (
    *("llama_biased", "qwen3_moe_mixed", "qwen3_next_mixed"),
    *("gemma", "gemma4", "llama4_scout"),
    *("deepseek_v2_biased", "deepseek_v3_biased"),
)
UNSCANNED_IN_MAXTEXT = ("gemma4_e2b", "gemma4_unshared")  # as E2B and E4B
NOT_IN_TUNIX = (
    *("llama_biased", "qwen3_moe_mixed", "mistral", "mixtral", "qwen3_next", "qwen3_next_mixed"),
    *(
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_omni_moe",
        "llama4",
        "llama4_scout",
        "llama4_blocks",
    ),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *(
        "gpt_oss",
        "olmo3",
        "gemma2_scaled",
        "gemma4",
        "gemma4_e2b",
        "deepseek_v2_biased",
        "deepseek_v3_biased",
    ),
)

CASES = [
    (name, target, scan)
    for name in MODELS
    for target, scans in (("plain", (True, False)), ("maxtext", (True, False)), ("tunix", (False,)))
    for scan in scans
    if not (target != "plain" and FAMILY.get(name, name) in ONLY_PLAIN)
    and not (target == "maxtext" and name in NOT_IN_MAXTEXT)
    and not (target == "maxtext" and scan and name in UNSCANNED_IN_MAXTEXT)
    and not (target == "tunix" and name in NOT_IN_TUNIX)
]


def family_of(name):
    return FAMILY.get(name, name)
