"""Files that hold parts of tensors: read where offsets say which, refused where nothing does."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from dcp_folders import write_rank, write_rows
from hypothesis import given, settings, strategies as st
from meshes import any_sharding
from orbax_calls import load_v1, restore_standard, restore_v0

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.__main__ import main
from orbax_safetensors_layout.analysis import inspect
from orbax_safetensors_layout.errors import ShapeMismatchError

W = np.arange(32, dtype=np.float32).reshape(8, 4)
TREE = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype)}
TRANSPOSED = osl.Mapping([osl.rule("t", osl.tensor("w").transpose())])


@pytest.fixture
def four(tmp_path):
    """`w` in the files of four ranks."""
    write_rows(tmp_path / "dcp", {"w": W}, 4)
    return tmp_path / "dcp"


@st.composite
def cuts(draw, extent):
    """Places that cut an extent, both ends included."""
    inner = draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=3)) if extent > 1 else set()
    return [0, *sorted(inner), extent]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_parts_of_any_cut_load_under_any_sharding(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut") / "dcp"
    shape = data.draw(st.lists(st.sampled_from([1, 3, 4, 8]), max_size=3))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    grid = [data.draw(cuts(extent)) for extent in shape]
    for rank, cell in enumerate(np.ndindex(*(len(edges) - 1 for edges in grid)), 1):
        edges = [(grid[axis][i], grid[axis][i + 1]) for axis, i in enumerate(cell)]
        part = array[tuple(slice(low, high) for low, high in edges)]
        write_rank(folder, rank, {"a": (part, [low for low, _ in edges])})
    sharding = any_sharding(data, shape)
    abstract = {"a": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)}
    loaded = osl.load(folder, abstract)["a"]
    assert loaded.sharding == sharding
    np.testing.assert_array_equal(loaded, array)


def test_each_way_to_read_gives_the_whole(four, tmp_path, caplog):
    np.testing.assert_array_equal(osl.load(four)["w"], W)
    assert "files of torch's DCP do not say how large tensors are" in caplog.text
    caplog.clear()
    np.testing.assert_array_equal(osl.load(four, TREE)["w"], W)
    assert "torch" not in caplog.text  # the tree says how large they are
    np.testing.assert_array_equal(osl.load(four, mapping=TRANSPOSED)["t"], W.T)
    np.testing.assert_array_equal(restore_v0(four, osl.SafetensorsRestore(TREE))["w"], W)
    np.testing.assert_array_equal(load_v1(four, TREE)["w"], W)
    assert osl.metadata(four)["w"].shape == (8, 4)
    (tensor,) = inspect(four).tensors
    assert (tensor.shape, tensor.pieces, len(tensor.files)) == ((8, 4), 4, 4)
    for layout in ("hf", "sharded", "orbax"):
        osl.convert(four, tmp_path / layout, format=layout)
        report = osl.verify(four, against=tmp_path / layout)
        assert report.ok, report
        assert osl.verify(tmp_path / layout).ok


def test_what_a_conversion_writes_is_whole_and_says_nothing_of_parts(four, tmp_path):
    osl.convert(four, tmp_path / "hf", format="hf")
    with safetensors.safe_open(tmp_path / "hf/model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    np.testing.assert_array_equal(osl.load(tmp_path / "hf")["w"], W)


def test_a_conversion_takes_them_as_files_of_hugging_face(four, tmp_path):
    (four / "config.json").write_text('{"model_type": "llama"}')
    osl.convert(four, tmp_path / "hf", format="hf")
    assert (tmp_path / "hf/config.json").read_bytes() == (four / "config.json").read_bytes()
    osl.convert(four, tmp_path / "leaves", mapping=TRANSPOSED)  # to Orbax, the leaves' side
    np.testing.assert_array_equal(restore_standard(tmp_path / "leaves")["t"], W.T)
    assert osl.convert(four, tmp_path / "plain", dequantize="bfloat16").tensors == 1


def test_consolidate_says_what_puts_them_together(four, tmp_path):
    with pytest.raises(
        osl.SafetensorsLayoutError, match=r"osl\.convert\(path, target, format='hf'\)"
    ):
        osl.consolidate(four)


def test_a_save_takes_the_place_of_the_parts(four):
    osl.save(four, {"w": W + 1}, overwrite=True)
    assert not [*four.glob("shard-*")]
    np.testing.assert_array_equal(osl.load(four)["w"], W + 1)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_part_that_is_missing_is_named(four, rank):
    (four / f"shard-0000{rank}-model-00001-of-00001.safetensors").unlink()
    for use in (
        lambda: osl.load(four),
        lambda: osl.load(four, TREE),
        lambda: osl.load(four, mapping=TRANSPOSED),
        lambda: osl.metadata(four),
        lambda: osl.convert(four, four.parent / "hf"),
        lambda: inspect(four),
    ):
        with pytest.raises(osl.FormatError, match="pieces of 1 of 1 tensors do not make") as caught:
            use()
        text = str(caught.value)
        assert f"nothing for [{2 * rank - 2}:{2 * rank}, 0:4]" in text
        assert f"Not there are shard-0000{rank}-model-00001-of-00001.safetensors." in text
    assert f"nothing for [{2 * rank - 2}:{2 * rank}, 0:4]" in str(osl.verify(four))
    assert not osl.verify(four).ok


def test_the_last_part_is_missed_where_the_shape_is_known(four, tmp_path):
    """Nothing in the files of the first ranks tells that there were more."""
    (four / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ShapeMismatchError, match="here are those of 3 ranks up to 00003"):
        osl.load(four, TREE)
    transposed = {"t": jax.ShapeDtypeStruct((4, 8), W.dtype)}
    with pytest.raises(osl.MappingError, match="here are those of 3 ranks up to 00003"):
        osl.load(four, transposed, mapping=TRANSPOSED)
    report = osl.verify(four)
    assert "so parts may be missing" in str(report)
    with pytest.raises(osl.MismatchError, match="3 ranks up to 00003"):
        restore_v0(four, osl.SafetensorsRestore(TREE))


@pytest.fixture(params=["a folder with one file", "a file by its path"])
def alone(four, request):
    """The file of the first of four ranks: nothing in it tells that it is not all."""
    if request.param == "a file by its path":
        return four / "shard-00001-model-00001-of-00001.safetensors"
    for rank in (2, 3, 4):
        (four / f"shard-0000{rank}-model-00001-of-00001.safetensors").unlink()
    return four


def test_the_file_of_one_rank_is_not_taken_for_whole(alone, tmp_path, capsys):
    for use in (
        lambda: osl.load(alone),
        lambda: osl.load(alone, only="*"),
        lambda: osl.load(alone, mapping=TRANSPOSED),
        lambda: osl.metadata(alone),
        lambda: osl.plan_load(alone),
        lambda: osl.convert(alone, tmp_path / "hf"),
        lambda: TRANSPOSED.abstract(alone),
    ):
        with pytest.raises(osl.FormatError, match=r"so parts may be missing .*those of one rank"):
            use()
    assert not (tmp_path / "hf").exists()
    with pytest.raises(ShapeMismatchError, match="here are those of one rank"):
        osl.load(alone, TREE)
    assert not osl.verify(alone).ok
    assert main(["inspect", str(alone)]) == 0
    assert "so parts may be missing" in capsys.readouterr().out


def test_the_hints_of_one_rank_hold(tmp_path):
    """It is all that a run of one rank wrote: a tree with the shapes, or an index, says so."""
    folder = tmp_path / "dcp"
    file = write_rank(folder, 1, {"w": (W, (0, 0))})
    np.testing.assert_array_equal(osl.load(folder, TREE)["w"], W)
    np.testing.assert_array_equal(osl.load(folder / file, TREE)["w"], W)
    transposed = {"t": jax.ShapeDtypeStruct((4, 8), W.dtype)}
    np.testing.assert_array_equal(osl.load(folder, transposed, mapping=TRANSPOSED)["t"], W.T)
    index = {"weight_map": {"w": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(osl.load(folder)["w"], W)
    assert osl.verify(folder).ok
    osl.convert(folder, tmp_path / "hf", format="hf")
    assert osl.verify(tmp_path / "hf", against=folder).ok


def test_a_file_that_the_names_of_others_leave_out_is_named(tmp_path):
    """Right where a rank had nothing to write to it, as in a pipeline; a tree says so."""
    folder, v = tmp_path / "dcp", np.arange(3, dtype=np.float32)
    write_rank(folder, 1, {"w": (W[:4], (0, 0))}, number="00001-of-00002")
    write_rank(folder, 2, {"w": (W[4:], (4, 0))}, number="00001-of-00002")
    write_rank(folder, 1, {"v": (v, (0,))}, number="00002-of-00002")
    absent = "without shard-00002-model-00002-of-00002.safetensors"
    with pytest.raises(osl.FormatError, match=absent):
        osl.load(folder)
    assert absent in str(osl.verify(folder))
    loaded = osl.load(folder, {**TREE, "v": jax.ShapeDtypeStruct((3,), v.dtype)})
    np.testing.assert_array_equal(loaded["w"], W)
    larger = {**TREE, "v": jax.ShapeDtypeStruct((6,), v.dtype)}
    with pytest.raises(ShapeMismatchError, match=absent):
        osl.load(folder, larger)


def test_a_number_that_no_rank_wrote_is_named(tmp_path):
    """Right where the model lacks tensors that the numbering has, as a tied head."""
    for rank in (1, 2):
        rows = W[4 * rank - 4 : 4 * rank]
        write_rank(tmp_path, rank, {"w": (rows, (4 * rank - 4, 0))}, number="00001-of-00002")
    absent = (
        "without shard-00001-model-00002-of-00002.safetensors, shard-00002-model-00002-of-00002"
    )
    with pytest.raises(osl.FormatError, match=absent):
        osl.load(tmp_path)
    assert not osl.verify(tmp_path).ok
    np.testing.assert_array_equal(osl.load(tmp_path, TREE)["w"], W)
    write_rank(tmp_path, 1, {"w": (W, (0, 0))}, number="00001-of-00001")
    with pytest.raises(osl.FormatError, match="several numbered sets of files"):
        osl.load(tmp_path, TREE)


def rewrite(path, change):
    """Change the `__metadata__` of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ("{", "DCP_SHARDING_INFO is not valid JSON"),
        ("[]", "DCP_SHARDING_INFO is not valid JSON"),
        ("{}", "malformed offsets of 'w' in DCP_SHARDING_INFO"),
        ('{"w": {}}', "malformed saved_offsets of 'w'"),
        ('{"w": {"saved_offsets": [0]}}', "malformed saved_offsets"),
        ('{"w": {"saved_offsets": [0, -1]}}', "malformed saved_offsets of 'w'"),
        ('{"w": {"saved_offsets": [2, 0.0]}}', "malformed saved_offsets of 'w'"),
    ],
)
def test_malformed_offsets(four, info, told):
    file = four / "shard-00002-model-00001-of-00001.safetensors"
    rewrite(file, lambda metadata: metadata.update(DCP_SHARDING_INFO=info))
    with pytest.raises(osl.FormatError, match=told) as caught:
        osl.load(four, TREE)
    assert caught.value.file == str(file)
    assert told in str(osl.verify(four))


