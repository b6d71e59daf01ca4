"""The layout of new files: which file, which order, which header; read back by the Rust library."""

from __future__ import annotations

import itertools
import json
import math
import re

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings, strategies as st
from saved_files import header

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import (
    DTYPES,
    FileLayout,
    NewTensor,
    index_bytes,
    lay_out,
    natural_key,
    parse_index,
    split,
)

F32 = DTYPES["F32"]
PAGE = 4096


def tensor(name, *shape, code="F32"):
    return NewTensor(name, DTYPES[code], shape)


names = st.text(st.sampled_from("ab.019²٣é_/"), max_size=8)
any_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def new_tensors(draw, names=any_names, max_size=12):
    entries = []
    for name in draw(st.lists(names, unique=True, max_size=max_size)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 64, 100]), max_size=4))
        if dtype.packed:
            shape = [*shape, 8]
        if math.prod(shape) * dtype.bits // 8 <= 1 << 20 and name != "__metadata__":
            entries.append(NewTensor(name, dtype, tuple(shape)))
    return entries


@given(st.lists(names, unique=True, max_size=12), st.randoms(use_true_random=False))
@example(["a.1", "a.01", "a.001", "a", "a.", "1", "01", "", "0", "00"], None)
@example(["a²", "a2", "a٣", "a3"], None)
def test_the_natural_order_is_total(texts, random):
    keys = [natural_key(text) for text in texts]
    assert len(set(keys)) == len(texts)
    order = sorted(texts, key=natural_key)
    shuffled = list(reversed(texts))
    if random is not None:
        random.shuffle(shuffled)
    assert sorted(shuffled, key=natural_key) == order


@given(st.lists(st.lists(st.integers(0, 2000), min_size=1, max_size=3), max_size=10))
def test_numbers_are_ordered_as_numbers(lists):
    texts = [".".join(f"x{n}" for n in numbers) for numbers in lists]
    expected = sorted(texts, key=lambda text: [int(n) for n in re.findall(r"\d+", text)])
    assert sorted(texts, key=natural_key) == expected


def test_numbers_of_any_length_have_an_order():
    texts = ["9" * 5000, "1" + "0" * 5000, "0" * 9000]
    assert sorted(texts, key=natural_key) == [texts[2], texts[0], texts[1]]


@given(new_tensors(), st.integers(1, 3000), st.randoms(use_true_random=False))
def test_files_are_filled_in_order(tensors, limit, random):
    files = split(tensors, limit)
    assert [t for _, group in files for t in group] == sorted(
        tensors, key=lambda t: natural_key(t.name)
    )
    for _, group in files:
        assert sum(t.nbytes for t in group) <= limit or len(group) == 1
    for (_, group), (_, following) in itertools.pairwise(files):
        assert group
        assert sum(t.nbytes for t in group) + following[0].nbytes > limit
    if len(files) == 1:
        assert files[0][0] == "model.safetensors"
    else:
        count = len(files)
        assert [name for name, _ in files] == [
            f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
        ]
    shuffled = list(tensors)
    random.shuffle(shuffled)
    assert split(shuffled, limit) == files


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own():
    tensors = [tensor("a", 10), tensor("b", 1000), tensor("c", 10), tensor("d", 10)]
    groups = [[t.name for t in group] for _, group in split(tensors, 100)]
    assert groups == [["a"], ["b"], ["c", "d"]]
    assert [len(group) for _, group in split(tensors[1:2], 1)] == [1]


def test_a_file_may_be_exactly_full():
    tensors = [tensor("a", 10), tensor("b", 15), tensor("c", 1)]
    assert [len(group) for _, group in split(tensors, 100)] == [2, 1]


def test_no_tensors_are_one_empty_file():
    assert split([], 100) == [("model.safetensors", [])]


def test_more_files_than_five_digits():
    files = split([tensor(f"t{number}", 1) for number in range(100_001)], 4)
    assert files[0][0] == "model-00001-of-100001.safetensors"
    assert files[-1] == ("model-100001-of-100001.safetensors", [tensor("t100000", 1)])


