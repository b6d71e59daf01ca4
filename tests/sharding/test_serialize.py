"""Shardings recorded and restored, on the eight CPU devices of conftest.py."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from meshes import mesh_of

from orbax_safetensors_layout.format import (
    UNCONSTRAINED,
    Manifest,
    MeshRecord,
    NamedRecord,
    ShardingRecord,
    SingleDeviceRecord,
    parse_manifest,
)
from orbax_safetensors_layout.sharding import ShardingTable, decode_sharding

P = PartitionSpec
DEVICES = jax.devices()


def recorded(sharding: Sharding) -> ShardingRecord:
    """The record of a sharding, after a trip through the side file's bytes."""
    table = ShardingTable()
    assert table.number(sharding) == 0
    data = Manifest("hf", shardings=tuple(table.records)).to_json()
    (record,) = parse_manifest(data, file="m.json").shardings
    assert record == table.records[0]
    return record


@st.composite
def named_shardings(draw: Any) -> NamedSharding:
    sizes = draw(st.sampled_from([(8,), (4, 2), (2, 2, 2), (1, 3), (2,), (1,), ()]))
    names = ("x", "y", "a b")[: len(sizes)]
    kinds = draw(st.tuples(*[st.sampled_from([AxisType.Auto, AxisType.Explicit])] * len(sizes)))
    devices = draw(st.permutations(DEVICES))
    mesh = mesh_of(devices, **dict(zip(names, sizes, strict=True)), axis_types=kinds)
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), max_size=3)))
    groups = [names[a:b] for a, b in itertools.pairwise([0, *cuts])]
    spec = [group if len(group) > 1 else (group or (None,))[0] for group in groups]
    memory = draw(st.sampled_from([None, "pinned_host"]))
    free = [None, P.UNCONSTRAINED] if AxisType.Auto in kinds else [None]
    rest = draw(st.lists(st.sampled_from(free), max_size=2))
    return NamedSharding(mesh, P(*spec, *rest), memory_kind=memory)


@given(sharding=named_shardings())
def test_named_shardings_come_back_equal(sharding: NamedSharding) -> None:
    restored = decode_sharding(recorded(sharding))
    assert restored == sharding
    assert isinstance(restored, NamedSharding)
    assert restored.memory_kind == sharding.memory_kind
    assert restored.mesh.axis_types == sharding.mesh.axis_types
    assert list(restored.mesh.devices.flat) == list(sharding.mesh.devices.flat)


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_single_devices_come_back_equal(memory_kind: str | None) -> None:
    sharding = SingleDeviceSharding(DEVICES[3], memory_kind=memory_kind)
    assert recorded(sharding) == SingleDeviceRecord(3, memory_kind)
    assert decode_sharding(recorded(sharding)) == sharding


def test_record_of_a_named_sharding() -> None:
    mesh = mesh_of(DEVICES[:1:-1], data=2, model=3)
    spec = P(("data", "model"), None, P.UNCONSTRAINED)
    assert recorded(NamedSharding(mesh, spec)) == NamedRecord(
        MeshRecord(("data", "model"), (2, 3), ("auto", "auto"), (7, 6, 5, 4, 3, 2)),
        (("data", "model"), None, UNCONSTRAINED),
        None,
    )


def test_shardings_of_arrays_come_back() -> None:
    sharding = NamedSharding(mesh_of(x=4, y=2), P("y", "x"))
    for array in (jax.device_put(jnp.ones((8, 8)), sharding), jnp.ones(3), jnp.float32(1)):
        assert decode_sharding(recorded(array.sharding)) == array.sharding
        placed = jax.device_put(np.asarray(array), decode_sharding(recorded(array.sharding)))
        assert placed.sharding == array.sharding


def test_the_default_memory_is_recorded_by_no_name() -> None:
    kind = DEVICES[0].default_memory().kind
    record = recorded(NamedSharding(mesh_of(x=8), P(), memory_kind=kind))
    assert record.memory_kind is None


def test_equal_shardings_are_recorded_once() -> None:
    table = ShardingTable()
    mesh = mesh_of(x=4, y=2)
    shardings = [
        NamedSharding(mesh, P("x")),
        SingleDeviceSharding(DEVICES[0]),
        NamedSharding(mesh_of(x=4, y=2), P("x")),
        NamedSharding(mesh, P("y")),
        NamedSharding(mesh, P("x"), memory_kind="pinned_host"),
        SingleDeviceSharding(DEVICES[0]),
    ]
    assert [table.number(sharding) for sharding in shardings] == [0, 1, 0, 2, 3, 1]
    assert len(table.records) == 4


@dataclasses.dataclass(frozen=True)
class Name:
    """A mesh axis that is called by no string."""

    number: int


@pytest.mark.parametrize(
    "sharding",
    [
        NamedSharding(AbstractMesh((8,), ("x",)), P("x")),
        NamedSharding(Mesh(np.array(DEVICES), (Name(1),)), P(Name(1))),
        NamedSharding(mesh_of(x=8, axis_types=(AxisType.Explicit,)), P(None, unreduced={"x"})),
    ],
    ids=["abstract", "odd names", "unreduced"],
)
def test_other_shardings_are_not_recorded(sharding: Sharding) -> None:
    table = ShardingTable()
    assert table.number(sharding) is None
    assert table.number(sharding) is None
    assert table.records == []


def test_devices_of_another_backend_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:2])
    table = ShardingTable()
    assert table.number(SingleDeviceSharding(DEVICES[1])) == 0
    assert table.number(SingleDeviceSharding(DEVICES[2])) is None
    assert table.number(NamedSharding(mesh_of(DEVICES, x=8), P("x"))) is None


MESH = MeshRecord(("x",), (2,), ("auto",), (0, 1))


@pytest.mark.parametrize(
    "stored",
    [
        SingleDeviceRecord(8),
        SingleDeviceRecord(0, "bogus"),
        NamedRecord(MESH, ("x",), "bogus"),
        NamedRecord(dataclasses.replace(MESH, devices=(7, 8)), ("x",)),
        NamedRecord(dataclasses.replace(MESH, axis_types=("quantum",)), ("x",)),
    ],
)
def test_what_this_process_does_not_allow_is_not_restored(stored: ShardingRecord) -> None:
    assert decode_sharding(stored) is None


def test_thousands_of_arrays_share_a_few_records() -> None:
    mesh = mesh_of(x=4, y=2)
    shardings = [NamedSharding(mesh, P(*spec)) for spec in itertools.product("xy", [None])] * 30_000
    table = ShardingTable()
    assert {table.number(sharding) for sharding in shardings} == {0, 1}
