"""Exports of what a run saves: weights through a mapping, and what is beside them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same_bits
from flax import nnx

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
STACKED = np.stack([WEIGHT, WEIGHT + 1])
MAPPING = osl.Mapping(
    [
        osl.rule("layers.kernel", osl.stack(osl.tensor("layers.{i}.weight").transpose(), over="i")),
        osl.rule("norm.scale", osl.tensor("norm.weight")),
    ]
)
PARAMETERS = {
    "layers": {"kernel": STACKED.transpose(0, 2, 1)},
    "norm": {"scale": np.ones(3, np.float32)},
}
TENSORS = {"layers.0.weight": STACKED[0], "layers.1.weight": STACKED[1], "norm.weight": np.ones(3)}


def training_state() -> dict:
    dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    return {
        **PARAMETERS,
        "rngs": nnx.to_pure_dict(nnx.state(dropout, nnx.RngState))["rngs"],
        "opt_state": optax.adam(1e-3).init(jax.tree.map(jnp.asarray, PARAMETERS)),
        "step": 7,
    }


def exports(state, tmp_path):
    """Yields a function of a target and a mapping for each way to export a state."""
    plain = {**state, "rngs": jax.tree.map(_key_data, state["rngs"])}
    osl.save(tmp_path / "ours", state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", plain)
    yield lambda target, mapping: osl.save(target, state, mapping=mapping)
    for source in (tmp_path / "ours", tmp_path / "orbax"):
        yield lambda target, mapping, source=source: osl.convert(source, target, mapping=mapping)


def _key_data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def assert_exported(folder):
    loaded = osl.load(folder)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in loaded.items():
        assert_same_bits(tensor, TENSORS[name].astype(np.float32))


def test_every_export_names_what_can_be_dropped_and_drops_it(tmp_path):
    texts = set()
    for number, export in enumerate(exports(training_state(), tmp_path)):
        target = tmp_path / f"exported{number}"
        with pytest.raises(osl.MappingError) as caught:
            export(target, MAPPING)
        texts.add(str(caught.value))
        assert not target.exists()
        dropped = re.search(r"mapping\.drop\((.*?)\)", str(caught.value))[1]
        assert dropped == "'opt_state.*', 'rngs.*', 'step'"
        export(target, MAPPING.drop(*dropped.strip("'").split("', '")))
        assert_exported(target)
    assert len(texts) == 1


def test_a_slip_is_not_dropped_in_silence(tmp_path):
    state = {**PARAMETERS, "norm": {"scael": np.ones(3, np.float32)}}
    with pytest.raises(osl.MappingError, match=r"nearest targets of rules are 'norm\.scale'"):
        osl.save(tmp_path / "to", state, mapping=MAPPING)
    with pytest.raises(osl.MappingError, match=r"would lack 'norm\.weight'"):
        osl.save(tmp_path / "to", state, mapping=MAPPING.drop("norm.*"))


def test_leaves_that_are_no_arrays_are_dropped_or_refused(tmp_path):
    state = {**PARAMETERS, "apply": print, "name": "run", "norm": {"scale": 2.5}}
    mapping = MAPPING.drop("apply", "name")
    with pytest.raises(osl.MappingError, match=r"numbers or strings: 'norm\.scale'.*asarray"):
        osl.save(tmp_path / "to", state, mapping=mapping)
    state["norm"]["scale"] = np.asarray(np.ones(3, np.float32))
    osl.save(tmp_path / "to", state, mapping=mapping)
    assert_exported(tmp_path / "to")
    with pytest.raises(osl.MappingError, match=r"Mapping\.drop"):
        MAPPING.drop("a{")


def test_arrays_in_memory_and_plans_without_dropped_leaves(tmp_path):
    unapplied = MAPPING.drop("rngs.*", "opt_state.*").unapply(
        {**jax.tree.map(jnp.asarray, PARAMETERS), "rngs": {"count": jnp.uint32(1)}}
    )
    assert unapplied.keys() == TENSORS.keys()
    plan = osl.plan_save(training_state(), mapping=MAPPING.drop("rngs.*", "opt_state.*", "step"))
    assert [tensor.name for _, _, tensors in plan.files for tensor in tensors] == [*TENSORS]


def test_on_a_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    osl.save("run", training_state())
    (tmp_path / "export_maps.py").write_text(
        "import orbax_safetensors_layout as osl\n"
        "w = osl.stack(osl.tensor('layers.{i}.weight').transpose(), over='i')\n"
        "m = osl.Mapping([osl.rule('layers.kernel', w),"
        " osl.rule('norm.scale', osl.tensor('norm.weight'))])\n"
    )
    drops = [word for glob in ("opt_state.*", "rngs.*", "step") for word in ("--drop", glob)]
    mapped = ("--mapping", "export_maps.py:m", *drops)
    assert main(["convert", "run", "exported", *mapped, "-q"]) == 0
    assert_exported(tmp_path / "exported")
    assert main(["verify", "run", "--against", "exported", *mapped, "-q"]) == 0
    assert main(["convert", "run", "to", "--drop", "step"]) == 2


@pytest.fixture
def numbered(tmp_path):
    """A step with numbers and a string beside the arrays that a mapping takes."""
    osl.save(tmp_path / "step", {**TENSORS, "step": 7, "lr": 0.5, "name": "run", "skip": {"n": 1}})
    return tmp_path / "step"


def test_numbers_pass_through_a_load(numbered):
    mapping = osl.Mapping(MAPPING.rules, ignore="skip.*")
    loaded = osl.load(numbered, mapping=mapping)
    assert (loaded["step"], loaded["lr"], loaded["name"]) == (7, 0.5, "run")
    assert sorted(loaded) == ["layers.kernel", "lr", "name", "norm.scale", "step"]
    tree = {**PARAMETERS, "step": 0, "lr": jax.ShapeDtypeStruct((), np.float32), "skip": {"n": int}}
    loaded = osl.load(numbered, tree, mapping=mapping)
    assert (loaded["step"], loaded["skip"]["n"]) == (7, 1)
    assert isinstance(loaded["lr"], jax.Array)
    assert_same_bits(loaded["layers"]["kernel"], PARAMETERS["layers"]["kernel"])
    with pytest.raises(osl.DtypeMismatchError, match="recorded value does not fit"):
        osl.load(numbered, {**PARAMETERS, "name": 0}, mapping=mapping)
    with pytest.raises(osl.MappingError, match="no rule makes leaf 'stop'"):
        osl.load(numbered, {**PARAMETERS, "stop": 0}, mapping=mapping)


@pytest.mark.parametrize("format", ["orbax", "hf", "sharded"])
def test_numbers_pass_through_a_conversion(numbered, tmp_path, format):
    done = osl.convert(numbered, tmp_path / "to", mapping=MAPPING, inverse=False, format=format)
    assert done.tensors == 2
    if format == "orbax":
        restored = ocp.StandardCheckpointer().restore(tmp_path / "to")
    else:
        restored = osl.load(tmp_path / "to")
    assert (restored["step"], restored["lr"], restored["skip"]["n"]) == (7, 0.5, 1)
    assert_same_bits(np.asarray(restored["layers"]["kernel"]), PARAMETERS["layers"]["kernel"])
    if format != "orbax":
        assert osl.verify(tmp_path / "to", numbered, mapping=MAPPING).ok


def test_numbers_pass_through_a_restore(numbered, tmp_path):
    registry = osl.handler_registry("default", mapping=MAPPING)
    with ocp.CheckpointManager(
        tmp_path / "run", handler_registry=osl.handler_registry("default")
    ) as manager:
        manager.save(3, args=ocp.args.StandardSave({**TENSORS, "step": 7}))
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        metadata = manager.item_metadata(3)
        assert set(metadata.tree) == {"layers.kernel", "norm.scale", "step"}
        tree = {**PARAMETERS, "step": 0}
        assert manager.restore(3, args=ocp.args.StandardRestore(tree))["step"] == 7
        assert manager.restore(3)["step"] == 7
