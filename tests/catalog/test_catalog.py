from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping

import numpy as np
import pytest
import safetensors.numpy
from format_helpers import MemoryStorage, Request, entry, file_bytes, index_bytes, model_file
from recording import serving

from orbax_safetensors_layout.catalog import Catalog, is_safetensors_checkpoint, read_header
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidHeaderError,
    InvalidIndexError,
    MissingTensorError,
    SafetensorsLayoutError,
    StorageError,
)

INDEX = "/m/model.safetensors.index.json"


def indexed() -> MemoryStorage:
    """`a` and `c` in the first of three files, `b` in the second, `d` in the third; a stray one."""
    return MemoryStorage(
        {
            "/m/1.safetensors": model_file(
                {"a": 3, "c": 1, "unlisted": 2}, metadata={"format": "pt"}
            ),
            "/m/2.safetensors": model_file({"b": 5}, metadata={"format": "np", "x": "y"}),
            "/m/3.safetensors": model_file({"d": 0}),
            "/m/consolidated.safetensors": model_file({"a": 3, "b": 5}),
            "/m/config.json": b"{}",
            INDEX: index_bytes(
                {
                    "d": "3.safetensors",
                    "a": "1.safetensors",
                    "b": "2.safetensors",
                    "c": "1.safetensors",
                }
            ),
        }
    )


def plain_folder() -> MemoryStorage:
    storage = indexed()
    del storage.files[INDEX], storage.files["/m/consolidated.safetensors"]
    return storage


def opened(files: Mapping[str, bytes], path: str = "/m") -> Catalog:
    return Catalog.open(path, storage=MemoryStorage(files))


# Opening.


def test_index_says_which_files_count() -> None:
    storage = indexed()
    catalog = Catalog.open("/m", storage=storage)
    assert catalog.listed() == ("d", "a", "b", "c")
    assert catalog.files == ("/m/1.safetensors", "/m/2.safetensors", "/m/3.safetensors")
    assert (catalog.path, catalog.storage) == ("/m", storage)
    assert "a" in catalog
    assert repr(catalog) == "Catalog('/m', 4 tensors in 3 files)"
    assert storage.read_files() == [INDEX]
    assert storage.listings == ["/m"]
    assert catalog.names == ("d", "a", "b", "c", "unlisted")


def test_only_the_needed_headers_are_fetched_once() -> None:
    storage = indexed()
    catalog = Catalog.open("/m", storage=storage)
    storage.requests.clear()
    entries = catalog.entries(["c", "a", "c"])
    assert list(entries) == ["c", "a"]
    size = len(storage.files["/m/1.safetensors"])
    assert storage.requests == [Request("/m/1.safetensors", 0, size)]
    start = size - 6
    assert entries["a"][2:] == ((3,), "/m/1.safetensors", start, start + 3)
    assert entries["c"][2:] == ((1,), "/m/1.safetensors", start + 3, start + 4)

    catalog.entries(["a", "b"])
    assert storage.read_files() == ["/m/1.safetensors", "/m/2.safetensors"]
    assert len(storage.requests) == 2
    assert list(catalog.all_entries()) == ["d", "a", "b", "c", "unlisted"]
    assert catalog.metadata() == {"format": "pt", "x": "y"}
    assert len(storage.requests) == 3


def test_folder_without_an_index() -> None:
    catalog = Catalog.open("/m/", storage=plain_folder())
    assert catalog.names == ("a", "c", "unlisted", "b", "d")
    assert catalog.entries(["b"])["b"].file == "/m/2.safetensors"


def test_single_file() -> None:
    storage = indexed()
    catalog = Catalog.open("/m/1.safetensors", storage=storage)
    assert catalog.names == ("a", "c", "unlisted")
    assert catalog.files == ("/m/1.safetensors",)
    assert storage.listings == []
    assert storage.read_files() == ["/m/1.safetensors"]


def test_other_index_name() -> None:
    name = "/m/diffusion_pytorch_model.safetensors.index.json"
    files = {name: index_bytes({"a": "1.safetensors"}), "/m/1.safetensors": model_file({"a": 1})}
    assert opened(files).names == ("a",)


def test_main_index_wins_over_others() -> None:
    storage = indexed()
    storage.files["/m/other.safetensors.index.json"] = b"not read"
    assert len(Catalog.open("/m", storage=storage).files) == 3


def test_several_indices() -> None:
    files = {f"/m/{name}.safetensors.index.json": b"{}" for name in ("x", "y")}
    with pytest.raises(InvalidIndexError, match="several indices") as caught:
        opened(files)
    assert "x.safetensors.index.json, y.safetensors.index.json" in str(caught.value)
    assert caught.value.file == "/m"