def check(layout: FileLayout, tensors, metadata, file) -> None:
    """Everything that is promised of a file, and that the Rust library opens it."""
    data_start = 8 + int.from_bytes(layout.header[:8], "little")
    assert data_start == len(layout.header)
    assert data_start % PAGE == 0
    assert {e[:3] for e in layout.tensors} == set(tensors)
    position = data_start
    aligned = True
    for entry in layout.tensors:
        assert entry.start == position
        assert entry.file == "f"
        assert entry.nbytes == math.prod(entry.shape) * entry.dtype.bits // 8
        if entry.nbytes % PAGE == 0:
            assert entry.start % PAGE == 0
        if entry.nbytes % 64 == 0:
            assert aligned, "a tensor of 64-byte lines stands behind another"
            assert entry.start % 64 == 0
        aligned &= entry.nbytes % 64 == 0
        assert entry.start % max(1, entry.dtype.bits // 8) == 0
        position = entry.stop
    assert layout.size == position
    rng = np.random.default_rng(0)
    body = rng.bytes(layout.size - data_start)
    file.write_bytes(layout.header + body)
    with safetensors.safe_open(file, "np") as opened:
        assert set(opened.keys()) == {t.name for t in tensors}
        assert opened.metadata() == (dict(metadata) or None)
    raw = dict(safetensors.deserialize(file.read_bytes()))
    for entry in layout.tensors:
        tensor = raw[entry.name]
        assert tensor["dtype"] == entry.dtype.code
        assert tuple(tensor["shape"]) == entry.shape
        assert tensor["data"] == body[entry.start - data_start : entry.stop - data_start]


@given(tensors=new_tensors(), metadata=st.dictionaries(any_names, any_names, max_size=3))
@settings(deadline=None)
def test_files_keep_their_promises(tmp_path_factory, tensors, metadata):
    file = tmp_path_factory.getbasetemp() / "laid_out.safetensors"
    layout = lay_out("f", tensors, metadata)
    check(layout, tensors, metadata, file)


@given(new_tensors(), st.integers(1, 3000), st.randoms(use_true_random=False))
def test_the_bytes_do_not_depend_on_the_order_of_the_tree(tensors, limit, random):
    shuffled = list(tensors)
    random.shuffle(shuffled)
    files, other = split(tensors, limit), split(shuffled, limit)
    assert index_bytes(files) == index_bytes(other)
    for (name, group), (_, again) in zip(files, other, strict=True):
        assert lay_out(name, group, {}) == lay_out(name, again, {})


def test_tensors_of_one_kind_keep_their_order():
    tensors = [tensor(f"t.{number}", 3) for number in range(20)]
    assert [entry.name for entry in lay_out("f", tensors, {}).tensors] == [t.name for t in tensors]


def test_scalars_and_empty_tensors(tmp_path):
    tensors = [
        tensor("scalar", code="BF16"),
        tensor("double", code="F64"),
        tensor("empty", 3, 0, 2),
        tensor("also_empty", 0, code="F4"),
        tensor("flag", code="BOOL"),
        tensor("page", 1024),
        tensor("line", 16),
    ]
    check(lay_out("f", tensors, {"format": "pt"}), tensors, {"format": "pt"}, tmp_path / "f")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ü",
        "漢字.重み",
        "😀",
        'a"b\\c',
        "a\nb\tc",
        "\x00",
        "\x7f",
        "\u2028",
        "e\u0301",
        "a" * 5000,
    ],
)
def test_names_of_any_kind(tmp_path, name):
    tensors = [tensor(name, 3), tensor("other", 2)]
    check(lay_out("f", tensors, {name: name}), tensors, {name: name}, tmp_path / "f")


def test_a_header_of_every_length_is_padded_to_whole_pages(tmp_path):
    """Lengths around the boundary, where the padding is none, one byte or nearly a page."""
    for length in range(4000, 4100):
        layout = lay_out("f", [tensor("n" * length, 1)], {})
        assert len(layout.header) % PAGE == 0
        assert len(layout.header) < 8 + 60 + length + PAGE
        json.loads(layout.header[8:])
    check(layout, [tensor("n" * length, 1)], {}, tmp_path / "f")


def test_many_tensors(tmp_path):
    tensors = [
        tensor(f"layers.{i // 7}.experts.{i % 7}.w", i % 3, i % 11, code=code)
        for i, code in zip(
            range(50_000), ["F32", "BF16", "I8", "F64", "BOOL"] * 10_000, strict=True
        )
    ]
    layout = lay_out("f", tensors, {"format": "pt"})
    (tmp_path / "f").write_bytes(layout.header + bytes(layout.size - len(layout.header)))
    with safetensors.safe_open(tmp_path / "f", "np") as opened:
        assert len(opened.keys()) == 50_000
    start, document = header(tmp_path / "f")
    assert start == len(layout.header)
    assert next(iter(document)) == "__metadata__"
    assert list(document)[1:] == [entry.name for entry in layout.tensors]


