"""Versions as differences: each is pulled as it was published, or refused."""

import json
import os
import shutil
import threading
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import obstore
import pytest
import safetensors.numpy
import zstandard
from changing_models import as_bytes, changed, history, model
from checkpoints import save
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from mapped_llama import path, plain_mapping, tensors  # noqa: F401
from meshes import mesh_of
from programs import run_processes
from published import read_version, write_version
from remote_checks import hub_in_use
from sampling import every

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.conversion import new_version, versioned_storage
from orbax_safetensors_layout.conversion.versions import PublishedVersions
from orbax_safetensors_layout.storage import open_storage

INDEX = "model.safetensors.index.json"


def flat(tree, prefix=""):
    found = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    return folder, history(folder, 8, whole_every=5)


def test_versions_are_what_the_format_says(published):
    """A reader made from the format's description, without this package, has the same bytes."""
    folder, seen = published
    whole = []
    for number, expected in seen.items():
        assert read_version(folder, number) == expected
        said = json.loads((folder / f"weight_v{number:06d}" / INDEX).read_text())["metadata"]
        whole += [number] * ("delta_encoding" not in said)
    assert whole == [1, 5]


def test_each_version_is_pulled_as_arrays(published):
    folder, seen = published
    for number, expected in seen.items():
        pulled = osl.pull(folder, version=number)
        assert pulled.version == number
        assert as_bytes(pulled.tree) == expected
    assert osl.pull(folder).version == 8


class Together:
    """Counts the calls of a function that are under way, and the most of them at once."""

    def __init__(self, call):
        self._call, self._lock = call, threading.Lock()
        self._now = self.most = 0

    def __call__(self, *arguments):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.01)
        try:
            return self._call(*arguments)
        finally:
            with self._lock:
                self._now -= 1


@pytest.mark.parametrize("least", [1, 3])
def test_tensors_that_are_put_together_at_once_fit_the_bound(tmp_path, monkeypatch, least):
    tree = {f"t{n}": np.arange(1000.0) + n for n in range(12)}
    osl.publish(tmp_path, tree)
    osl.publish(tmp_path, {name: value + 1 for name, value in tree.items()})
    counted = Together(versioned_storage.put_together)
    monkeypatch.setattr(versioned_storage, "put_together", counted)
    monkeypatch.setattr(versioned_storage, "_KEPT_BYTES", least * 2 * tree["t0"].nbytes)
    pulled = osl.pull(tmp_path, options=osl.ReadOptions(concurrency=8))
    assert as_bytes(pulled.tree) == as_bytes({name: value + 1 for name, value in tree.items()})
    assert counted.most <= least


@pytest.mark.parametrize("least", [1, 3])
def test_tensors_that_are_compared_at_once_fit_the_budget(tmp_path, monkeypatch, least):
    tree = {f"t{n}": np.arange(1000.0) + n for n in range(12)}
    osl.publish(tmp_path, tree)
    counted = Together(new_version.encoded_difference)
    monkeypatch.setattr(new_version, "encoded_difference", counted)
    after = {name: value + 1 for name, value in tree.items()}
    budget = least * 2 * tree["t0"].nbytes
    options = osl.WriteOptions(memory_budget_bytes=budget, concurrency=8)
    osl.publish(tmp_path, after, options=options)
    assert as_bytes(osl.pull(tmp_path).tree) == as_bytes(after)
    assert counted.most <= least


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_nothing_stays_with_arrays_that_were_published(tmp_path, spec):
    sharding = NamedSharding(mesh_of(x=8), spec)
    first = jax.device_put(np.arange(4096.0, dtype=np.float32).reshape(64, 64), sharding)
    trees = [{"w": first}, {"w": first + 1}, {"w": first + 2}]
    for tree in trees[:2]:
        osl.publish(tmp_path, tree)
    held = osl.pull(tmp_path, trees[0])
    osl.publish(tmp_path, trees[2])
    new = osl.pull(tmp_path, held)
    for array in (*(tree["w"] for tree in trees), held.tree["w"]):
        assert array._npy_value is None  # where JAX keeps a host copy (0.7 to 0.12)
    assert as_bytes(new.tree) == as_bytes(trees[2])


def test_versions_of_one_whole_one_are_told_apart(published):
    """So that processes that pull different ones do not exchange parts of both."""
    folder, seen = published
    storage, root = open_storage(folder)
    with storage:
        versions = PublishedVersions(storage, root)
        known = []
        for number in seen:
            catalog = versions.catalog(versions.chain(number))
            known.append(tuple(catalog.storage.version(file) for file in catalog.files))
    assert len({*known}) == len(seen) - 1  # of the two whole ones the files tell
    assert known[0] == known[4]


