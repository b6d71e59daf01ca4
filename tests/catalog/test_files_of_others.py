"""Files that other programs write into, or beside, what this package saved."""

import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import inspect

HEAD = {"w": np.full(2, 1, np.float32), "lm_head.weight": np.full(2, 9, np.float32)}


@pytest.fixture(params=["model.safetensors", "two files"])
def rewritten(tmp_path, request):
    """A saved model to which another program has added a head; the manifest stays."""
    saved = {"w": HEAD["w"], "v": np.zeros(2, np.float32)}
    if request.param == "model.safetensors":
        osl.save(tmp_path, saved)
        safetensors.numpy.save_file({**saved, **HEAD}, tmp_path / request.param)
        return tmp_path
    osl.save(tmp_path, saved, options=osl.WriteOptions(max_file_bytes=8))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file({"v": saved["v"]}, tmp_path / first)
    safetensors.numpy.save_file(HEAD, tmp_path / second)
    index = {"v": first, "w": second, "lm_head.weight": second}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return tmp_path


def test_a_head_that_another_program_added_is_not_dropped(rewritten, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "target"
    for use in (
        lambda: osl.load(rewritten),
        lambda: osl.load(rewritten, {"w": jax.ShapeDtypeStruct((2,), np.float32)}),
        lambda: osl.convert(rewritten, target),
        lambda: osl.convert(rewritten, target, format="hf"),
        lambda: inspect(str(rewritten)),
    ):
        with pytest.raises(osl.SafetensorsLayoutError, match="another program has") as caught:
            use()
        assert "lm_head.weight" in str(caught.value)
    assert not osl.verify(rewritten).ok
    names = {"w", "v", "lm_head.weight"}
    assert set(osl.load(rewritten, only="*")) == names
    assert set(osl.metadata(rewritten)) == names
    same = osl.Mapping([osl.rule(name, osl.tensor(name)) for name in sorted(names)])
    assert set(osl.load(rewritten, mapping=same)) == names
    (rewritten / "orbax_safetensors_layout.json").unlink()
    assert osl.load(rewritten)["lm_head.weight"].tolist() == [9, 9]


def test_an_adapter_beside_a_saved_model_is_left_out_and_named(tmp_path, caplog):
    osl.save(tmp_path, {"w": np.ones(2, np.float32)})
    lora = {"x": np.ones(2, np.float32)}
    safetensors.numpy.save_file(lora, tmp_path / "adapter_model.safetensors")
    for names in (
        osl.load(tmp_path),
        osl.load(tmp_path, only="*"),
        osl.metadata(tmp_path),
    ):
        assert set(names) == {"w"}
    assert "'adapter_model.safetensors' is left out" in caplog.text


def test_an_index_of_others_does_not_hide_the_model(tmp_path, caplog):
    model, other = {"w": np.ones(2, np.float32)}, {"x": np.ones(2, np.float32)}
    safetensors.numpy.save_file(model, tmp_path / "model.safetensors")
    safetensors.numpy.save_file(other, tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "x.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    assert set(osl.load(tmp_path)) == {"w"}
    assert "'x.safetensors' is left out" in caplog.text


def write_files(folder, base, variant, kind, dtype):
    """A model as Diffusers and transformers name its files: `_add_variant`, `filename_pattern`."""
    folder.mkdir(exist_ok=True)
    tensors = {"a": np.full(2, 1, dtype), "b": np.full(2, 2, dtype)}
    if kind == "one file":
        files = {f"{base}{variant}": tensors}
    elif kind == "older set":  # of Diffusers before 0.31
        files = {
            f"{base}-0000{n}-of-00002{variant}": {k: tensors[k]} for n, k in ((1, "a"), (2, "b"))
        }
    else:
        files = {
            f"{base}{variant}-0000{n}-of-00002": {k: tensors[k]} for n, k in ((1, "a"), (2, "b"))
        }
    for name, content in files.items():
        safetensors.numpy.save_file(content, folder / f"{name}.safetensors")
    if kind == "set":
        weights = {tensor: f"{name}.safetensors" for name, own in files.items() for tensor in own}
        index = json.dumps({"metadata": {}, "weight_map": weights})
        (folder / f"{base}.safetensors.index{variant}.json").write_text(index)
    return [f"{name}.safetensors" for name in files]


@pytest.mark.parametrize("kind", ["one file", "set", "older set"])
@pytest.mark.parametrize("plain", ["one file", "set", "older set"])
@pytest.mark.parametrize("base", ["diffusion_pytorch_model", "adapter_model", "model"])
def test_a_model_without_variant_is_the_one_that_is_loaded(tmp_path, caplog, base, plain, kind):
    variants = [
        name
        for variant in (".fp16", ".non_ema")
        for name in write_files(tmp_path, base, variant, kind, np.float16)
    ]
    write_files(tmp_path, base, "", plain, np.float32)
    assert {n: leaf.dtype for n, leaf in osl.load(tmp_path).items()} == {
        "a": np.float32,
        "b": np.float32,
    }
    if plain != "set":
        assert all(f"'{name}'" in caplog.text for name in variants)
    write_files(tmp_path / "alone", base, ".fp16", kind, np.float16)
    assert {leaf.dtype for leaf in osl.load(tmp_path / "alone").values()} == {np.dtype(np.float16)}


def test_a_variant_of_which_a_file_is_missing_is_refused(tmp_path):
    lost = write_files(tmp_path, "model", ".fp16", "older set", np.float16)[1]
    (tmp_path / lost).unlink()
    with pytest.raises(osl.InvalidIndexError, match=r"model-…-of-00002\.fp16\.safetensors"):
        osl.load(tmp_path)


def test_files_of_names_of_ones_own_are_no_variants(tmp_path):
    for name in ("layers", "layers.0", "layers.extra"):
        safetensors.numpy.save_file({name: np.ones(1)}, tmp_path / f"{name}.safetensors")
    assert set(osl.load(tmp_path)) == {"layers", "layers.0", "layers.extra"}


def test_an_index_of_a_variant_is_no_second_one(tmp_path):
    for name in ("adapter_model", "adapter_model.fp16"):
        index = {"metadata": {}, "weight_map": {"w": f"{name}.0.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
        safetensors.numpy.save_file({"w": np.ones(len(name))}, tmp_path / f"{name}.0.safetensors")
    assert osl.load(tmp_path)["w"].shape == (len("adapter_model"),)


@pytest.mark.parametrize("shape", [(3,), (3, 3), (4,)])
def test_a_file_by_itself_has_the_saved_dtypes(tmp_path, shape):
    values = np.resize(np.array([1.5, -2, 6, 0.5], np.float32), shape)
    osl.save(tmp_path, {"q": values.astype(ml_dtypes.float4_e2m1fn)})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        leaf = osl.load(path)["q"]
        np.testing.assert_array_equal(np.asarray(leaf).astype(np.float32), values)
        assert osl.metadata(path)["q"].dtype == ml_dtypes.float4_e2m1fn


def test_a_file_by_itself_that_is_not_of_the_saved_ones_is_as_it_is(tmp_path):
    narrow = np.array([1, -2, 4]).astype(ml_dtypes.float4_e2m1fn)
    osl.save(tmp_path, {"w": narrow})
    theirs = np.array([200, 17, 3], np.uint8)
    safetensors.numpy.save_file({"w": theirs}, tmp_path / "other.safetensors")
    loaded = osl.load(tmp_path / "other.safetensors")["w"]
    assert loaded.dtype == np.uint8
    np.testing.assert_array_equal(loaded, theirs)
    assert osl.load(tmp_path / "model.safetensors")["w"].dtype == narrow.dtype


@pytest.mark.parametrize("form", ["hf", "sharded"])
def test_side_files_are_of_the_same_version_as_the_tensors(tmp_path, monkeypatch, form):
    """A link that moves at any moment: one version or an error."""
    link, real = tmp_path / "latest", os.open
    options = osl.WriteOptions(layout=form)
    for version in (1, 2):
        folder = tmp_path / str(version)
        osl.save(folder, {"w": np.full(2, version, np.float32)}, options=options)
        (folder / "config.json").write_text(json.dumps({"version": version}))
    moments = iter(range(10_000))
    for moment in moments:
        target, calls = tmp_path / f"target{moment}", 0
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "1")

        def opening(*arguments, moment=moment, **keywords):
            nonlocal calls
            calls += 1
            if calls == moment:
                (tmp_path / "new").symlink_to(tmp_path / "2")
                (tmp_path / "new").replace(link)
            return real(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opening)
            try:
                if form == "hf":
                    osl.convert(link, target, format="hf")
                else:
                    osl.consolidate(link, target)
            except osl.SafetensorsLayoutError:
                continue
        version = json.loads((target / "config.json").read_text())["version"]
        assert osl.load(target)["w"].tolist() == [version] * 2, moment
        if calls < moment:
            break
    assert moment > 10


def test_two_numbered_sets_of_one_name_are_refused(tmp_path):
    for number, count in ((1, 2), (2, 2), (1, 3), (2, 3), (3, 3)):
        tensors = {f"w{number}.{count}": np.ones(2, np.float32)}
        file = f"model-{number:05}-of-{count:05}.safetensors"
        safetensors.numpy.save_file(tensors, tmp_path / file)
    with pytest.raises(osl.SafetensorsLayoutError, match="several numbered sets"):
        osl.load(tmp_path)
    assert not osl.verify(tmp_path).ok


def test_pieces_without_their_manifest_are_refused_but_one_by_one(tmp_path):
    tree = {"w": np.arange(4, dtype=np.float32), "q": np.ones(3, ml_dtypes.float4_e2m1fn)}
    osl.save(tmp_path / "from", tree, options=osl.WriteOptions(layout="sharded"))
    (tmp_path / "from" / "orbax_safetensors_layout.json").unlink()
    for use in (
        osl.load,
        osl.metadata,
        osl.plan_load,
        inspect,
        lambda path: osl.load(path, only="w"),
        lambda path: osl.convert(path, tmp_path / "to", format="hf"),
    ):
        with pytest.raises(osl.InvalidManifestError, match="holds pieces of tensors"):
            use(tmp_path / "from")
    assert not osl.verify(tmp_path / "from").ok
    (file,) = (tmp_path / "from").glob("*.safetensors")
    assert osl.load(file)["w"].tolist() == [0, 1, 2, 3]


def test_what_is_converted_from_one_file_of_pieces_is_a_whole_checkpoint(tmp_path):
    options = osl.WriteOptions(layout="sharded", metadata={"by": "us"})
    osl.save(tmp_path / "from", {"w": np.arange(4.0, dtype=np.float32)}, options=options)
    (file,) = (tmp_path / "from").glob("*.safetensors")
    osl.convert(file, tmp_path / "to", format="hf")
    assert osl.verify(tmp_path / "to").ok
    assert osl.load(tmp_path / "to")["w"].tolist() == [0, 1, 2, 3]
    with safetensors.safe_open(tmp_path / "to" / "model.safetensors", "numpy") as written:
        assert written.metadata() == {"by": "us", "format": "pt"}


def test_files_of_others_may_have_kept_the_metadata_of_pieces(tmp_path):
    osl.save(
        tmp_path / "from",
        {"w": np.arange(4.0, dtype=np.float32)},
        options=osl.WriteOptions(layout="sharded"),
    )
    (file,) = (tmp_path / "from").glob("*.safetensors")
    with safetensors.safe_open(file, "numpy") as piece:
        metadata = piece.metadata()
    (tmp_path / "merged").mkdir()
    merged = tmp_path / "merged" / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, merged, metadata)
    assert osl.load(tmp_path / "merged")["w"].tolist() == [1, 1, 1]
    assert osl.verify(tmp_path / "merged").ok
