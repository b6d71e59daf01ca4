"""Write plans: every byte once over all processes, the same plan everywhere, in balance."""

from __future__ import annotations

import math
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from plans import all_plans, check_plans, held_boxes, leaf_writes, shape_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, NewTensor
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.plan import LeafWrite
from orbax_safetensors_layout.sharding import GlobalShards, ProcessShards

P = PartitionSpec
BF16 = np.dtype(ml_dtypes.bfloat16)


@st.composite
def write_options(draw):
    return osl.WriteOptions(
        layout=draw(st.sampled_from(["hf", "sharded"])),
        max_file_bytes=draw(st.sampled_from([1, 50, 200, 10**9])),
        replicate_below_bytes=draw(st.sampled_from([0, 16, 1 << 16])),
    )


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 6), write_options())
def test_every_byte_is_written_once(data, processes, options):
    leaves = data.draw(leaf_writes(processes))
    check_plans(all_plans(leaves, options, processes), options)


MESHES = [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 4}, {"a": 1}]


@st.composite
def abstract_trees(draw):
    """A tree over an abstract mesh, how many processes share it, and who holds which cell."""
    axes = draw(st.sampled_from(MESHES))
    devices = math.prod(axes.values())
    processes = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    tree = {}
    for number in range(draw(st.integers(1, 5))):
        rank = draw(st.integers(0, 3))
        names = draw(st.permutations(list(axes)))
        spec = [()] * rank
        for name in names[: draw(st.integers(0, len(names)))] if rank else ():
            axis = draw(st.integers(0, rank - 1))
            spec[axis] = (*spec[axis], name)
        ways = [math.prod(axes[n] for n in part) for part in spec]
        shape = tuple(w * draw(st.integers(0 if w == 1 else 1, 3)) for w in ways)
        sharding = NamedSharding(mesh, P(*[part or None for part in spec]))
        tree[f"t{number}"] = jax.ShapeDtypeStruct(
            shape, draw(st.sampled_from([np.float32, BF16])), sharding=sharding
        )
    if draw(st.booleans()):
        tree["host"] = np.zeros((3, 5))
    return tree, axes, processes


@settings(deadline=None, max_examples=100)
@given(abstract_trees(), write_options())
def test_every_byte_of_a_sharded_tree_is_written_once(case, options):
    tree, _, processes = case
    plans = [
        osl.plan_save(tree, options=options, process_index=index, process_count=processes)
        for index in range(processes)
    ]
    for plan in plans:
        assert (plan.files, plan.stored) == (plans[0].files, plans[0].stored)
    check_plans(plans, options)


@settings(deadline=None, max_examples=100)
@given(abstract_trees())
def test_holders_are_those_of_jax(case):
    """Against JAX's own index map of a mesh of real devices, in order."""
    tree, axes, processes = case
    devices = math.prod(axes.values())
    if devices > jax.device_count():
        return
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(list(axes.values())), tuple(axes))
    for leaf in tree.values():
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        expected: dict[Box, set[int]] = {}
        concrete = NamedSharding(mesh, leaf.sharding.spec)
        for device, index in concrete.devices_indices_map(leaf.shape).items():
            starts, stops, _ = zip(
                *(i.indices(n) for i, n in zip(index, leaf.shape, strict=True)), strict=True
            ) if leaf.shape else ((), (), ())  # fmt: skip
            process = list(mesh.devices.flat).index(device) // (devices // processes)
            expected.setdefault(Box(tuple(starts), tuple(stops)), set()).add(process)
        held = ProcessShards(0, processes).held(leaf.sharding, leaf.shape)
        holders = {box: set(all_) for box, all_ in zip(*held, strict=True)}
        if math.prod(leaf.shape):
            assert holders == expected
        else:
            assert holders == {Box.whole(leaf.shape): set().union(*expected.values())}