@pytest.mark.parametrize("order", [(8,), (1, 2, 3, 4, 5, 6, 7, 8), (3, 8, 2, 2, 7, 5, 6, 1)])
def test_a_folder_goes_from_version_to_version(published, tmp_path, order):
    folder, seen = published
    for number in order:
        osl.pull(folder, tmp_path / "own", version=number)
        assert read_version(tmp_path, 0, tmp_path / "own") == seen[number]
        assert osl.verify(tmp_path / "own").ok


@settings(max_examples=15, deadline=None)
@given(data=st.data(), whole_every=st.integers(1, 4))
def test_any_history_is_pulled_bit_for_bit(tmp_path_factory, data, whole_every):
    folder = tmp_path_factory.mktemp("any")
    tree = jax.tree.map(lambda value: value, {f"t{n}": v for n, v in enumerate(model().values())})
    seen = {}
    for number in range(1, data.draw(st.integers(1, 6)) + 1):
        osl.publish(folder / "all", tree, whole_every=whole_every)
        seen[number] = as_bytes(tree)
        tree = changed(
            tree, data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([0, 0.01, 1]))
        )
    for number in data.draw(st.permutations([*seen])):
        osl.pull(folder / "all", folder / "own", version=number)
        assert read_version(folder, 0, folder / "own") == seen[number]
        assert as_bytes(osl.pull(folder / "all", version=number).tree) == seen[number]


def test_what_did_not_change_is_not_written(tmp_path):
    tree = model()
    for _ in range(2):
        osl.publish(tmp_path, tree)
    assert os.listdir(tmp_path / "weight_v000002") == [INDEX]
    assert json.loads((tmp_path / "weight_v000002" / INDEX).read_text())["weight_map"] == {}
    assert as_bytes(osl.pull(tmp_path).tree) == as_bytes(tree)


def test_two_percent_of_a_model_take_at_most_four_percent_of_its_bytes(tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"w{n}": rng.normal(size=(512, 1024)).astype(ml_dtypes.bfloat16) for n in range(8)}
    osl.publish(tmp_path, tree)
    for value in tree.values():
        bits = value.view(np.uint16)
        bits[rng.random(bits.shape) < 0.02] += np.uint16(1)
    osl.publish(tmp_path, tree)
    written = sum(file.stat().st_size for file in (tmp_path / "weight_v000002").iterdir())
    assert written <= 0.04 * sum(value.nbytes for value in tree.values())
    assert read_version(tmp_path, 2) == as_bytes(tree)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_twenty_versions_of_two_gigabytes(tmp_path):
    rng = np.random.default_rng(0)
    tree = {
        f"w{n}": rng.integers(0, 1 << 16, (4096, 8192), np.uint16).view(ml_dtypes.bfloat16)
        for n in range(32)
    }
    total = sum(value.nbytes for value in tree.values())
    osl.publish(tmp_path / "all", tree)
    held = osl.pull(
        tmp_path / "all", {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in tree.items()}
    )
    for number in range(2, 22):
        for value in tree.values():
            bits = value.view(np.uint16).reshape(-1)
            at = rng.integers(0, bits.size, bits.size // 50)
            bits[at] ^= np.uint16(1)
        began = time.perf_counter()
        assert osl.publish(tmp_path / "all", tree) == number
        published = time.perf_counter() - began
        place = tmp_path / f"all/weight_v{number:06d}"
        written = sum(file.stat().st_size for file in place.iterdir())
        assert written <= (0.04 * total if number % 10 else 1.01 * total)
        began = time.perf_counter()
        osl.pull(tmp_path / "all", tmp_path / "own")
        copied = time.perf_counter() - began
        held = osl.pull(tmp_path / "all", held, donate=True)
        in_place = time.perf_counter() - began - copied
        print(
            f"{number}: {written / total:.2%}, published in {published:.1f} s, pulled in"
            f" {copied:.1f} s, in place in {in_place:.1f} s"
        )
        for pulled in (osl.load(tmp_path / "own"), held.tree):
            for name, value in tree.items():
                assert np.array_equal(
                    np.asarray(pulled[name]).view(np.uint16), value.view(np.uint16)
                )


# Through a mapping, from a model as its base.


def test_a_mapped_model_follows_the_one_that_training_began_with(tmp_path, path, tensors):  # noqa: F811
    mapping = plain_mapping()
    mesh = mesh_of(x=4, y=2)

    def spec(value):
        return NamedSharding(mesh, P("x", "y") if value.ndim == 2 else P())

    tree = jax.tree.map(lambda v: jax.device_put(v, spec(v)), osl.load(path, mapping=mapping))
    values = {0: as_bytes(tensors)}
    for number in (1, 2):
        tree = jax.tree.map(lambda v: (v * jnp.asarray(1.01, v.dtype)).astype(v.dtype), tree)
        assert osl.publish(tmp_path / "all", tree, mapping=mapping, base=path) == number
        values[number] = as_bytes(mapping.unapply(tree))
        assert read_version(tmp_path / "all", number, Path(path)) == values[number]
    abstract = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=spec(v)), tree
    )
    pulled = osl.pull(tmp_path / "all", abstract, mapping=mapping, base=path).tree
    for value, expected in zip(jax.tree.leaves(pulled), jax.tree.leaves(tree), strict=True):
        assert value.sharding == expected.sharding
        assert np.asarray(value).tobytes() == np.asarray(expected).tobytes()
    for number in (0, 1, 2):
        osl.pull(tmp_path / "all", tmp_path / "own", version=number, base=path)
        assert read_version(tmp_path, 0, tmp_path / "own") == values[number]


