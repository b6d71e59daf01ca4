"""Which tiny models are tested with which ready mappings."""

from family_models import MODELS

FAMILY = {"llama3": "llama", "llama_biased": "llama", "qwen3_moe_mixed": "qwen3_moe"}
FAMILY["gemma3_full_heads"] = "gemma3"
NOT_IN_MAXTEXT = ("llama_biased", "qwen3_moe_mixed")
NOT_IN_TUNIX = ("llama_biased", "qwen3_moe_mixed", "mistral", "mixtral", "deepseek_v3", "gpt_oss")

CASES = [
    (name, target, scan)
    for name in MODELS
    for target, scans in (("plain", (True, False)), ("maxtext", (True, False)), ("tunix", (False,)))
    for scan in scans
    if not (target == "maxtext" and name in NOT_IN_MAXTEXT)
    and not (target == "tunix" and name in NOT_IN_TUNIX)
]


def family_of(name):
    return FAMILY.get(name, name)
