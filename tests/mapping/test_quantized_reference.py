"""Weights saved quantised, against compressed-tensors' own scales, and opened by transformers."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import orbax_safetensors_layout as osl

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

UP = "model.layers.0.mlp.up_proj"
SCHEMES = {
    "fp8_block": ("FP8_BLOCK", "float-quantized"),
    "fp8_channel": ("FP8_DYNAMIC", "float-quantized"),
    "int4": ("W4A16", "pack-quantized"),
    "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
}


def with_model(options, folder):
    return dataclasses.replace(options, model=folder)


def saved(folder, kind, weight):
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    osl.save(folder, {f"{UP}.weight": weight.float().numpy()}, options=options)


def of_library(kind, weight):
    """The library's own values of a weight, and its scheme."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    name, fmt = SCHEMES[kind]
    scheme = preset_name_to_scheme(name, ["Linear"])
    args = scheme.weights
    rows, columns = weight.shape
    down, across = {"fp8_block": (128, 128), "fp8_channel": (1, columns)}.get(
        kind, (1, args.group_size or columns)
    )
    groups = weight.reshape(rows // down, down, columns // across, across)
    low, high = groups.amin((1, 3)), groups.amax((1, 3))
    parts = {"weight": weight}
    factor = None
    if kind == "nvfp4":
        parts["weight_global_scale"] = factor = generate_gparam(weight.min(), weight.max())
    parts["weight_scale"], _ = calculate_qparams(low, high, args, global_scale=factor)
    compressor = BaseCompressor.get_value_from_registry(fmt)
    return compressor, scheme, compressor.compress(parts, scheme)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_no_further_from_the_weight_than_the_library(tmp_path, kind, seed):
    from safetensors.torch import load_file

    torch.manual_seed(seed)
    weight = torch.randn(256, 384) * torch.exp(2 * torch.randn(256, 1))
    compressor, scheme, theirs = of_library(kind, weight)
    saved(tmp_path, kind, weight)
    ours = {
        n.removeprefix(f"{UP}."): t for n, t in load_file(tmp_path / "model.safetensors").items()
    }
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
    decoded = [compressor.decompress(dict(p), scheme)["weight"] for p in (ours, theirs)]
    # The library decodes ours to the values that we do.
    dtype = str(decoded[0].dtype).removeprefix("torch.")
    again = osl.load(tmp_path, mapping=osl.dequantized(tmp_path, dtype=dtype))
    values = np.asarray(again[f"{UP}.weight"]).astype(np.float32)
    np.testing.assert_array_equal(values, decoded[0].float().numpy())
    errors = [(d.float() - weight).abs() for d in decoded]
    assert errors[0].max() <= errors[1].max()
    assert errors[0].mean() <= errors[1].mean() * 1.0001


def tiny_llama(folder, **kwargs):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        torch_dtype="bfloat16",
        **kwargs,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("kind", [*SCHEMES, "deepseek_fp8"])
def test_transformers_opens_it_with_equal_values(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    tiny_llama(tmp_path / "plain")
    leaves = osl.load(tmp_path / "plain")
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    osl.save(tmp_path / "out", leaves, options=with_model(options, tmp_path / "plain"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    given = dict(config["quantization_config"])
    if kind == "deepseek_fp8":
        from transformers import FineGrainedFP8Config

        plain = FineGrainedFP8Config(dequantize=True)
    else:
        from transformers.utils.quantization_config import CompressedTensorsConfig

        plain = CompressedTensorsConfig(run_compressed=False)
    assert given["quant_method"] in ("compressed-tensors", "fp8")
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=plain, dtype=torch.bfloat16
    )
    theirs = dict(opened.named_parameters())
    ours = osl.load(tmp_path / "out", mapping=osl.dequantized(tmp_path / "out"))
    quantised = [name for name in ours if "_proj" in name]
    assert len(quantised) == 14
    for name, leaf in ours.items():
        expected = theirs[name].detach().float().numpy()
        np.testing.assert_array_equal(np.asarray(leaf).astype(np.float32), expected, name)
    tokens = torch.arange(8)[None]
    assert torch.isfinite(opened(tokens).logits).all()
    assert jax.tree.leaves(ours)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((100, 256), None),
        ((384, 72), None),
        ((192, 128), "other"),
        ((256, 200), "other"),
        ((576, 256), "refused"),  # of DeepSeek-V3's kv_a_proj_with_mqa, which others read
        ((576, 192), "refused"),
    ],
)
def test_blocks_of_deepseek_are_those_that_transformers_takes(tmp_path, shape, problem):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(shape)
    if problem == "other":
        with pytest.raises(osl.MappingError, match=r"would open .*up_proj.*other values") as caught:
            saved(tmp_path, "deepseek_fp8", weight)
        assert "Quantization('fp8_block')" in str(caught.value)
        return
    saved(tmp_path, "deepseek_fp8", weight)
    ours = np.asarray(
        osl.load(tmp_path, mapping=osl.dequantized(tmp_path, dtype="float32"))[f"{UP}.weight"]
    )
    np.testing.assert_allclose(ours, weight.numpy(), atol=0.2)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    parts = [stored[f"{UP}.{name}"] for name in ("weight", "weight_scale_inv")]
    if problem == "refused":
        with pytest.raises(ValueError, match="not divisible by scale grid"):
            Fp8Dequantize(None)._dequantize_one(*parts)
    else:
        theirs = Fp8Dequantize(None)._dequantize_one(*parts, torch.float32)
        np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("kind", SCHEMES)
def test_an_output_layer_that_shares_the_embeddings_weight(tmp_path, kind):
    """It has no tensor in the files, and is no quantised module all the same."""
    from transformers import AutoModelForCausalLM

    tiny_llama(tmp_path / "plain", tie_word_embeddings=True)
    leaves = osl.load(tmp_path / "plain")
    assert "lm_head.weight" not in leaves
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    osl.save(tmp_path / "out", leaves, options=with_model(options, tmp_path / "plain"))
    opened, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    expected = np.asarray(leaves["model.embed_tokens.weight"]).astype(np.float32)
    np.testing.assert_array_equal(opened.lm_head.weight.detach().float().numpy(), expected)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("kind", ["fp8_channel", "int4", "mxfp4", "deepseek_fp8"])
def test_experts_that_transformers_fuses(tmp_path, kind):
    from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    config = Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        torch_dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    leaves = osl.load(tmp_path / "plain")
    osl.save(tmp_path / "out", leaves, options=with_model(options, tmp_path / "plain"))
    ours = osl.load(tmp_path / "out", mapping=osl.dequantized(tmp_path / "out"))
    osl.save(tmp_path / "expected", ours, options=osl.WriteOptions(model=tmp_path / "plain"))
    is_fp8 = kind == "deepseek_fp8"
    opened = Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=FineGrainedFP8Config(dequantize=True)
        if is_fp8
        else CompressedTensorsConfig(run_compressed=False),
        dtype=torch.bfloat16,
    )
    plain = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "expected", dtype=torch.bfloat16)
    theirs = dict(opened.named_parameters())
    for name, expected in plain.named_parameters():
        assert torch.equal(theirs[name].to(expected.dtype), expected), name
