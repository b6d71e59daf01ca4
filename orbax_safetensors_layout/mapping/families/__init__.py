"""Ready mappings for common model families: Hugging Face's names to those of JAX models."""

from .ready import (
    TARGETS,
    Options,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mapping,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
