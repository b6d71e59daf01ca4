"""Host memory of loads whose values are computed, and of a large one in a process of its own."""

import json
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import save
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from programs import run_alone
from sampling import every

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.runtime.memory as buffers
from orbax_safetensors_layout.runtime.memory import Pages

BUDGET = 8 << 20
BESIDES = 24 << 20
"""A huge page for each of eight shards, asked for and not touched, and what threads stage."""
ROWS, COLUMNS = 4096, 4096


def decoded():
    return osl.dequantize_block(osl.tensor("f8"), osl.tensor("scale"), dtype="float32")


COMPUTED = {
    "a stack of products": (osl.stack(osl.tensor("f.{i}").scale(2.0), over="i"), P(None, "x")),
    "a cast": (osl.tensor("f").cast("bfloat16"), P("x")),
    "a cast of columns": (osl.tensor("f").cast("bfloat16"), P(None, "x")),
    "a cast and transposed": (osl.tensor("f").transpose().cast("bfloat16"), P("x")),
    "replicated": (osl.tensor("f").scale(0.5), P()),
    "padded": (osl.tensor("f").scale(0.5).pad(0, 8, 8), P("x")),
    "of several dtypes": (
        osl.concat([osl.tensor("f").cast("bfloat16"), osl.tensor("b")], 0),
        P(None, "x"),
    ),
    "decoded": (decoded(), P("x")),
    "decoded, columns": (decoded(), P(None, "x")),
    "decoded and transposed": (decoded().transpose(), P("x")),
}


@pytest.fixture(scope="module")
def computed_from(tmp_path_factory):
    rng = np.random.default_rng(0)
    scale = (rng.random((ROWS // 128, COLUMNS // 128)) + 0.5).astype(np.float32)
    floats = rng.standard_normal((ROWS, COLUMNS), np.float32)
    tensors = {
        **{f"f.{i}": part for i, part in enumerate(np.split(floats, 4))},
        "f": floats,
        "b": floats[:1024].astype(ml_dtypes.bfloat16),
        "f8": floats.astype(ml_dtypes.float8_e4m3fn),
        "scale": scale,
    }
    folder = tmp_path_factory.mktemp("computed")
    for name, value in tensors.items():
        save(folder / name, {name: value})
        (folder / name / "model.safetensors").rename(folder / f"{name}.safetensors")
        (folder / name).rmdir()
    return folder, tensors


@pytest.mark.parametrize("kind", every(3, COMPUTED))
def test_values_are_computed_within_the_budget(computed_from, kind):
    """And into the memory that the arrays keep: devices that hold the same share it."""
    folder, tensors = computed_from
    expr, spec = COMPUTED[kind]
    mapping = osl.Mapping([osl.rule("leaf", expr)], strict=False)
    (metadata,) = osl.metadata(folder, mapping=mapping).values()
    mesh = mesh_of(x=8)
    leaf = jax.ShapeDtypeStruct(metadata.shape, metadata.dtype, sharding=NamedSharding(mesh, spec))
    options = osl.ReadOptions(memory_budget_bytes=BUDGET)
    tracemalloc.start()
    try:
        loaded = osl.load(folder, {"leaf": leaf}, mapping=mapping, options=options)["leaf"]
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    shards = [shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards]
    assert len(set(shards)) == (1 if spec == P() else 8)
    assert held <= metadata.nbytes + BESIDES
    assert peak <= metadata.nbytes + BESIDES + BUDGET
    print(
        f"{kind}: {metadata.nbytes / 1e6:.1f} MB, peak {(peak - metadata.nbytes) / 1e6:.1f} MB more"
    )
    np.testing.assert_array_equal(np.asarray(loaded), expected(kind, tensors))


def expected(kind, tensors):
    floats = tensors["f"]
    decoded = tensors["f8"].astype(np.float32) * tensors["scale"].repeat(128, 0).repeat(128, 1)
    narrow = floats.astype(ml_dtypes.bfloat16)
    return {
        "a stack of products": 2 * floats.reshape(4, ROWS // 4, COLUMNS),
        "a cast": narrow,
        "a cast of columns": narrow,
        "a cast and transposed": narrow.T,
        "replicated": floats / 2,
        "padded": np.pad(floats / 2, ((8, 8), (0, 0))),
        "of several dtypes": np.concatenate([narrow, tensors["b"]]),
        "decoded": decoded,
        "decoded, columns": decoded,
        "decoded and transposed": decoded.T,
    }[kind]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_plain_cast_stays_within_the_budget(computed_from, dtype):
    folder, tensors = computed_from
    mesh = mesh_of(x=8)
    sharding = NamedSharding(mesh, P("x"))
    leaf = jax.ShapeDtypeStruct((ROWS, COLUMNS), jax.numpy.bfloat16, sharding=sharding)
    if dtype == "float64":
        leaf = np.empty((ROWS, COLUMNS), np.float64)
    options = osl.ReadOptions(memory_budget_bytes=BUDGET)
    tracemalloc.start()
    try:
        loaded = osl.load(folder / "f.safetensors", {"f": leaf}, options=options)["f"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= loaded.nbytes + BESIDES + BUDGET
    np.testing.assert_array_equal(np.asarray(loaded), tensors["f"].astype(loaded.dtype))


@pytest.mark.parametrize("kind", ["a cast", "of several dtypes"])
def test_values_are_read_into_the_same_memory_again(computed_from, kind, monkeypatch):
    """Fresh memory for each slab took more time than what was computed."""
    folder, tensors = computed_from
    mapping = osl.Mapping([osl.rule("leaf", COMPUTED[kind][0])], strict=False)
    options = osl.ReadOptions(memory_budget_bytes=4 * BUDGET)
    (metadata,) = osl.metadata(folder, mapping=mapping).values()
    allocations = []

    class Recorded(Pages):
        def map(self, nbytes):
            allocations.append(nbytes)
            return super().map(nbytes)

    monkeypatch.setattr(buffers, "_pages", Recorded())
    leaf = np.empty(metadata.shape, metadata.dtype)
    loaded = osl.load(folder, {"leaf": leaf}, mapping=mapping, options=options)["leaf"]
    print(
        f"{kind}: {sum(allocations) / 1e6:.1f} MB of fresh memory for {loaded.nbytes / 1e6:.1f} MB"
    )
    assert sum(allocations) <= loaded.nbytes + 4 * BUDGET + BESIDES
    np.testing.assert_array_equal(loaded, expected(kind, tensors))


# Two layers of 64 experts, a tensor each, as sparse files: 2.2 GB that take no disk.


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is asked of /proc")
@pytest.mark.parametrize("split", [[None, "x"], [None, None, "x"], [None, None, None, "x"]])
def test_stacked_experts_take_their_arrays_and_the_budget(tmp_path, split):
    printed = run_alone(
        "mapping_memory.py",
        tmp_path,
        json.dumps(split),
        environment={
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    )
    arrays, grown = json.loads(printed.splitlines()[-1])
    assert arrays > 2_000_000_000
    print(f"{split}: arrays of {arrays / 1e6:,.0f} MB, peak {(grown - arrays) / 1e6:,.1f} MB more")
    assert grown <= arrays + (64 << 20) + (64 << 20)