@settings(deadline=None, max_examples=50)
@given(held_boxes(processes=4), st.sampled_from(["hf", "sharded"]))
def test_the_plan_depends_on_what_is_held_alone(held, layout):
    """Not on whether two leaves share one description of it or have equal ones."""
    options = osl.WriteOptions(layout=layout, max_file_bytes=64, replicate_below_bytes=8)
    dtype = DTYPES["F32"]
    tensors = [NewTensor(f"t{number}", dtype, shape_of(held)) for number in range(5)]
    shared = [LeafWrite(tensor, dtype.numpy, held) for tensor in tensors]
    apart = [LeafWrite(tensor, dtype.numpy, GlobalShards(*held)) for tensor in tensors]
    for first, other in zip(
        all_plans(shared, options, 4), all_plans(apart, options, 4), strict=True
    ):
        assert [w[:3] for w in first.writes()] == [w[:3] for w in other.writes()]
        assert first.files == other.files


def test_arrays_on_a_part_of_the_devices():
    """Only the processes that hold an array write it."""
    devices = jax.devices()
    half = Mesh(np.array(devices[4:]), ("x",))
    tree = {
        "half": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(half, P("x"))),
        "one": jax.ShapeDtypeStruct((3,), np.float32, sharding=SingleDeviceSharding(devices[6])),
    }
    plan = osl.plan_save(tree)
    (file,) = plan.own
    assert [part.tile.grid for part in file.parts] == [(4, 1), (1,)]
    check_plans([plan], osl.WriteOptions())


class Share:
    """Bytes that each process writes, from the plan of one of them."""

    def __init__(self, plan):
        count = plan.process_count
        sizes = {leaf.tensor.name: leaf.tensor.nbytes for leaf in plan.leaves}
        self.direct, self.pieces, self.gathered = np.zeros((3, count), np.int64)
        stored = plan.stored
        pieced = set(stored.tensors) if stored else set()
        for _, owner, tensors in plan.files:
            for tensor in tensors:
                into = self.gathered if tensor.name in pieced else self.direct
                into[owner] += tensor.nbytes
        if stored:
            process = [int(name.split("shard-")[1][:5]) - 1 for name in stored.files]
            for name, (_, shape, number) in stored.tensors.items():
                itemsize = sizes[name] // math.prod(shape)
                for box in stored.classes[number]:
                    self.pieces[process[box.file]] += box.box.size * itemsize
        self.first = self.direct + self.pieces
        self.all = self.first + self.gathered


def imbalance(loads):
    return loads.max() / loads.mean()