def test_parts_of_two_saves(four, tmp_path):
    write_rank(four, 5, {"w": (W[6:], (5, 0))})
    with pytest.raises(osl.FormatError, match=r"boxes that overlap: .*Files of two saves may be"):
        osl.load(four, TREE)
    write_rank(four, 5, {"w": (W[6:].astype(np.float16), (8, 0))})
    with pytest.raises(osl.FormatError, match=r"different dtypes.*F16"):
        osl.load(four, TREE)
    write_rank(four, 5, {"w": (W[6:], (6, 0))})  # which of them is newer cannot be told
    with pytest.raises(osl.FormatError, match="overlap"):
        osl.load(four, TREE)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_index_does_not_make_a_part_whole(tmp_path, rank):
    """Without `save_distributed` the last rank writes its parts over the others', and an index."""
    part = {"w": (W[4 * rank : 4 * rank + 4], (4 * rank, 0))}
    file = tmp_path / write_rank(tmp_path, 1, part)
    file.rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": W.nbytes},
        "weight_map": {"w": "model-00001-of-00001.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for use in (
        lambda: osl.load(tmp_path),
        lambda: osl.metadata(tmp_path),
        lambda: osl.convert(tmp_path, tmp_path / "out"),
    ):
        with pytest.raises(osl.FormatError, match=r"nothing for|hold less than their index says"):
            use()
    assert not osl.verify(tmp_path).ok


