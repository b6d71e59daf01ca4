"""Mappings over what other mappings make: the same as one after the other, on each shard."""

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits, save
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping import fingerprint

NO_GAPS = osl.ReadOptions(latency_seconds={"local": 0.0})
RNG = np.random.default_rng(3)
LAYERS, ROWS, COLUMNS = 3, 16, 32
TENSORS = {
    f"layers.{i}.{name}": value
    for i in range(LAYERS)
    for name, value in {
        "up.q": RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8),
        "up.scale": RNG.random((ROWS, 1)).astype(np.float32),
        "norm": RNG.random(COLUMNS).astype(np.float32),
    }.items()
}
DECODED = osl.Mapping(
    [
        osl.rule(
            "layers.{i}.up",
            osl.dequantize_block(
                osl.tensor("layers.{i}.up.q"),
                osl.tensor("layers.{i}.up.scale"),
                block=(1, COLUMNS),
                dtype="float32",
            ),
        ),
        osl.rule("layers.{i}.norm", osl.tensor("layers.{i}.norm")),
    ]
)
UP = osl.rule("up.kernel", osl.stack(osl.tensor("layers.{i}.up").transpose(), over="i", axis=1))
NORM = osl.rule("norm", osl.stack(osl.tensor("layers.{i}.norm"), over="i"))
VALUES = [
    TENSORS[f"layers.{i}.up.q"].astype(np.float32) * TENSORS[f"layers.{i}.up.scale"]
    for i in range(LAYERS)
]
KERNEL = np.stack([value.T for value in VALUES], axis=1)


@pytest.mark.parametrize("axes", [(), ("x",), (None, None, "x")])
def test_a_shard_reads_what_it_needs_of_both(tmp_path, axes):
    path = save(tmp_path, TENSORS)
    sharding = NamedSharding(mesh_of(x=8), P(*axes))
    leaf = jax.ShapeDtypeStruct(KERNEL.shape, np.float32, sharding=sharding)
    mapping = osl.Mapping([UP, NORM]).over(DECODED)
    tree = {"up": {"kernel": leaf}, "norm": np.zeros((LAYERS, COLUMNS), np.float32)}
    loaded = osl.load(path, tree, mapping=mapping)
    assert loaded["up"]["kernel"].sharding == sharding
    assert_same_bits(np.asarray(loaded["up"]["kernel"]), KERNEL)
    norms = np.stack([TENSORS[f"layers.{i}.norm"] for i in range(LAYERS)])
    assert_same_bits(loaded["norm"], norms)


def test_what_no_leaf_takes_is_not_read(tmp_path):
    path = save(tmp_path, TENSORS)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=device)
    mapping = osl.Mapping([osl.rule("one", osl.tensor("layers.1.up"))], strict=False).over(DECODED)
    with recording() as storage:
        loaded = osl.load(path, {"one": leaf}, mapping=mapping, options=NO_GAPS)["one"]
    assert_same_bits(np.asarray(loaded), VALUES[1])
    entries = osl.metadata(path)
    needed = sum(entries[f"layers.1.up.{part}"].nbytes for part in ("q", "scale"))
    assert sum(stop - start for _, start, stop in storage.tensor_ranges()) == needed


def test_three_in_turn(tmp_path):
    path = save(tmp_path, TENSORS)
    renamed = osl.Mapping(
        [osl.rule("a.{i}.up", osl.tensor("layers.{i}.up"))], ignore="layers.*.norm"
    )
    stacked = osl.Mapping([osl.rule("up", osl.stack(osl.tensor("a.{i}.up"), over="i"))])
    for mapping in (stacked.over(renamed).over(DECODED), stacked.over(renamed.over(DECODED))):
        assert_same_bits(np.asarray(osl.load(path, mapping=mapping)["up"]), np.stack(VALUES))


def test_arrays_in_memory():
    mapping = osl.Mapping([osl.rule("up.{i}", osl.tensor("layers.{i}.up"))], strict=False)
    arrays = {name: jax.numpy.asarray(value) for name, value in TENSORS.items()}
    tree = mapping.over(DECODED).apply(arrays)
    for i in range(LAYERS):
        assert_same_bits(np.asarray(tree["up"][str(i)]), VALUES[i])


def test_errors_name_what_the_other_makes(tmp_path):
    path = save(tmp_path, TENSORS)
    with pytest.raises(osl.MappingError, match=r"no rule uses tensor 'layers\.0\.norm'"):
        osl.Mapping([UP]).over(DECODED).leaf_facts(path)
    missing = osl.rule("down", osl.tensor("layers.0.down"))
    with pytest.raises(osl.MappingError, match=r"there is no tensor 'layers\.0\.down'"):
        osl.Mapping([UP, NORM, missing]).over(DECODED).bind(path, {"down": None})
    with pytest.raises(osl.MappingError, match="cannot save: its tensors are what another"):
        osl.save(tmp_path / "out", {"norm": KERNEL}, mapping=osl.Mapping([NORM]).over(DECODED))
    with pytest.raises(TypeError, match=r"is not an osl\.Mapping"):
        osl.Mapping([UP]).over("path")


def test_what_neither_takes_is_refused():
    """Layers beyond those that are stacked, and what the inner mapping makes nothing of."""
    shapes = {name: (value.shape, value.dtype) for name, value in TENSORS.items()}
    two = osl.stack(osl.tensor("layers.{i}.up"), over="i", indices=[0, 1])
    norms = osl.rule("norms", osl.stack(osl.tensor("layers.{i}.norm"), over="i"))
    mapping = osl.Mapping([osl.rule("up", two), norms]).over(DECODED)
    with pytest.raises(osl.MappingError, match=r"no rule uses tensor 'layers.2.up'"):
        mapping.leaf_facts(shapes)
    whole = osl.Mapping([UP, norms]).over(DECODED)
    assert whole.leaf_facts(shapes).keys() == {"up.kernel", "norms"}
    more = shapes | {"head": ((4,), np.dtype(np.float32))}
    with pytest.raises(osl.MappingError, match=r"no rule uses tensor 'head'"):
        whole.leaf_facts(more)
    with pytest.raises(osl.MappingError, match=r"no rule uses tensor 'head'"):
        osl.Mapping([UP, norms]).over(osl.Mapping(DECODED.rules)).leaf_facts(more)
    for outer, inner in (
        (osl.Mapping([UP, norms], ignore=["head"]), DECODED),
        (osl.Mapping([UP, norms]), osl.Mapping(DECODED.rules, ignore=["head"])),
        (osl.Mapping([UP, norms]), osl.Mapping(DECODED.rules, strict=False)),
        (osl.Mapping([UP, norms], strict=False), DECODED),
    ):
        assert outer.over(inner).leaf_facts(more).keys() == {"up.kernel", "norms"}


def test_mappings_over_others_are_told_apart():
    plain, over = osl.Mapping([UP, NORM]), osl.Mapping([UP, NORM]).over(DECODED)
    other = osl.Mapping([UP, NORM]).over(osl.Mapping(DECODED.rules[:1]))
    assert len({fingerprint(mapping) for mapping in (plain, over, other)}) == 3
    assert repr(over) == f"{plain!r}.over({DECODED!r})"
    assert over.leaf_names(TENSORS) == ["up.kernel", "norm"]