def llama(layers, hidden, mesh, spec_of):
    """Names and shapes of Llama, as wide and deep as asked for."""
    shapes = {
        "model.embed_tokens.weight": (16 * hidden, hidden),
        "lm_head.weight": (16 * hidden, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (hidden // 4, hidden),
            prefix + "self_attn.v_proj.weight": (hidden // 4, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (4 * hidden, hidden),
            prefix + "mlp.up_proj.weight": (4 * hidden, hidden),
            prefix + "mlp.down_proj.weight": (hidden, 4 * hidden),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    return {
        name: jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, spec_of(shape)))
        for name, shape in shapes.items()
    }


def placements(processes):
    """Meshes of four devices a process, and how a Llama is laid out on them."""
    devices = 4 * processes
    flat = AbstractMesh((devices,), ("fsdp",))
    square = AbstractMesh((devices // 4, 4), ("fsdp", "tp"))
    half = AbstractMesh((2, devices // 2), ("replica", "fsdp"))
    return {
        "replicated": (flat, lambda s: P()),
        "dim0": (flat, lambda s: P("fsdp") if s[0] % devices == 0 else P()),
        "dim1": (flat, lambda s: P(None, "fsdp") if len(s) > 1 else P()),
        "2d": (square, lambda s: P("fsdp", "tp") if len(s) > 1 else P("tp")),
        "tp": (square, lambda s: P(None, "tp") if len(s) > 1 else P()),
        "hsdp": (half, lambda s: P(None, "fsdp") if len(s) > 1 else P()),
    }


@pytest.mark.parametrize("kind", list(placements(1)))
@pytest.mark.parametrize("processes", [2, 4, 8, 64, pytest.param(256, marks=pytest.mark.soak)])
def test_processes_write_about_equally_much(processes, kind):
    mesh, spec_of = placements(processes)[kind]
    tree = llama(max(32, processes), 1024, mesh, spec_of)
    total = sum(leaf.size * 2 for leaf in tree.values())
    for layout in ("hf", "sharded"):
        options = osl.WriteOptions(layout=layout, max_file_bytes=total // (8 * processes))
        share = Share(osl.plan_save(tree, options=options, process_count=processes))
        if layout == "hf":
            assert (share.direct + share.gathered).sum() == total
            assert imbalance(share.direct + share.gathered) <= 1.3
        assert imbalance(share.first) <= 1.3
        assert imbalance(share.all) <= 1.3
        if layout == "sharded" and kind != "hsdp":
            small = sum(leaf.size * 2 for leaf in tree.values() if leaf.size * 2 <= 1 << 16)
            assert total <= share.pieces.sum() <= total + processes * small
        if layout == "hf" and kind == "replicated":  # nothing has to be exchanged
            assert not share.pieces.any()


def test_large_tensors_of_small_shards_are_written_once():
    """Two tensors of 8 MiB, each in 128 shards of 64 KiB, and that four times over."""
    mesh = AbstractMesh((4, 128), ("replica", "fsdp"))
    sharding = NamedSharding(mesh, P(None, "fsdp"))
    tree = {n: jax.ShapeDtypeStruct((1024, 4096), BF16, sharding=sharding) for n in ("a", "b")}
    share = Share(osl.plan_save(tree, options=osl.WriteOptions(layout="sharded"), process_count=64))
    assert share.pieces.sum() == 2 * 1024 * 4096 * 2


def test_small_replicated_tensors_are_in_every_file_of_pieces():
    mesh = AbstractMesh((8,), ("x",))
    tree = {
        "small": jax.ShapeDtypeStruct((100,), np.float32, sharding=NamedSharding(mesh, P())),
        "large": jax.ShapeDtypeStruct((100_000,), np.float32, sharding=NamedSharding(mesh, P())),
        "split": jax.ShapeDtypeStruct((8, 100), np.float32, sharding=NamedSharding(mesh, P("x"))),
    }
    options = osl.WriteOptions(layout="sharded")
    plans = [
        osl.plan_save(tree, options=options, process_index=index, process_count=4)
        for index in range(4)
    ]
    check_plans(plans, options)
    holds = [{entry.name for entry in plan.pieces.layout.tensors} for plan in plans]
    assert all("small" in names for names in holds)
    assert sum("large" in names for names in holds) == 1
    assert [sorted(n for n in names if n.startswith("split")) for names in holds] == [
        [f"split@{2 * process},0"] for process in range(4)
    ]


def test_the_plan_says_what_it_costs():
    mesh = AbstractMesh((8,), ("x",))
    sharding = NamedSharding(mesh, P(None, "x"))
    tree = {
        f"t{n}": jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding) for n in range(8)
    }
    options = osl.WriteOptions(max_file_bytes=40_000)
    plans = [
        osl.plan_save(tree, options=options, process_index=index, process_count=2)
        for index in range(2)
    ]
    for plan in plans:
        cost = plan.cost()
        assert cost.written_bytes == sum(file.layout.size for file in plan.writes())
        assert cost.files == len(list(plan.writes()))
        assert "process 1" in str(plan)
    assert sum(plan.cost().read_bytes for plan in plans) == 8 * 64 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (P(None, "fsdp"), "hf"),
        (P("tp", "fsdp"), "sharded"),
        *(
            pytest.param(spec, layout, marks=pytest.mark.soak)
            for spec, layout in [
                (P(None, "fsdp"), "sharded"),
                (P("fsdp"), "hf"),
                (P("fsdp"), "sharded"),
                (P("tp", "fsdp"), "hf"),
            ]
        ),
    ],
)
def test_plans_of_a_thousand_devices_are_quick(spec, layout):
    """10,000 tensors on 1,024 devices: a ninth of the largest models' number."""
    axes = {"fsdp": 32, "tp": 32} if "tp" in spec else {"fsdp": 1024}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    tree = {
        f"model.layers.{n // 100}.experts.{n % 100}.weight": jax.ShapeDtypeStruct(
            (2048, 4096), BF16, sharding=NamedSharding(mesh, spec)
        )
        for n in range(10_000)
    }
    # Counted, not timed: what is done for a tensor does not grow with the devices.
    with mock.patch.object(Box, "size", new_callable=mock.PropertyMock, return_value=1) as size:
        osl.plan_save(tree, options=osl.WriteOptions(layout=layout), process_count=128)
    assert size.call_count < 20_000