def test_a_header_longer_than_the_format_allows_is_refused_by_name():
    with pytest.raises(osl.FormatError, match="header would be longer") as caught:
        lay_out("model-00007.safetensors", [tensor("n" * 100_000_000, 1)], {})
    assert caught.value.file == "model-00007.safetensors"
    assert "max_file_bytes" in str(caught.value)


def test_the_name_that_the_format_keeps_for_itself_is_refused(tmp_path):
    with pytest.raises(osl.FormatError, match=r"file: f, tensor: '__metadata__'"):
        lay_out("f", [tensor("__metadata__", 1)], {})
    mapping = osl.Mapping([osl.rule("w", osl.tensor("__metadata__"))])
    with pytest.raises(osl.FormatError, match=r"'__metadata__'.* Rename the tensor"):
        osl.save(tmp_path / "out", {"w": np.ones(3, np.float32)}, mapping=mapping)
    assert not (tmp_path / "out").exists()


@given(new_tensors(), st.integers(1, 3000))
def test_the_index_lists_every_tensor(tensors, limit):
    files = split(tensors, limit)
    data = index_bytes(files)
    document = json.loads(data)
    assert list(document) == ["metadata", "weight_map"]
    assert document["metadata"] == {"total_size": sum(t.nbytes for t in tensors)}
    assert document["weight_map"] == {t.name: file for file, group in files for t in group}
    assert list(document["weight_map"]) == sorted(document["weight_map"], key=natural_key)


def test_the_index_is_the_one_of_huggingface_hub(tmp_path):
    """`transformers` writes the same, with `total_parameters` besides."""
    torch_free = {f"model.layers.{n}.weight": np.zeros(n + 1, np.float32) for n in range(12)}
    theirs = huggingface_hub.split_state_dict_into_shards_factory(
        torch_free,
        get_storage_size=lambda value: value.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=100,
    )
    files = split([tensor(name, *v.shape) for name, v in torch_free.items()], 100)
    assert dict(files) == {
        file: [tensor(name, *torch_free[name].shape) for name in members]
        for file, members in theirs.filename_to_tensors.items()
    }
    text = index_bytes(files).decode()
    document = json.loads(text)
    assert document["metadata"]["total_size"] == theirs.metadata["total_size"]
    assert document["weight_map"] == theirs.tensor_to_filename
    assert text == json.dumps(document, indent=2) + "\n"
    parsed = parse_index(text.encode(), file="i")
    assert parsed.weight_map == theirs.tensor_to_filename


ADAPTERS = [
    "adapter_model", "adapter_model-00001-of-00001", "pytorch_lora_weights", "consolidated",
]  # fmt: skip
OTHERS = ["adapters", "optimizer", "model.fp16", "other_model-00001-of-00001"]


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        *itertools.product(["model", "model-00001-of-00001"], ADAPTERS + OTHERS),
        *itertools.product(["weights"], ADAPTERS),
        ("model", "model-00001-of-00001"),
    ],
)
def test_other_weights_beside_a_model_are_left_out_and_named(tmp_path, caplog, adapter, name):
    """As transformers does, which takes the model's files alone."""
    model, lora = {"w": np.ones(3, np.float32)}, {"base.lora_A": np.zeros(2, np.float32)}
    safetensors.numpy.save_file(model, tmp_path / f"{name}.safetensors")
    safetensors.numpy.save_file(lora, tmp_path / f"{adapter}.safetensors")
    with caplog.at_level("WARNING"):
        assert set(osl.load(tmp_path)) == {"w"}
    assert f"'{adapter}.safetensors' is left out" in caplog.text
    assert set(osl.load(tmp_path / f"{adapter}.safetensors")) == {"base.lora_A"}
    (tmp_path / f"{name}.safetensors").unlink()
    caplog.clear()
    assert set(osl.load(tmp_path)) == {"base.lora_A"}
    assert not caplog.text


def test_a_model_that_the_index_does_not_list_is_named(tmp_path, caplog):
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model-00001-of-00001.safetensors")
    safetensors.numpy.save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level("WARNING"):
        assert osl.load(tmp_path)["w"].all()
    assert "does not list 'model.safetensors', which is left out" in caplog.text