@pytest.mark.parametrize("kind", ["one file", "folders"])
def test_files_of_a_model_keep_their_places(tmp_path, kind):
    tree = model()
    values = {name: np.asarray(value) for name, value in tree.items()}
    if kind == "one file":
        base = save(tmp_path / "model", values) / "model.safetensors"
    else:
        base = tmp_path / "model"
        weight_map = {name: f"{n % 2}/part.safetensors" for n, name in enumerate(values)}
        for n in "01":
            (base / n).mkdir(parents=True)
            part = {name: v for name, v in values.items() if weight_map[name][0] == n}
            safetensors.numpy.save_file(part, base / n / "part.safetensors")
        (base / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for number in (1, 2):
        tree = changed(tree, number)
        osl.publish(tmp_path / "all", tree, base=base)
        osl.pull(tmp_path / "all", tmp_path / "own", base=base)
        loaded = {name: osl.load(tmp_path / "own", only=name)[name] for name in tree}
        assert as_bytes(loaded) == as_bytes(tree)
        if kind == "folders":
            assert (tmp_path / "own/1/part.safetensors").exists()


def test_side_files_come_with_a_whole_version(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"vocab_size": 5}')
    osl.publish(tmp_path / "all", model(), options=osl.WriteOptions(model=source))
    osl.pull(tmp_path / "all", tmp_path / "own")
    assert json.loads((tmp_path / "own/config.json").read_text()) == {"vocab_size": 5}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("digest", ["xxh3-128", "adler32"])
def test_versions_of_other_programs(tmp_path, encoding, digest):
    tree = model()
    save(tmp_path / "model", {name: np.asarray(value) for name, value in tree.items()}, files=2)
    values = as_bytes(tree)
    for number in (1, 2, 3):
        tree = changed(tree, number)
        new = as_bytes(tree)
        write_version(tmp_path / "all", number, values, new, encoding=encoding, digest=digest)
        values = new
    pulled = osl.pull(tmp_path / "all", base=tmp_path / "model")
    assert pulled.version == 3
    assert as_bytes(flat(pulled.tree)) == values
    osl.pull(tmp_path / "all", tmp_path / "own", version=2, base=tmp_path / "model")
    osl.pull(tmp_path / "all", tmp_path / "own", base=tmp_path / "model")
    assert read_version(tmp_path, 0, tmp_path / "own") == values


def test_versions_in_a_bucket(place, tmp_path):
    url = f"{place.url}/versions"
    tree, seen = model(), {}
    for number in (1, 2, 3):
        assert osl.publish(url, tree) == number
        seen[number] = as_bytes(tree)
        tree = changed(tree, number)
    for number, expected in seen.items():
        assert as_bytes(osl.pull(url, version=number).tree) == expected
    place.server.take_log()
    osl.pull(url, tmp_path / "own", version=2)
    place.server.take_log()
    osl.pull(url, tmp_path / "own")
    read = {entry["key"] for entry in place.server.take_log() if entry["method"] == "GET"}
    assert not any("weight_v000001/model.safetensors" in key and "index" not in key for key in read)
    assert read_version(tmp_path, 0, tmp_path / "own") == seen[3]


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_programs_that_publish_one_version_to_a_bucket(place, monkeypatch, when):
    """The second is refused; one whose claim nobody saw sees that its file was replaced."""
    url = f"{place.url}/versions"
    tree = model()
    osl.publish(url, tree)
    mine, theirs = changed(tree, 1), changed(tree, 2)
    put, ends = obstore.put, []

    def publish():
        try:
            ends.append(osl.publish(url, theirs))
        except osl.StorageError as error:
            ends.append(str(error))

    def putting(client, key, data, **options):
        is_mine = "weight_v000002" in key and key.endswith(".safetensors") and not ends
        if is_mine and when == "before":
            publish()
        result = put(client, key, data, **options)
        if is_mine and when == "after":
            # What another writes over it at the very same time.
            ends.append("")
            threading.Timer(0.5, put, (client, key, b"theirs")).start()
        return result

    monkeypatch.setattr(obstore, "put", putting)
    write = new_version._write
    monkeypatch.setattr(new_version, "_write", lambda *a: (write(*a), time.sleep(1)))
    if when == "before":
        assert osl.publish(url, mine) == 2
        assert "another save to this path is running" in ends[0]
        assert as_bytes(osl.pull(url, version=2).tree) == as_bytes(mine)
    else:
        with pytest.raises(osl.StorageError, match="another program has written"):
            osl.publish(url, mine)
        assert osl.pull(url).version == 1


# Refusals.


def spoiled(folder, number, seen, **how):
    """Replace a version by one of another program, and return its folder."""
    shutil.rmtree(folder / f"weight_v{number:06d}")
    return write_version(folder, number, seen[number - 1], seen[number], **how)


def rewrite_index(place, **metadata):
    index = json.loads((place / INDEX).read_text())
    index["metadata"].update(metadata)
    (place / INDEX).write_text(json.dumps(index))


def lose_index(place):
    (place / INDEX).unlink()


def lose_file(place):
    next(place.glob("*.safetensors")).unlink()


def cut_file(place):
    file = next(place.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])