def test_malformed_index_names_its_file() -> None:
    with pytest.raises(InvalidIndexError) as caught:
        opened({INDEX: b"{"})
    assert caught.value.file == INDEX


def test_index_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = indexed()
    monkeypatch.setattr(storage, "size", lambda file: 100_000_001)
    with pytest.raises(InvalidIndexError, match="too large"):
        Catalog.open("/m", storage=storage)
    assert storage.requests == []


def test_files_in_sub_folders() -> None:
    files = {
        INDEX: index_bytes({"a": "x/1.safetensors", "b": "x/2.safetensors", "c": "3.safetensors"}),
        "/m/x/1.safetensors": model_file({"a": 1}),
        "/m/x/2.safetensors": model_file({"b": 1}),
        "/m/3.safetensors": model_file({"c": 1}),
    }
    storage = MemoryStorage(files)
    catalog = Catalog.open("/m", storage=storage)
    assert [tensor.file for tensor in catalog.all_entries().values()] == sorted(
        catalog.files, key=["/m/x/1.safetensors", "/m/x/2.safetensors", "/m/3.safetensors"].index
    )
    assert storage.listings == ["/m", "/m/x"]


def test_all_missing_files_are_named() -> None:
    weight_map = {
        "a": "1.safetensors",
        "b": "2.safetensors",
        "c": "x/3.safetensors",
        "d": "4.safetensors",
    }
    with pytest.raises(InvalidIndexError, match="missing") as caught:
        opened({INDEX: index_bytes(weight_map), "/m/1.safetensors": b""})
    assert caught.value.file == INDEX
    assert caught.value.expected == "4 files"
    assert caught.value.found == "3 missing: 2.safetensors, 4.safetensors, x/3.safetensors"


def test_header_lacks_tensors_of_the_index() -> None:
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"}
    files = {INDEX: index_bytes(weight_map), "/m/1.safetensors": model_file({"b": 1})}
    catalog = opened(files)
    assert list(catalog.entries(["b"])) == ["b"]
    with pytest.raises(MissingTensorError, match="Tensor 'a' not found") as caught:
        catalog.entries(["a"])
    assert "The index names 'a' in /m/1.safetensors, 'c' in /m/1.safetensors" in str(caught.value)
    assert list(catalog.all_entries()) == ["b"]


def test_duplicate_tensor_without_an_index() -> None:
    files = {
        "/m/1.safetensors": model_file({"w": 1, "x": 1, "y": 1}),
        "/m/2.safetensors": model_file({"y": 1, "w": 1}),
    }
    with pytest.raises(InvalidIndexError) as caught:
        opened(files)
    message = str(caught.value)
    assert "Duplicate tensor w in /m/1.safetensors and /m/2.safetensors and 1 more" in message
    assert (caught.value.file, caught.value.tensor) == ("/m", "w")
    assert "model.safetensors.index.json" in message


def test_malformed_header_without_an_index() -> None:
    with pytest.raises(InvalidHeaderError) as caught:
        opened({"/m/1.safetensors": model_file({"a": 1}), "/m/2.safetensors": file_bytes("[]")})
    assert caught.value.file == "/m/2.safetensors"


def test_folder_without_safetensors() -> None:
    with pytest.raises(
        CheckpointNotFoundError, match=r"does not contain any '\.safetensors' files"
    ) as caught:
        opened({"/m/model.bin": b"", "/m/sub/x.safetensors": b""})
    assert "model.bin" in str(caught.value)


def test_no_such_path() -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist") as caught:
        opened({}, "/nowhere")
    assert "does not contain" not in str(caught.value)
    assert caught.value.file == "/nowhere"


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors.index.json", "safetensors"])
def test_file_of_another_format(name: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="another format") as caught:
        opened({f"/m/{name}": b""}, f"/m/{name}")
    assert caught.value.found == name


def test_empty_checkpoint() -> None:
    catalog = opened({"/m/model.safetensors": file_bytes("{}")})
    assert catalog.names == ()
    assert catalog.all_entries() == {}
    assert catalog.metadata() == {}


# Requests.


