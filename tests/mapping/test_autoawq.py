"""A small model that autoawq packs: decoded weights, and logits, are those of its own modules."""

import importlib
import json
import warnings

import numpy as np
import pytest
from packers import bare_packages

import orbax_safetensors_layout as osl

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BITS, GROUP = 4, 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def awq():
    """Its linear module and its decoder; the package itself imports models of old transformers."""
    with bare_packages("awq", {"modules": {}, "modules.linear": {}}):
        gemm = importlib.import_module("awq.modules.linear.gemm")
        packing = importlib.import_module("awq.utils.packing_utils")
        yield gemm.WQLinear_GEMM, packing.dequantize_gemm


def quantize(module, linear):
    """One scale and zero point for each group of a row, from its least and largest value."""
    weight = linear.weight.data.float().reshape(linear.out_features, -1, GROUP)
    low, high = weight.amin(2).clamp(max=0), weight.amax(2).clamp(min=0)
    scales = ((high - low).clamp(min=1e-5) / (2**BITS - 1)).half()
    zeros = (-torch.round(low / scales.float())).clamp(0, 2**BITS - 1)
    steps = torch.round(weight / scales.float()[..., None]) + zeros[..., None]
    clipped = (steps.clamp(0, 2**BITS - 1) - zeros[..., None]) * scales.float()[..., None]
    linear.weight.data = clipped.reshape(linear.weight.shape)
    # Groups are rows of these.
    return module.from_linear(linear, BITS, GROUP, scales=scales.T, zeros=zeros.T)


@pytest.mark.filterwarnings("ignore")  # of torch and transformers
def test_a_model_of_autoawq(awq, tmp_path):
    from huggingface_hub import save_torch_state_dict

    module, decode = awq
    config = transformers.LlamaConfig(**SIZES, attention_bias=True)
    torch.manual_seed(0)
    packed = transformers.LlamaForCausalLM(config).eval()
    for parameter in packed.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.1
    for layer in packed.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, quantize(module, linear))
    packed = packed.half()
    save_torch_state_dict(packed.state_dict(), tmp_path, max_shard_size="40KB")
    settings = {"quant_method": "awq", "bits": BITS, "group_size": GROUP}
    settings |= {"version": "gemm", "zero_point": True}
    text = {**config.to_dict(), "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(text))

    plain = osl.load(tmp_path, mapping=osl.dequantized(tmp_path, dtype="float16"))
    linear = packed.model.layers[1].mlp.down_proj
    theirs = decode(linear.qweight, linear.qzeros, linear.scales, BITS, GROUP).numpy()
    np.testing.assert_array_equal(plain["model.layers.1.mlp.down_proj.weight"], theirs.T)
    exact = osl.load(tmp_path, mapping=osl.dequantized(tmp_path, dtype="float32"))
    for name, array in exact.items():
        np.testing.assert_array_equal(array.astype(np.float16), plain[name])

    model = transformers.LlamaForCausalLM(config).eval().half()
    state = {name: torch.from_numpy(np.array(array)) for name, array in plain.items()}
    assert model.load_state_dict(state)
    tokens = torch.arange(24)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, logits = packed(tokens).logits, model(tokens).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(logits, expected, rtol=0, atol=float(expected.abs().max()) * 2e-3)