def lose_checksum(place):
    file = next(place.glob("*.safetensors"))
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"].popitem()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def lose_entry(place):
    index = json.loads((place / INDEX).read_text())
    index["weight_map"].popitem()
    (place / INDEX).write_text(json.dumps(index))


BROKEN = [
    (lose_index, "version 7 needs version 6, which is missing or incomplete"),
    (lose_file, "no such file"),
    (cut_file, "truncated|beyond|size"),
    (lose_checksum, "has no checksum"),
    (lose_entry, "the index names other tensors"),
    (lambda place: rewrite_index(place, version="000009"), "the index is that of another version"),
    (lambda place: rewrite_index(place, base_version="000006"), "malformed base_version"),
    (
        lambda place: rewrite_index(place, base_version="000002"),
        "is not what was published|needs|follows another",
    ),
    (lambda place: rewrite_index(place, delta_encoding="add"), "unknown delta_encoding"),
    (lambda place: rewrite_index(place, compression_format="lz4"), "unknown compression_format"),
    (lambda place: rewrite_index(place, checksum_format="md5"), "unknown checksum_format"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_damaged_version_is_refused(published, tmp_path, damage, message):
    source, seen = published
    folder = tmp_path / "all"
    shutil.copytree(source, folder)
    osl.pull(folder, tmp_path / "own", version=5)
    damage(spoiled(folder, 6, seen))
    for into in (None, tmp_path / "own", tmp_path / "new"):
        with pytest.raises(osl.SafetensorsLayoutError, match=message):
            osl.pull(folder, into, version=7)
    assert read_version(tmp_path, 0, tmp_path / "own") == seen[5]
    assert not (tmp_path / "new").exists()
    assert as_bytes(osl.pull(folder, version=5).tree) == seen[5]


def other_length(name, blob):
    return zstandard.ZstdCompressor().compress(b"\0" * 3)


def too_long(name, blob):
    return zstandard.ZstdCompressor().compress(b"\0" * (1 << 24))


SPOILED = [
    (lambda name, blob: blob[:-1], "one zstd frame"),
    (lambda name, blob: blob + b"more", "one zstd frame"),
    (lambda name, blob: b"\0" * len(blob), "one zstd frame"),
    (other_length, "malformed difference"),
    (too_long, "malformed difference"),
]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_spoiled_differences_are_refused(published, tmp_path, spoil, message, encoding):
    source, seen = published
    shutil.copytree(source, tmp_path / "all")
    spoiled(tmp_path / "all", 6, seen, spoil=spoil, encoding=encoding)
    with pytest.raises(osl.FormatError, match=message) as caught:
        osl.pull(tmp_path / "all", version=6)
    assert caught.value.tensor is not None
    assert caught.value.file is not None


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_difference_larger_than_any_of_its_tensor_is_not_read(
    published, tmp_path, monkeypatch, encoding
):
    source, seen = published
    place = shutil.copytree(source, tmp_path / "all")
    much = 4 << 20
    spoiled(place, 6, seen, spoil=lambda name, blob: blob + bytes(much), encoding=encoding)
    with hub_in_use(monkeypatch, tmp_path) as hub:
        hub.add("org/all", place)
        with pytest.raises(osl.FormatError, match="the difference is too large") as caught:
            osl.pull("hf://org/all", version=6)
        assert sum(stop - start for _, start, stop in hub.cdn.ranges()) < much
    error = caught.value
    assert error.file == "hf://org/all/weight_v000006/model-00000-of-00001.safetensors"
    assert error.tensor in seen[6]
    size = len(seen[6][error.tensor])
    most = int(error.expected.removeprefix("at most ").removesuffix(" bytes"))
    assert size < most < 6 * size + 2_000
    assert int(error.found.removesuffix(" bytes")) > much


def test_a_version_of_another_model_is_refused(published, tmp_path):
    source, seen = published
    shutil.copytree(source, tmp_path / "all")
    shutil.rmtree(tmp_path / "all/weight_v000006")
    other = {name: bytes(len(data)) for name, data in seen[5].items()}
    write_version(tmp_path / "all", 6, other, seen[6])
    with pytest.raises(osl.FormatError, match="is not what was published as version 6"):
        osl.pull(tmp_path / "all", version=6)


def test_a_base_that_is_not_of_whole_tensors_is_refused(tmp_path):
    """Before a version appears that nobody could pull."""
    tree = {"a": np.ones((4, 4), np.float32)}
    osl.save(tmp_path / "base", tree, options=osl.WriteOptions(layout="sharded"))
    with pytest.raises(osl.FormatError, match="differences apply to whole tensors"):
        osl.publish(tmp_path / "all", {"a": tree["a"] * 2}, base=tmp_path / "base")
    assert not list(tmp_path.glob("all/weight_*"))


@pytest.mark.parametrize("into", ["folder", "tree"])
def test_what_was_pulled_of_a_model_that_was_replaced_is_pulled_anew(tmp_path, into):
    """Even where the version changes no tensor in which the two models differ."""

    def pull(version, held):
        target = held if into == "tree" else tmp_path / "own"
        pulled = osl.pull(folder, target, version=version, base=base)
        return pulled if into == "tree" else osl.load(tmp_path / "own")

    def values(pulled):
        tree = pulled.tree if into == "tree" else pulled
        return {name: np.asarray(value).tolist() for name, value in tree.items()}

    folder, base = tmp_path / "versions", tmp_path / "base"
    tree = {"head": np.zeros(4, np.float32), "layer": np.zeros(4, np.float32)}
    osl.save(base, tree)
    first = pull(0, None)
    tree["head"] = np.ones(4, np.float32)
    osl.save(base, tree, overwrite=True)
    assert values(pull(0, first)) == {"head": [1] * 4, "layer": [0] * 4}
    tree["layer"] = np.ones(4, np.float32)
    osl.publish(folder, tree, base=base)
    assert values(pull(1, first)) == {"head": [1] * 4, "layer": [1] * 4}


def test_a_folder_that_was_changed_is_pulled_anew(published, tmp_path):
    folder, seen = published
    osl.pull(folder, tmp_path / "own", version=6)
    file = tmp_path / "own/model.safetensors"
    data = bytearray(file.read_bytes())
    for at in range(len(data) - 4000, len(data), 7):
        data[at] ^= 1
    file.write_bytes(data)
    osl.pull(folder, tmp_path / "own", version=8)
    assert read_version(tmp_path, 0, tmp_path / "own") == seen[8]


def test_a_checkpoint_that_was_not_pulled_stays(published, tmp_path):
    folder, _ = published
    safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(osl.CheckpointExistsError, match="was not pulled"):
        osl.pull(folder, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_nobody_takes_differences_for_tensors(published, tmp_path, capsys):
    folder, _ = published
    place = folder / "weight_v000002"
    for call in (osl.load, osl.metadata, osl.plan_load, osl.dequantized):
        with pytest.raises(osl.FormatError, match="differences of a published version"):
            call(place)
    with pytest.raises(osl.FormatError, match="differences of a published version"):
        osl.convert(place, tmp_path / "new")
    assert not osl.verify(place).ok
    assert main(["inspect", str(place)]) != 0
    assert "differences of a published version" in capsys.readouterr().err


def test_no_version_and_none_of_that_number(tmp_path):
    with pytest.raises(osl.CheckpointNotFoundError, match="no version was published yet"):
        osl.pull(tmp_path)
    osl.publish(tmp_path, model())
    with pytest.raises(osl.CheckpointNotFoundError, match="there is no complete version 7"):
        osl.pull(tmp_path, version=7)


@pytest.mark.parametrize("version", ["2", 2.0, True, -1])
def test_what_is_no_number_of_a_version(published, version):
    with pytest.raises(ValueError, match=f"version must be None or the number .* not {version!r}"):
        osl.pull(published[0], version=version)


def test_differences_without_their_model(tmp_path):
    source = save(tmp_path / "model", {n: np.asarray(v) for n, v in model().items()})
    osl.publish(tmp_path / "all", changed(model(), 1), base=source)
    with pytest.raises(osl.CheckpointNotFoundError, match="Give base="):
        osl.pull(tmp_path / "all")


def test_a_tree_of_other_tensors(tmp_path):
    osl.publish(tmp_path, model())
    tree = model()
    value = tree.pop("layer.0.weight")
    with pytest.raises(osl.MismatchError, match=r"other tensors.*layer\.0\.weight.*whole_every=1"):
        osl.publish(tmp_path, tree)
    with pytest.raises(osl.MismatchError, match="another one than in the version before"):
        osl.publish(tmp_path, tree | {"layer.0.weight": value.astype(jnp.float16)})
    assert not (tmp_path / "weight_v000002").exists()
    assert osl.publish(tmp_path, tree, whole_every=1) == 2
    assert as_bytes(osl.pull(tmp_path).tree) == as_bytes(tree)


@pytest.mark.parametrize(
    "arguments",
    [
        {"whole_every": 0},
        {"options": osl.WriteOptions(layout="sharded")},
        {"options": osl.WriteOptions(dtype="float32")},
    ],
)
def test_arguments_that_have_no_meaning(tmp_path, arguments):
    with pytest.raises(ValueError, match="whole"):
        osl.publish(tmp_path, model(), **arguments)
    assert not any(tmp_path.iterdir())


# Several processes.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "is_mapped"), every(4, [(2, True), (2, False), (4, False), (4, True)])
)
def test_processes_publish_and_pull_together(tmp_path, path, tensors, processes, is_mapped):  # noqa: F811
    results = run_processes(
        "publish_versions.py",
        processes=processes,
        devices=4 // processes,
        source=str(path),
        target=str(tmp_path / "all"),
        is_mapped=is_mapped,
    )
    assert all(result["same"] for result in results)
    for number, expected in results[0]["checksums"].items():
        values = read_version(tmp_path / "all", int(number), Path(path))
        assert {name: zlib.crc32(data) for name, data in values.items()} == expected
    files = sorted(file.name for file in (tmp_path / "all/weight_v000002").glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{processes:05}.safetensors" for n in range(1, processes + 1)]


def test_one_process_that_fails_fails_all(tmp_path, path):  # noqa: F811
    results = run_processes(
        "publish_fails.py", processes=2, devices=2, source=str(path), target=str(tmp_path / "all")
    )
    assert "OSError: the disk is gone" in results[1][0]
    assert "PeerError: process 1 failed while comparing tensors" in results[0][0]
    assert all(seconds < 60 for _, seconds in results)
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == ["weight_v000001"]


def test_what_is_odd_on_one_process_is_an_error_on_all_or_pulled_anew(tmp_path):
    """No process waits for one that has failed, or holds another version than it."""
    results = run_processes("pull_fails.py", processes=2, devices=2, target=str(tmp_path / "all"))
    assert all(seconds < 20 for result in results for _, seconds in result.values())
    for process, result in enumerate(results):
        odd = ("differs", "held by 0", "held by 1", "pulled")
        assert [result.pop(name)[0] for name in odd] == [2] * 4
        message, _ = result.pop("shared")
        assert "process 1 has no part of an array" in message
        assert "whole_every=1" in message
        for name, (message, _) in result.items():
            if process == 0 and message == 2:  # a load that exchanges nothing
                assert "apply_difference" in name
                continue
            assert "OSError: the disk is gone" in message
            assert ("PeerError: process 1 failed" in message) == (process == 0)