def test_long_header_takes_a_second_request() -> None:
    data = model_file({"a": 2}, pad=1 << 20)
    storage = MemoryStorage({"/m/1.safetensors": data})
    header = read_header(storage, "/m/1.safetensors")
    assert storage.requests == [
        Request("/m/1.safetensors", 0, 256 << 10),
        Request("/m/1.safetensors", 256 << 10, len(data) - 2),
    ]
    assert header.tensors["a"].stop == len(data)


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_header_of_just_the_first_request(excess: int) -> None:
    shortest = len(model_file({"a": 2})) - 2
    data = model_file({"a": 2}, pad=(256 << 10) - shortest + excess)
    storage = MemoryStorage({"/m/1.safetensors": data})
    header = read_header(storage, "/m/1.safetensors")
    assert header.tensors["a"].start == (256 << 10) + excess
    assert len(storage.requests) == (2 if excess > 0 else 1)


def test_large_file_is_not_read_beyond_the_first_request() -> None:
    storage = MemoryStorage({"/m/1.safetensors": model_file({"a": 1 << 20})})
    Catalog.open("/m", storage=storage)
    assert storage.requests == [Request("/m/1.safetensors", 0, 256 << 10)]


@pytest.mark.parametrize("size", range(8))
def test_tiny_file(size: int) -> None:
    storage = MemoryStorage({"/m/1.safetensors": bytes(size)})
    with pytest.raises(SafetensorsLayoutError, match="truncated"):
        Catalog.open("/m", storage=storage)


def test_headers_are_fetched_concurrently() -> None:
    barrier = threading.Barrier(3, timeout=30)

    class Waiting(MemoryStorage):
        def size(self, file: str) -> int:
            if file.endswith(".safetensors"):
                barrier.wait()
            return super().size(file)

    catalog = Catalog.open("/m", storage=Waiting(indexed().files))
    assert len(catalog.all_entries()) == 5


def test_threads_share_the_fetched_headers() -> None:
    storage = indexed()
    catalog = Catalog.open("/m", storage=storage)
    storage.requests.clear()
    threads = [threading.Thread(target=catalog.all_entries) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(storage.requests) == 3


def test_failed_fetch_is_tried_again() -> None:
    class Failing(MemoryStorage):
        fail = True

        def size(self, file: str) -> int:
            if self.fail and file == "/m/2.safetensors":
                raise StorageError("no answer", file=file)
            return super().size(file)

    storage = Failing(indexed().files)
    catalog = Catalog.open("/m", storage=storage)
    with pytest.raises(StorageError, match="no answer"):
        catalog.all_entries()
    storage.fail = False
    assert len(catalog.all_entries()) == 5


# Asking.


def test_all_missing_names_are_reported() -> None:
    catalog = opened(
        {"/m/1.safetensors": model_file({"layers.0.weight": 1, "layers.1.weight": 1, "norm": 1})}
    )
    with pytest.raises(MissingTensorError) as caught:
        catalog.entries(["layers.0.wieght", "norm", "xyz[0]"])
    message = str(caught.value)
    assert "Tensor 'layers.0.wieght' not found" in message
    assert "The nearest names are 'layers.0.weight', 'layers.1.weight'." in message
    assert "Tensor 'xyz[0]' not found" in message
    assert caught.value.file == "/m"
    with pytest.raises(MissingTensorError) as caught:
        catalog.entries(["it's"])
    assert "Tensor 'it's' not found" in str(caught.value)
    assert caught.value.tensor == "it's"
    assert isinstance(caught.value, KeyError)


def test_many_missing_names_cost_little() -> None:
    weight_map = {f"model.layers.{i}.mlp.weight": "1.safetensors" for i in range(50_000)}
    held = model_file(dict.fromkeys(weight_map, 1))
    catalog = opened({INDEX: index_bytes(weight_map), "/m/1.safetensors": held})
    names = [f"layers.{i}.mlp.weight" for i in range(50_000)]
    with pytest.raises(MissingTensorError) as caught:  # quadratic work would not end in time
        catalog.entries(names)
    text = str(caught.value)
    assert text.startswith(
        "50,000 problems (file: /m):\n  Tensor 'layers.0.mlp.weight' not found ("
    )
    assert text.endswith(" (49,999 more like it)")
    assert "'model.layers.0.mlp.weight'" in text


def test_select() -> None:
    names = [f"layers.{i}.{part}.weight" for i in range(12) for part in ("q", "k")]
    catalog = opened({"/m/1.safetensors": model_file(dict.fromkeys([*names, "embed", "x[0]"], 1))})
    assert catalog.select("embed") == ["embed"]
    assert catalog.select("*") == list(catalog.names)
    assert catalog.select("layers.{9..10}.*") == names[18:22]
    assert catalog.select(["embed", "layers.1?.q.*", "layers.11.*"]) == [
        "layers.10.q.weight",
        "layers.11.q.weight",
        "layers.11.k.weight",
        "embed",
    ]
    assert catalog.select("x[[]0]") == ["x[0]"]
    assert catalog.select("x[0]") == ["x[0]"]
    assert catalog.select([]) == []


def test_select_reports_every_pattern_without_a_match() -> None:
    catalog = opened({"/m/1.safetensors": model_file({"embed.weight": 1, "norm": 1})})
    with pytest.raises(MissingTensorError) as caught:
        catalog.select(["embed.wei*x", "norm", "embed.wight"])
    message = str(caught.value)
    assert "Pattern 'embed.wei*x' matches no tensor" in message
    assert "Tensor 'embed.wight' not found" in message
    assert "The nearest names are 'embed.weight'." in message
    with pytest.raises(MissingTensorError):
        catalog.select("")
    with pytest.raises(ValueError, match="not closed"):
        catalog.select("{a")


# What stands at a path.


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/m", True),
        ("/m/", True),
        ("/m/1.safetensors", True),
        ("/m/config.json", False),
        (INDEX, False),
        ("/index-only", True),
        ("/other", False),
        ("/nowhere", False),
    ],
)
def test_is_safetensors_checkpoint(path: str, expected: bool) -> None:
    storage = indexed()
    storage.files["/index-only/x.safetensors.index.json"] = b""
    storage.files["/other/model.bin"] = b""
    assert is_safetensors_checkpoint(path, storage=storage) is expected
    assert storage.requests == []


