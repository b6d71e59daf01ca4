"""Ready mappings for common model families: Hugging Face's names to those of JAX models."""

from .ready import TARGETS, Options, family_mapping, mapping

llama = family_mapping("llama", "Llama 1 to 3.3")
mistral = family_mapping("mistral", "Mistral")
qwen2 = family_mapping("qwen2", "Qwen 2 and 2.5")
qwen3 = family_mapping("qwen3", "dense Qwen 3")
qwen3_moe = family_mapping("qwen3_moe", "Qwen 3 with experts")
gemma2 = family_mapping("gemma2", "Gemma 2")
gemma3 = family_mapping("gemma3", "the language model of Gemma 3")
mixtral = family_mapping("mixtral", "Mixtral")
deepseek_v2 = family_mapping("deepseek_v2", "DeepSeek V2")
deepseek_v3 = family_mapping("deepseek_v3", "DeepSeek V3 and R1, and Kimi K2")
gpt_oss = family_mapping("gpt_oss", "GPT-OSS")
glm4_moe = family_mapping("glm4_moe", "GLM-4.5 to 4.7")
olmo2 = family_mapping("olmo2", "OLMo 2")
olmo3 = family_mapping("olmo3", "OLMo 3")
phi3 = family_mapping("phi3", "Phi-3 and Phi-4")
granite = family_mapping("granite", "dense Granite 3")
starcoder2 = family_mapping("starcoder2", "StarCoder 2")
cohere = family_mapping("cohere", "Command R")
cohere2 = family_mapping("cohere2", "Command R7B and A")
