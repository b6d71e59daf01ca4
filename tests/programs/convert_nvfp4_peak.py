"""Converts a large NVFP4 model to bfloat16 in Orbax's format; prints the peak memory, in bytes."""

import json
import struct
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import peak_memory

import orbax_safetensors_layout as osl

ROOT, GIGABYTES, BUDGET = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
FOLDER, TARGET = ROOT / "nvfp4", ROOT / "orbax"
LAYER = {  # those of a Llama of 70 billion parameters
    "self_attn.q_proj": (8192, 8192),
    "self_attn.k_proj": (1024, 8192),
    "self_attn.v_proj": (1024, 8192),
    "self_attn.o_proj": (8192, 8192),
    "mlp.gate_proj": (28672, 8192),
    "mlp.up_proj": (28672, 8192),
    "mlp.down_proj": (8192, 28672),
}
CODES, FACTOR = 1 << 16, 0.25
VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def make_source():
    """A file of zeros, but for the first bytes of each tensor; a sparse one."""
    header, end = {}, 0
    layer = 0
    while end < GIGABYTES * 1e9:
        for name, (rows, columns) in LAYER.items():
            before = f"model.layers.{layer}.{name}."
            for part, dtype, shape in (
                ("weight", "U8", [rows, columns // 2]),
                ("weight_scale", "F8_E4M3", [rows, columns // 16]),
                ("weight_scale_2", "F32", []),
            ):
                nbytes = int(np.prod(shape)) * (4 if dtype == "F32" else 1)
                offsets = [end, end + nbytes]
                header[before + part] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
                end += nbytes
        layer += 1
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    rng = np.random.default_rng(0)
    first = {}
    with (FOLDER / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(data)) + data)
        stream.truncate(8 + len(data) + end)
        for name, entry in header.items():
            stream.seek(8 + len(data) + entry["data_offsets"][0])
            if name.endswith("_scale_2"):
                stream.write(struct.pack("<f", FACTOR))
            elif name.endswith("_scale"):
                stream.write(np.full(CODES // 8, 0x38, np.uint8).tobytes())  # ones
            else:
                first[name] = rng.integers(0, 256, CODES, dtype=np.uint8)
                stream.write(first[name].tobytes())
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    config = {"model_type": "llama", "quantization_config": settings}
    (FOLDER / "config.json").write_text(json.dumps(config))
    return first


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def main():
    FOLDER.mkdir()
    first = make_source()
    peak_memory.reset()
    options = osl.ConvertOptions(memory_budget_bytes=BUDGET)
    converted = osl.convert(
        FOLDER, TARGET, dequantize="bfloat16", mesh={"fsdp": 16}, options=options
    )
    peak = peak_memory.peak_bytes()
    assert converted.tensors == len(first)
    import orbax.checkpoint as ocp

    name, codes = next(iter(first.items()))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=nested(name, 0),
            partial_restore=True,
            restore_args=nested(name, ocp.RestoreArgs(restore_type=np.ndarray)),
        )
        (found,) = jax.tree.leaves(checkpointer.restore(TARGET, args=arguments))
    pairs = np.stack([codes & 15, codes >> 4], 1).reshape(-1)
    expected = np.zeros(found.size, np.float32)
    expected[: pairs.size] = VALUES[pairs] * FACTOR
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found.astype(np.float32).reshape(-1), expected)
    print(peak)


main()