def test_an_index_counts_for_parts_that_are_whole(tmp_path):
    file = tmp_path / write_rank(tmp_path, 1, {"w": (W, (0, 0))})
    file.rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": W.nbytes},
        "weight_map": {"w": "model-00001-of-00001.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(osl.load(tmp_path)["w"], W)
    assert osl.verify(tmp_path).ok


RANK_FILES = {
    "vLLM or SGLang": ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"],
    "TensorRT-LLM": ["rank0.safetensors", "rank1.safetensors"],
    "neuronx-distributed": ["tp0_sharded_checkpoint.safetensors"],
    "DeepSeek's own inference code": ["model0-mp2.safetensors", "model1-mp2.safetensors"],
    "a program of parallel processes": [
        "model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
        "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
    ],
}


@pytest.mark.parametrize("left", [1, 2])
@pytest.mark.parametrize("writer", RANK_FILES)
def test_files_of_ranks_are_refused_as_what_they_are(tmp_path, writer, left):
    for file in RANK_FILES[writer][:left]:
        safetensors.numpy.save_file({"w": W[:4]}, tmp_path / file)
    for use in (osl.load, osl.metadata, inspect, lambda path: osl.convert(path, tmp_path / "out")):
        with pytest.raises(osl.FormatError, match=f"the files are those of {writer}") as caught:
            use(tmp_path)
        assert "Give the checkpoint that they were made from" in str(caught.value)
    assert f"the files are those of {writer}" in str(osl.verify(tmp_path))
    np.testing.assert_array_equal(osl.load(tmp_path / file)["w"], W[:4])  # as the hint says


@pytest.mark.parametrize(
    "name", ["lora_rank64", "model0-mp1", "model-rank", "experts_rank0", "ranked", "stp_rank1"]
)
def test_other_names_are_not_those_of_ranks(tmp_path, name):
    safetensors.numpy.save_file({"w": W}, tmp_path / f"{name}.safetensors")
    np.testing.assert_array_equal(osl.load(tmp_path)["w"], W)


def test_doubly_held_tensors_may_be_parts(tmp_path):
    """The path of a file of them would give a part for the whole: the error does not advise it."""
    for name in ("a", "b"):
        safetensors.numpy.save_file({"w": W[:4]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(osl.FormatError, match=r"Duplicate tensor w .*If each has a part") as caught:
        osl.load(tmp_path)
    assert "path" not in str(caught.value)
    index = {"weight_map": {"w": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(osl.load(tmp_path)["w"], W[:4])