# Real files.


def test_local_files(tmp_path: pathlib.Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int8)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert is_safetensors_checkpoint(tmp_path)
    assert not is_safetensors_checkpoint(tmp_path / "none")
    assert not is_safetensors_checkpoint("nosuchscheme://x")
    with Catalog.open(tmp_path) as catalog:
        assert catalog.path == str(tmp_path)
        assert catalog.metadata() == {"format": "pt"}
        entries = catalog.all_entries()
        data = (tmp_path / "model.safetensors").read_bytes()
        for name, array in tensors.items():
            entry = entries[name]
            assert entry.shape == array.shape
            assert data[entry.start : entry.stop] == array.tobytes()
    with pytest.raises(CheckpointNotFoundError):
        Catalog.open(tmp_path / "none")


def test_close_closes_a_given_storage() -> None:
    storage = indexed()
    with Catalog.open("/m", storage=storage):
        assert not storage.closed
    assert storage.closed


def test_a_given_storage_stays_open_where_opening_fails() -> None:
    storage = indexed()
    with pytest.raises(CheckpointNotFoundError):
        Catalog.open("/elsewhere", storage=storage)
    assert not storage.closed


def test_own_storage_is_closed() -> None:
    file = file_bytes({"a": entry("U8", [1], 0, 1)}, b"x")
    with serving(MemoryStorage({"memory://m/1.safetensors": file}), "memory://") as storage:
        with Catalog.open("memory://m"):
            assert not storage.closed
        assert storage.closed
        storage.closed = False
        with pytest.raises(CheckpointNotFoundError):
            Catalog.open("memory://elsewhere")
        assert storage.closed


def test_hidden_files_do_not_count() -> None:
    files = {"/m/a.safetensors": model_file({"a": 1}), "/m/._a.safetensors": b"Mac OS X"}
    assert opened(files).names == ("a",)
    hidden = MemoryStorage({"/m/.a.safetensors": model_file({"a": 1}), "/m/._x.json": b""})
    assert not is_safetensors_checkpoint("/m", storage=hidden)
    with pytest.raises(CheckpointNotFoundError):
        Catalog.open("/m", storage=hidden)


def test_a_folder_of_the_hubs_cache_above_the_commits(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "models--org--model"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    for path in (folder, folder / "snapshots"):
        with pytest.raises(CheckpointNotFoundError, match="snapshots/<commit>"):
            Catalog.open(path)


def test_an_incomplete_numbered_set_without_an_index() -> None:
    files = {f"/m/model-0000{n}-of-00004.safetensors": model_file({}) for n in (1, 3)}
    with pytest.raises(InvalidIndexError, match="lacks files of a numbered set") as caught:
        opened(files)
    assert "numbers 00002, 00004" in str(caught.value)
    assert caught.value.file == "/m"


@pytest.mark.parametrize("count", [100_000, 10**15, 10**200])
def test_a_file_whose_name_counts_to_no_end(count: int) -> None:
    """It is incomplete as any; no set of all those numbers is made."""
    files = {f"/m/model-00001-of-{count}.safetensors": model_file({"a": 2})}
    with pytest.raises(InvalidIndexError, match=f"{count - 1:,} missing: numbers 0*2, 0*3"):
        opened(files)
