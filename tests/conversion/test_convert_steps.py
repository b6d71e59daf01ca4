"""Steps of several items: converted whole, or item by item; what is there besides stays."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from checkpoints import assert_same_bits

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.__main__ import main

NAMES = ("params", "opt_state")


BY_LOSS = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])


def items(number):
    params = {"kernel": np.arange(8, dtype=np.float32).reshape(4, 2) + number, "bias": np.ones(2)}
    return {"params": params, "opt_state": {"mu": params, "count": np.array(number, np.int32)}}


def save_run(folder, kind, steps=(20, 30)):
    registry = osl.handler_registry(*NAMES) if kind == "ours" else None
    with ocp.CheckpointManager(folder, options=BY_LOSS, handler_registry=registry) as manager:
        for step in steps:
            args = {name: ocp.args.StandardSave(tree) for name, tree in items(step).items()}
            args["data"] = ocp.args.JsonSave({"position": step})
            manager.save(
                step,
                args=ocp.args.Composite(**args),
                metrics={"loss": step / 10},
                custom_metadata={"run": "a"},
            )
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made = {kind: save_run(root / kind, kind) for kind in ("ours", "orbax")}
    ocp_v1.save_checkpointables(root / "v1" / "30", items(30) | {"data": {"position": 30}})
    return made | {"v1": root / "v1"}


def check(restored, number, names=NAMES):
    for name in names:
        assert jax.tree.structure(restored[name]) == jax.tree.structure(items(number)[name])
        jax.tree.map(assert_same_bits, restored[name], items(number)[name])


def restored_v0(folder, step, *, ours):
    registry = osl.handler_registry(*NAMES) if ours else None
    with ocp.CheckpointManager(folder, options=BY_LOSS, handler_registry=registry) as manager:
        assert manager.latest_step() == step
        assert manager.metrics(step) == {"loss": step / 10}
        assert manager.metadata(step).custom_metadata == {"run": "a"}
        args = {name: ocp.args.StandardRestore() for name in NAMES}
        return manager.restore(step, args=ocp.args.Composite(**args, data=ocp.args.JsonRestore()))


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("source", ["ours", "orbax"])
@pytest.mark.parametrize("format", [None, "orbax", "hf", "sharded"])
def test_a_step_is_converted_whole(runs, tmp_path, source, format):
    done = osl.convert(runs[source], tmp_path / "to", step=30, format=format)
    assert done.path == str(tmp_path / "to" / "30")
    assert done.tensors == 5
    is_ours = format in ("hf", "sharded") or (format is None and source == "orbax")
    assert osl.is_safetensors_checkpoint(tmp_path / "to/30/params") == is_ours
    restored = restored_v0(tmp_path / "to", 30, ours=is_ours)
    check(restored, 30)
    assert restored["data"] == {"position": 30}
    for name in NAMES:
        assert osl.verify(runs[source], tmp_path / "to", step=30, item=name).ok
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["30"]


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_a_step_of_orbax_v1_is_converted_whole_by_its_path(runs, tmp_path, format):
    osl.convert(runs["v1"] / "30", tmp_path / "to", format=format)
    with osl.context("params", "opt_state", "data") if format == "hf" else ocp_v1.Context():
        restored = ocp_v1.load_checkpointables(tmp_path / "to")
        check(restored, 30)
        assert restored["data"] == {"position": 30}
        assert ocp_v1.checkpointables_metadata(tmp_path / "to").metadata.keys() == restored.keys()


@pytest.mark.parametrize(("source", "format"), [("ours", None), ("orbax", "orbax")])
def test_items_are_added_and_replaced_one_by_one(runs, tmp_path, source, format):
    to = tmp_path / "to"
    osl.convert(runs[source], to, step=30, item="params", format=format)
    first = content(to / "30" / "params")
    osl.convert(runs[source], to, step=30, item="opt_state", format=format)
    assert content(to / "30" / "params") == first
    check(restored_items(to, NAMES), 30)
    (to / "30" / "data").mkdir()  # of another handler
    (to / "30" / "data" / "metadata").write_text("{}")
    second = content(to / "30")
    with pytest.raises(
        osl.CheckpointExistsError, match=r"the step has 'params' already.*other item"
    ):
        osl.convert(runs[source], to, step=30, item="params", format=format)
    with pytest.raises(osl.CheckpointExistsError, match=r"the step has .*'opt_state'.* already"):
        osl.convert(runs[source], to, step=30, format=format)
    assert content(to / "30") == second
    osl.convert(
        runs[source], to, step=30, item="params", format=format, subtree="kernel", overwrite=True
    )
    third = content(to / "30")
    kept = {name for name in second if name.startswith(("opt_state/", "data/"))}
    assert kept == {name for name in third if name.startswith(("opt_state/", "data/"))}
    assert all(third[name] == second[name] for name in kept)
    (kernel,) = restored_items(to, ["params"])["params"].values()
    assert_same_bits(kernel, items(30)["params"]["kernel"])


def restored_items(folder, names):
    with ocp.CheckpointManager(folder) as manager:
        args = {name: ocp.args.StandardRestore() for name in names}
        return manager.restore(30, args=ocp.args.Composite(**args))


def test_an_export_of_one_item_is_not_lost_by_the_advice_for_another(runs, tmp_path):
    to = tmp_path / "export"
    osl.convert(runs["orbax"], to, step=30, item="params")
    before = content(to)
    with pytest.raises(osl.CheckpointExistsError, match=r"folder of its own.*deletes") as refused:
        osl.convert(runs["orbax"], to, step=30, item="opt_state")
    assert "--item" in refused.value.hint
    assert content(to) == before
    osl.convert(runs["orbax"], tmp_path / "its own", step=30, item="opt_state")
    osl.convert(runs["orbax"], tmp_path / "whole", step=30, format="orbax")
    check(restored_items(tmp_path / "whole", NAMES), 30)


def test_an_item_of_safetensors_is_added_to_a_step_that_is_there(runs, tmp_path):
    osl.convert(runs["orbax"], tmp_path / "to", step=30)
    before = content(tmp_path / "to" / "30" / "params")
    osl.convert(
        runs["orbax"], tmp_path / "to", step=30, item="opt_state", format="sharded", overwrite=True
    )
    assert content(tmp_path / "to" / "30" / "params") == before
    check(restored_v0(tmp_path / "to", 30, ours=True), 30)
    osl.convert(runs["orbax"], tmp_path / "alone", step=30, item="params")  # a model's folder
    assert osl.load(tmp_path / "alone").keys() == {"kernel", "bias"}


def test_a_tree_does_not_replace_a_step_of_several_items(runs, tmp_path):
    step = save_run(tmp_path / "run", "orbax", [30]) / "30"
    before = content(step)
    for source, format in ((runs["ours"] / "20" / "params", "orbax"), (runs["v1"] / "30", "hf")):
        with pytest.raises(osl.CheckpointExistsError, match=r"several items.*data.*the folder of"):
            osl.convert(
                source,
                step,
                format=format,
                overwrite=True,
                **({"item": "params"} if format == "hf" else {}),
            )
        assert content(step) == before
    osl.convert(runs["ours"] / "20" / "params", step / "params", format="orbax", overwrite=True)
    check(restored_items(tmp_path / "run", ["params"]), 20, ["params"])


def test_an_interrupted_step_goes_on_with_the_item_it_was_at(runs, tmp_path):
    def stop(progress):
        if progress.tensor.startswith("kernel"):  # of the second item
            raise KeyboardInterrupt

    to = tmp_path / "to"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            osl.convert(runs["orbax"], to, step=30, options=osl.ConvertOptions(progress=stop))
        assert not (to / "30").exists()
    done = osl.convert(runs["orbax"], to, step=30)
    opt_state = 4 * 8 + 8 * 2 + 4
    assert opt_state <= done.resumed_bytes < done.nbytes
    check(restored_v0(to, 30, ours=True), 30)


@pytest.mark.parametrize("source", ["ours", "orbax"])
def test_an_export_of_one_tree_asks_for_the_item(runs, tmp_path, source):
    told = r"several items: opt_state, params .*item='params' \(--item params\)"
    for arguments in ({"subtree": "kernel"}, {"config": tmp_path}, {"dequantize": "bfloat16"}):
        with pytest.raises(osl.CheckpointNotFoundError, match=told):
            osl.convert(runs[source], tmp_path / "to", step=30, **arguments)
    with pytest.raises(osl.CheckpointNotFoundError, match=r"item 'data' is not a tree.*Choose one"):
        osl.convert(runs[source], tmp_path / "to", step=30, item="data")
    with pytest.raises(osl.CheckpointNotFoundError, match=r"no item 'parms'.*--item params"):
        osl.convert(runs[source], tmp_path / "to", step=30, item="parms")
    assert not (tmp_path / "to").exists()
    done = osl.convert(
        runs[source], tmp_path / "to", step=30, item="params", subtree="kernel", format="hf"
    )
    assert (done.path, done.tensors) == (str(tmp_path / "to"), 1)


def test_what_orbax_has_not_finished_is_no_step(runs, tmp_path):
    run = save_run(tmp_path / "run", "orbax", [30])
    (run / "40.orbax-checkpoint-tmp-1795886122").mkdir()
    (run / "30" / "ema.orbax-checkpoint-tmp-3").mkdir()
    with pytest.raises(osl.CheckpointNotFoundError, match=r"as step=30 \(--step 30\); it has 30\."):
        osl.verify(run)
    assert osl.convert(run, tmp_path / "to", step=30).tensors == 5
    assert not [*(tmp_path / "to" / "30").glob("ema*")]


@pytest.mark.parametrize("source", ["ours", "orbax", "v1"])
def test_the_command_line_takes_steps_and_items_everywhere(runs, tmp_path, capsys, source):
    run = str(runs[source])
    for command in (["inspect"], ["verify"], ["plan", "--mesh", "fsdp=2"]):
        chosen = [*command, run, "--step", "30"]
        assert main(chosen) == 1
        assert "(--item params)" in capsys.readouterr().err
        assert main([*chosen, "--item", "params", "--json"]) == 0
        assert f"{run}/30/params" in capsys.readouterr().out
        assert main([*command, run]) == 1
        assert "as step=30 (--step 30); it has 30" in capsys.readouterr().err
        assert main([*command, f"{run}/30", "--item", "opt_state"]) == 0
    assert main(["convert", run, str(tmp_path / "to"), "--step", "30", "--format", "hf", "-q"]) == 0
    assert capsys.readouterr().out.endswith(f"\n{tmp_path}/to/30\n")
    against = ["--against", str(tmp_path / "to"), "--step", "30", "--item", "params"]
    assert main(["verify", run, *against]) == 0
    alone = [
        "--step",
        "30",
        "--item",
        "params",
        "--against",
        str(tmp_path / "to" / "30" / "params"),
    ]
    assert main(["verify", run, *alone]) == 0


def test_an_array_that_is_an_item_is_copied(tmp_path):
    tree, array = {"w": np.ones(3, np.float32)}, np.arange(3)
    items = ocp.args.Composite(state=ocp.args.StandardSave(tree), key=ocp.args.ArraySave(array))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=items)
    osl.convert(tmp_path / "run", tmp_path / "to", step=1, format="orbax")
    asked = ocp.args.Composite(state=ocp.args.StandardRestore(), key=ocp.args.ArrayRestore())
    with ocp.CheckpointManager(tmp_path / "to") as manager:
        restored = manager.restore(1, args=asked)
    assert_same_bits(np.asarray(restored["state"]["w"]), tree["w"])
    np.testing.assert_array_equal(restored["key"], array)
