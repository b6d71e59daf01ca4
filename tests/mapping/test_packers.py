"""Weights that bitsandbytes and ModelOpt quantise decode to the values that they give."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import abstract_of, mesh_of
from packers import bare_packages

import orbax_safetensors_layout as osl

torch = pytest.importorskip("torch")

NAME = "model.layers.0.mlp.up_proj"
SHAPES = [(64, 128), (96, 320), (8, 4096)]


def check(folder, tensors, config, expected):
    """Compares whole weights, and shards of either dimension, in float32 and bfloat16."""
    from safetensors.torch import save_file

    save_file(
        {f"{NAME}.{name}": tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    for dtype in ("float32", "bfloat16"):
        mapping = osl.dequantized(folder, dtype=dtype)
        shapes = mapping.abstract(folder)
        for spec in (P(), P("x"), P(None, "x")):
            sharding = NamedSharding(mesh_of(x=8), spec)
            loaded = osl.load(folder, abstract_of(shapes, sharding), mapping=mapping)
            (array,) = loaded["model"]["layers"]["0"]["mlp"]["up_proj"].values()
            theirs = expected.to(getattr(torch, dtype)).float().numpy()
            np.testing.assert_array_equal(np.asarray(array, np.float32), theirs)


@pytest.mark.filterwarnings("ignore")  # of torch
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(tmp_path, kind, nested, shape):
    check_bitsandbytes(tmp_path, kind, nested, shape, "uint8")


@pytest.mark.filterwarnings("ignore")  # of torch
@pytest.mark.parametrize("shape", [(64, 128), (8, 24)])
@pytest.mark.parametrize("storage", ["int8", "float16", "bfloat16", "float32"])
def test_bytes_of_bitsandbytes_in_another_dtype(tmp_path, storage, shape):
    check_bitsandbytes(tmp_path, "nf4", False, shape, storage)


def check_bitsandbytes(tmp_path, kind, nested, shape, storage):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    packed, state = functional.quantize_4bit(
        torch.randn(shape),
        blocksize=64,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=getattr(torch, storage),
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    expected = functional.dequantize_4bit(packed, state)
    assert expected.dtype == torch.float32
    check(tmp_path, {"weight": packed, **parts}, config, expected)


@pytest.fixture
def nvfp4():
    """ModelOpt's tensor of NVFP4."""
    unused = dict.fromkeys(["fsdp2_aware_weight_update", "patch_fsdp_mp_dtypes"])
    packages = {
        "torch": {},
        "torch.utils": dict.fromkeys(["get_unwrapped_name", "print_rank_0"]),
        "torch.utils.network": {"temporarily_remove_accelerate_hook": None},
        "torch.quantization": {},
        "torch.quantization.config": {"QuantizerCfgEntry": None},
        "torch.quantization.backends": {},
        "torch.quantization.backends.utils": {"fp4_compatible": lambda: False},
        "torch.quantization.qtensor": {},
        "torch.quantization.utils": unused,
    }
    with bare_packages("modelopt", packages):
        utilities = "modelopt.torch.quantization.utils"
        core = importlib.import_module(f"{utilities}.core_utils")
        for name in ("reduce_amax", "reduce_block_amax", "reduce_block_padding"):
            setattr(importlib.import_module(utilities), name, getattr(core, name))
        name = "modelopt.torch.quantization.qtensor.nvfp4_tensor"
        yield importlib.import_module(name).NVFP4QTensor


@pytest.mark.filterwarnings("ignore")  # of torch
@pytest.mark.parametrize("shape", SHAPES)
def test_modelopt_nvfp4(nvfp4, tmp_path, shape):
    torch.manual_seed(0)
    packed, scale, factor = nvfp4.quantize(torch.randn(shape), 16)
    expected = packed.dequantize(
        dtype=torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16}
    )
    tensors = {
        "weight": packed._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.ones(()),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    check(tmp_path, tensors, config, expected)
