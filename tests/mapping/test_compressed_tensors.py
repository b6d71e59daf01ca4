"""Quantised weights as compressed-tensors writes them, decoded as it decodes them."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

SHAPE = (32, 256)
INTEGERS = {
    f"int{bits} {strategy} {'symmetric' if symmetric else 'zero points'}": (
        "pack-quantized",
        {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric},
    )
    for bits in range(2, 9)
    for strategy in ("group", "channel")
    for symmetric in (True, False)
}
FORMATS = INTEGERS | {
    "int4 tensor": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor"}),
    **{
        f"int8 {strategy} {symmetric}": (
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric},
        )
        for strategy in ("tensor", "channel")
        for symmetric in (True, False)
    },
    **{
        f"fp8 {strategy}": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": strategy},
        )
        for strategy in ("tensor", "channel")
    },
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    ),
}


def parts_of(fmt, weights, dtype):
    """Return a weight with scales, and zero points where asked for, to be compressed."""
    rows, columns = SHAPE
    group = weights.setdefault("group_size", 32) if weights["strategy"] == "group" else None
    shape = {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, columns // (group or 1)),
        "tensor_group": (rows, columns // 16),
        "block": (rows // 16, columns // 64),
    }[weights["strategy"]]
    scale = torch.rand(shape) * 0.1 + 0.2
    if fmt.startswith("mx"):  # exponents
        scale = 0.25 * 2.0 ** torch.randint(-2, 3, shape)
    parts = {"weight": torch.randn(SHAPE, dtype=dtype), "weight_scale": scale.to(dtype)}
    if not weights.get("symmetric", True):
        parts["weight_zero_point"] = torch.randint(-1, 2, shape).to(torch.int8)
    if fmt.startswith("nvfp4"):
        parts["weight_global_scale"] = torch.tensor([13.7])
    return parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_shards_are_what_the_library_decodes(tmp_path, kind, dtype):
    import safetensors.torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(len(kind))
    fmt, weights = FORMATS[kind][0], dict(FORMATS[kind][1])
    parts = parts_of(fmt, weights, getattr(torch, dtype))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(fmt)
    stored = compressor.compress(dict(parts), scheme)
    decoded = compressor.decompress(dict(stored), scheme)["weight"]
    safetensors.torch.save_file(
        {f"up.{name}": part.contiguous() for name, part in stored.items()},
        tmp_path / "model.safetensors",
    )
    groups = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    config = {"quant_method": "compressed-tensors", "format": fmt, **groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    mapping = osl.dequantized(tmp_path, dtype=str(decoded.dtype).removeprefix("torch."))
    leaf = mapping.leaf_facts(tmp_path)["up.weight"]
    sharding = NamedSharding(mesh_of(x=2, y=2), P("x", "y"))
    tree = {"up": {"weight": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)}}
    loaded = osl.load(tmp_path, tree, mapping=mapping)["up"]["weight"]
    expected = decoded.float().numpy()
    np.testing.assert_array_equal(np.asarray(loaded).astype(np.float32), expected)
