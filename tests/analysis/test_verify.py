"""`verify`: every kind of damage is found, all of it, and nothing else is."""

import contextlib
import json
import os
import re
import shutil
import struct
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from checkpoints import llama_like, save
from command_line import run
from http_server import Server, files_of, serve_range
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, place
from orbax_calls import save_pytree
from programs import run_processes
from sampling import every

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.adapters import OrbaxReader
from orbax_safetensors_layout.analysis.verification import StructureCheck
from orbax_safetensors_layout.conversion import chunk_bytes
from orbax_safetensors_layout.format import dump_digests, join_crc32, parse_digests
from orbax_safetensors_layout.geometry import chunk_parts
from orbax_safetensors_layout.storage import LocalStorage

DIGESTS = "orbax_safetensors_layout.digests.json"
MANIFEST = "orbax_safetensors_layout.json"


def tensors():
    rng = np.random.default_rng(3)
    arrays = {f"layers.{n}.w": rng.standard_normal((24, 8)).astype(np.float32) for n in range(6)}
    return arrays | {
        "small": np.arange(5, dtype=np.int8),
        "half": rng.standard_normal(300).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.float64(2.5),
    }


def saved(folder, **options):
    osl.save(folder, tensors(), options=osl.WriteOptions(**{"max_file_bytes": 2000, **options}))
    return folder


def texts(report, kind=None):
    return [f.text for f in report.findings if f.is_error and kind in (None, f.kind)]


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("digests", [False, True])
def test_what_is_saved_is_whole(tmp_path, layout, digests):
    report = osl.verify(saved(tmp_path, layout=layout, digests=digests))
    assert report.ok
    assert not report.findings
    assert report.tensors == len(tensors())
    assert bool(report.digested_files) == digests


def test_published_folders_are_whole(tmp_path):
    folder = save(tmp_path / "ckpt", llama_like(), files=3)
    report = osl.verify(folder)
    assert report.ok
    assert report.files == 3
    assert osl.verify(folder / "model-00001-of-00003.safetensors").ok


def test_all_findings_are_told_together(tmp_path):
    folder = saved(tmp_path)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 3
    cut = folder / files[0]
    cut.write_bytes(cut.read_bytes()[:-3])
    extra = safetensors.numpy.load_file(folder / files[1]) | {"stray": np.zeros(2)}
    safetensors.numpy.save_file(extra, folder / files[1])
    lost = next(name for name, file in index["weight_map"].items() if file == files[2])
    left = safetensors.numpy.load_file(folder / files[2])
    del left[lost]
    safetensors.numpy.save_file(left, folder / files[2])
    (folder / "consolidated.safetensors").write_bytes((folder / files[1]).read_bytes())
    report = osl.verify(folder)
    assert not report.ok
    assert [f for f in texts(report, "header") if "truncated" in f and files[0] in f]
    assert [f for f in texts(report, "index") if "'stray'" in f and "no file" in f]
    assert [f for f in texts(report, "index") if f"'{lost}'" in f and "it is not" in f]
    notes = [f.text for f in report.findings if not f.is_error]
    assert notes == ["consolidated.safetensors is not a file of this checkpoint and is ignored"]
    assert "finding" in str(report)


def test_total_size_and_missing_files(tmp_path):
    folder = saved(tmp_path)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["metadata"]["total_size"] += 1
    index_file.write_text(json.dumps(index))
    (finding,) = texts(osl.verify(folder))
    assert "total_size" in finding
    (folder / sorted(set(index["weight_map"].values()))[0]).unlink()
    (finding,) = [t for t in texts(osl.verify(folder)) if "missing" in t]
    assert "lists files that are missing" in finding


def test_every_fault_of_a_header_is_told(tmp_path):
    def entry(begin, end, shape, dtype="F32"):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    header = {
        "a": entry(0, 8, [2]),
        "overlapping": entry(4, 12, [2]),
        "too long": entry(12, 20, [1]),
        "unknown": entry(20, 24, [4], "Q8"),
        "negative": entry(24, 28, [-1]),
        "no list": entry(28, 32, 1),
        "b": entry(32, 40, [2]),
    }
    text = json.dumps(header)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(40))
    findings = texts(osl.verify(tmp_path), "header")
    assert len(findings) == 5
    for name, problem in {
        "overlapping": "overlaps the one before it",
        "too long": "do not fit the shape",
        "unknown": "Q8",
        "negative": "malformed shape",
        "no list": "malformed shape",
    }.items():
        assert [t for t in findings if f"'{name}'" in t and problem in t], (name, findings)
    with pytest.raises(osl.FormatError):
        osl.load(tmp_path)
    # A gap is told where no tensor that is left out may have filled it.
    text = json.dumps({"a": entry(0, 8, [2]), "b": entry(12, 20, [2]), "c": entry(24, 28, [1])})
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(40))
    gaps = texts(osl.verify(tmp_path), "header")
    assert ["'b'" in gaps[0], "'c'" in gaps[1], "goes on after" in gaps[2]] == [True] * 3


def test_missing_files_hide_nothing_else(tmp_path):
    folder = saved(tmp_path / "hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    (folder / first).unlink()
    held = safetensors.numpy.load_file(folder / second) | {"stray": np.zeros(2)}
    safetensors.numpy.save_file(held, folder / second)
    findings = texts(osl.verify(folder), "index")
    assert [t for t in findings if first in t and "missing" in t]
    assert [t for t in findings if "'stray'" in t and "no file" in t]
    assert len(findings) == 2
    saved(tmp_path / "pieces", layout="sharded")
    manifest = json.loads((tmp_path / "pieces" / MANIFEST).read_text())
    manifest["pieces"]["files"].append("shard-00002-of-00002.safetensors")
    (tmp_path / "pieces" / MANIFEST).write_text(json.dumps(manifest))
    (finding,) = texts(osl.verify(tmp_path / "pieces"))
    assert "shard-00002-of-00002.safetensors" in finding


def test_a_tensor_in_two_files(tmp_path):
    safetensors.numpy.save_file({"a": np.zeros(2), "b": np.zeros(1)}, tmp_path / "x.safetensors")
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "y.safetensors")
    (finding,) = texts(osl.verify(tmp_path))
    assert finding == "'a' is in both x.safetensors and y.safetensors"


def test_the_manifest_is_held_against_the_files(tmp_path):
    folder = saved(tmp_path, max_file_bytes=10**6)
    file = folder / "model.safetensors"
    held = safetensors.numpy.load_file(file)
    held["new"] = held.pop("small")
    safetensors.numpy.save_file(held, file)
    assert sorted(texts(osl.verify(folder), "manifest")) == [
        "a file holds 'new', which the manifest does not name",
        "the manifest names 'small', which no file holds",
    ]
    (folder / MANIFEST).write_text("{")
    assert "not valid JSON" in "".join(texts(osl.verify(folder), "manifest"))


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_a_flipped_bit_is_found_by_its_checksum(tmp_path, layout):
    folder = saved(tmp_path, layout=layout, digests=True)
    said = json.loads((folder / DIGESTS).read_text())["files"]
    here = {file.name for file in folder.iterdir()} - {DIGESTS}
    assert set(said) == here
    for name in here:
        assert said[name] == f"{zlib.crc32((folder / name).read_bytes()):08x}"
    victim = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 4
    victim.write_bytes(data)
    (finding,) = texts(osl.verify(folder))
    assert finding.startswith(f"{victim.name} has CRC-32 ")
    assert osl.verify(folder, digests=False).ok
    victim.rename(folder / "elsewhere")
    assert [t for t in texts(osl.verify(folder)) if "is missing; it has a checksum" in t]


@pytest.mark.parametrize(
    ("absent", "layout"), every(3, [(404, "hf"), (404, "sharded"), (403, "hf"), (403, "sharded")])
)
def test_checksums_on_a_server_that_lists_no_files_count(tmp_path, layout, absent):
    """They are asked for by name; some servers deny what is not there."""
    folder = saved(tmp_path / "saved", layout=layout, digests=True)
    answer, verifying = files_of(folder), osl.ReadOptions(verify=True)

    def answer_or_deny(request):
        reply = answer(request)
        return reply._replace(status=absent) if reply.status == 404 else reply

    with Server(answer_or_deny) as server:
        url = f"{server.url}/files"
        assert osl.verify(url).digested_files == osl.verify(folder).digested_files
        assert osl.load(url, options=verifying).keys() == tensors().keys()
        cached = osl.ReadOptions(verify=True, cache=tmp_path / "cache")
        assert osl.load(url, options=cached).keys() == tensors().keys()
        victim = sorted(folder.glob("*.safetensors"))[-1]
        whole = victim.read_bytes()
        victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
        (finding,) = texts(osl.verify(url))
        assert finding.startswith(f"{victim.name} has CRC-32 ")
        for use in (
            lambda: osl.load(url, options=verifying),
            lambda: osl.convert(url, tmp_path / "to", format="hf"),
        ):
            with pytest.raises(osl.FormatError, match="are not what was saved"):
                use()
        (folder / DIGESTS).unlink()
        assert osl.verify(url).ok
        osl.convert(url, tmp_path / "to", format="hf")


def test_wrong_bytes_that_a_cache_keeps_are_fetched_anew_once_found(tmp_path):
    """A server sends wrong bytes once, and whoever does not verify keeps them."""
    folder = saved(tmp_path / "saved", digests=True)
    victim = sorted(folder.glob("*.safetensors"))[-1]
    whole, status = victim.read_bytes(), victim.stat()
    with Server(files_of(folder)) as server:
        url, cache = f"{server.url}/files", tmp_path / "cache"
        victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
        os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))  # which is its ETag
        osl.load(url, options=osl.ReadOptions(cache=cache))
        victim.write_bytes(whole)
        os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
        verifying = osl.ReadOptions(verify=True, cache=cache)
        with pytest.raises(osl.FormatError, match=r"What the cache held .* load once more"):
            osl.load(url, options=verifying)
        assert osl.load(url, options=verifying).keys() == tensors().keys()


def test_a_server_that_answers_for_all_names_has_no_checksums(tmp_path, caplog):
    folder = tmp_path / "saved"
    osl.save(folder, tensors())
    answer = files_of(folder)

    def answer_or_welcome(request):
        reply = answer(request)
        welcome = serve_range(request, b"<html>welcome</html>", {})
        return welcome if reply.status == 404 else reply

    with Server(answer_or_welcome) as server, caplog.at_level("WARNING"):
        url = f"{server.url}/files/model.safetensors"
        osl.convert(url, tmp_path / "to", format="hf")
    assert "does not list checksums" in caplog.text
    assert osl.load(tmp_path / "to").keys() == osl.load(folder).keys()


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_no_flipped_bit_is_loaded_with_verify(tmp_path, layout):
    """In any file that the save wrote: tensors, headers, index, manifest, checksums."""
    folder = saved(tmp_path, layout=layout, digests=True)
    verifying = osl.ReadOptions(verify=True)
    loaded = osl.load(folder, options=verifying)
    assert {n: np.asarray(v).tobytes() for n, v in loaded.items()} == {
        n: np.asarray(v).tobytes() for n, v in tensors().items()
    }
    rng = np.random.default_rng(7)
    files = sorted(folder.iterdir())
    silent, unnoticed_without = [], 0
    for number in range(100):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        at, bit = int(rng.integers(len(data))), int(rng.integers(8))
        data[at] ^= 1 << bit
        file.write_bytes(data)
        with contextlib.suppress(osl.SafetensorsLayoutError):
            osl.load(folder)
            unnoticed_without += 1
        with contextlib.suppress(osl.SafetensorsLayoutError):
            osl.load(folder, options=verifying)
            silent.append((file.name, at, bit))
        data[at] ^= 1 << bit
        file.write_bytes(data)
    assert silent == []
    assert unnoticed_without > 20
    osl.load(folder, options=verifying)


def test_a_load_of_parts_with_verify_looks_at_the_rest_of_their_files(tmp_path):
    folder = saved(tmp_path, digests=True, max_file_bytes=10**6)
    verifying = osl.ReadOptions(verify=True, mmap=True)
    expected = {"small": np.zeros(5, np.int8)}
    np.testing.assert_array_equal(
        osl.load(folder, expected, options=verifying)["small"], np.arange(5)
    )
    loaded = osl.load(folder, only="layers.*", options=verifying)
    np.testing.assert_array_equal(loaded["layers.3.w"], tensors()["layers.3.w"])
    single = folder / "model.safetensors"
    assert osl.load(single, options=verifying).keys() == tensors().keys()
    (header,) = struct.unpack("<Q", single.read_bytes()[:8])
    data = bytearray(single.read_bytes())
    data[8 + header + 10] ^= 1  # not of the tensor that is loaded
    single.write_bytes(data)
    for path, tree in ((folder, expected), (single, None)):
        with pytest.raises(
            osl.FormatError, match=r"not what was saved: model.safetensors \(CRC-32"
        ):
            osl.load(path, tree, options=verifying)


def test_an_item_without_the_manifest_that_it_was_saved_with(tmp_path):
    registry = osl.handler_registry("default")
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones(3), "step": 7}))
    assert osl.verify(tmp_path / "1" / "default").ok
    (tmp_path / "1" / "default" / MANIFEST).unlink()
    for path in (tmp_path / "1", tmp_path / "1" / "default"):
        (text,) = texts(osl.verify(path), "manifest")
        assert text == f"{MANIFEST} is missing, which _METADATA names"


def test_a_load_with_verify_through_what_lies_between(tmp_path):
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "abcdefg"}
    osl.save(tmp_path, values, options=osl.WriteOptions(digests=True))
    options = osl.ReadOptions(verify=True)
    loaded = osl.load(tmp_path, only=["b", "d", "f"], options=options)
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, values[name])


def test_verify_without_checksums_is_refused(tmp_path):
    with pytest.raises(osl.SafetensorsLayoutError, match=r"no checksums.*digests=True"):
        osl.load(saved(tmp_path), options=osl.ReadOptions(verify=True))
    saved(tmp_path / "sums", digests=True)
    digests = json.loads((tmp_path / "sums" / DIGESTS).read_text())
    del digests["files"]["model-00002-of-00004.safetensors"]
    (tmp_path / "sums" / DIGESTS).write_text(json.dumps(digests))
    with pytest.raises(osl.SafetensorsLayoutError, match="no checksum: model-00002-of"):
        osl.load(tmp_path / "sums", options=osl.ReadOptions(verify=True))


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path, monkeypatch):
    folder = saved(tmp_path, digests=True)
    bad, flipped = sorted(folder.glob("*.safetensors"))[:2]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 4
    flipped.write_bytes(data)
    real, broken = LocalStorage.read_into, [False]

    def read_into(self, file, offset, buffers, **keywords):
        if file == str(bad) and broken[0]:
            raise osl.StorageError("reading failed", file=file, found="Input/output error")
        real(self, file, offset, buffers, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read_into", read_into)
        check = StructureCheck.check

        def then_breaks(self):
            check(self)
            broken[0] = True

        patch.setattr(StructureCheck, "check", then_breaks)
        findings = texts(osl.verify(folder), "digest")
    assert "Input/output error" in findings[0]
    assert findings[1].startswith(f"{flipped.name} has CRC-32 ")


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_bytes_that_are_no_truth_values_are_found(tmp_path, layout):
    tree = {"a": np.zeros(3), "flags": np.array([True, False]), "more": np.ones(2, bool)}
    osl.save(tmp_path, tree, options=osl.WriteOptions(layout=layout))
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"\1\0\1\1", b"\2\0\1\3"))
    first, second = texts(osl.verify(tmp_path), "value")
    assert re.search(rf"{file.name}.*'flags.*0 or 1, found: 2", first)
    assert re.search(rf"{file.name}.*'more.*0 or 1, found: 3", second)
    if layout == "sharded":
        with pytest.raises(osl.FormatError, match=r"'flags'.*found: 2"):
            osl.consolidate(tmp_path)


def test_an_overwrite_replaces_the_checksums(tmp_path):
    saved(tmp_path, digests=True)
    osl.save(tmp_path, {"a": np.zeros(2)}, overwrite=True)
    assert not (tmp_path / DIGESTS).exists()
    assert osl.verify(tmp_path).ok


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_several_processes_leave_the_same_checksums(tmp_path, layout):
    for processes in (1, 4):
        folder = tmp_path / str(processes)
        run_processes(
            "verify_save.py",
            processes=processes,
            devices=4 // processes,
            folder=str(folder),
            layout=layout,
        )
        report = osl.verify(folder)
        assert report.ok, str(report)
        assert report.digested_files == len(list(folder.iterdir())) - 1
    report = osl.verify(tmp_path / "1", tmp_path / "4")
    assert report.ok
    assert report.compared_tensors == 5
    if layout == "hf":
        alone, many = tmp_path / "1", tmp_path / "4"
        differ = [
            file.name
            for file in alone.iterdir()
            if file.suffix == ".safetensors"
            and file.read_bytes() != (many / file.name).read_bytes()
        ]
        assert not differ


def test_files_of_two_saves_are_not_mixed(tmp_path):
    for name in ("a", "b"):
        saved(tmp_path / name, layout="sharded")
    file = "shard-00001-of-00001.safetensors"
    shutil.copy(tmp_path / "a" / file, tmp_path / "b" / file)
    (finding,) = texts(osl.verify(tmp_path / "b"))
    assert "belongs to another save than its manifest" in finding
    with pytest.raises(osl.InvalidManifestError, match="belongs to another save than its manifest"):
        osl.load(tmp_path / "b")
    with pytest.raises(osl.InvalidManifestError, match="Files of two saves may be mixed"):
        osl.consolidate(tmp_path / "b")
    # A checkpoint that was saved before there were ids has none to look at.
    manifest = tmp_path / "b" / MANIFEST
    lines = manifest.read_text().splitlines()
    document = json.loads("\n".join(lines))
    del document["pieces"]["save"]
    manifest.write_text(json.dumps(document))
    assert osl.verify(tmp_path / "b").ok
    osl.load(tmp_path / "b")


def test_pieces_that_are_missing_or_wrong(tmp_path):
    folder = saved(tmp_path, layout="sharded")
    file = folder / "shard-00001-of-00001.safetensors"
    with safetensors.safe_open(file, "np") as opened:
        metadata = opened.metadata()
    held = safetensors.numpy.load_file(file)
    del held["small"]
    held["half"] = held["half"].astype(np.float32)
    held["extra"] = np.zeros(1)
    safetensors.numpy.save_file(held, file, metadata=metadata)
    findings = texts(osl.verify(folder), "pieces")
    assert len(findings) == 3
    assert any("nothing as 'small'; the manifest says I8 [5]" in text for text in findings)
    assert any("F32 [300] as 'half'; the manifest says BF16 [300]" in text for text in findings)
    assert any("holds 'extra'" in text for text in findings)


def test_checkpoints_are_compared_however_their_files_are_cut(tmp_path):
    saved(tmp_path / "a", max_file_bytes=500)
    saved(tmp_path / "b", max_file_bytes=10**6)
    saved(tmp_path / "c", layout="sharded")
    for other in ("b", "c"):
        for budget in (2**31, 64):
            options = osl.ReadOptions(memory_budget_bytes=budget)
            report = osl.verify(tmp_path / "a", tmp_path / other, options=options)
            assert report.ok, str(report)
            assert report.compared_tensors == len(tensors())
            assert report.compared_bytes == sum(np.asarray(t).nbytes for t in tensors().values())


@pytest.mark.parametrize("budget", [2**31, 64])
def test_every_difference_is_told(tmp_path, budget):
    saved(tmp_path / "a")
    other = tensors()
    other["layers.3.w"][7, 2] += 1
    other["layers.3.w"][23, 7] += 1
    other["small"] = other["small"].astype(np.int16)
    other["more"] = other.pop("scalar")
    other["half"][299] = np.nan
    osl.save(tmp_path / "b", other)
    options = osl.ReadOptions(memory_budget_bytes=budget)
    findings = texts(osl.verify(tmp_path / "a", tmp_path / "b", options=options), "value")
    assert len(findings) == 5
    assert "'more' is in the other checkpoint alone" in findings
    assert "'scalar' is not in the other checkpoint" in findings
    assert "'small' is int8 [5], in the other int16 [5]" in findings
    (place,) = [text for text in findings if text.startswith("'layers.3.w' differs")]
    assert "the first at [7, 2]" in place
    (place,) = [text for text in findings if text.startswith("'half' differs: 1 elements")]
    assert "the first at [299]" in place


def test_not_a_number_equals_itself_bit_by_bit(tmp_path):
    values = np.array([np.nan, -0.0, np.inf], np.float32)
    osl.save(tmp_path / "a", {"w": values})
    osl.save(tmp_path / "b", {"w": values})
    osl.save(tmp_path / "c", {"w": np.array([np.nan, 0.0, np.inf], np.float32)})
    assert osl.verify(tmp_path / "a", tmp_path / "b").ok
    assert not osl.verify(tmp_path / "a", tmp_path / "c").ok


def test_values_beside_the_tensors_are_compared(tmp_path):
    osl.save(tmp_path / "a", {"w": np.zeros(2), "step": 3})
    osl.save(tmp_path / "b", {"w": np.zeros(2), "step": 4})
    (finding,) = texts(osl.verify(tmp_path / "a", tmp_path / "b"))
    assert finding == "the value 'step' is 3, in the other 4"


MAPPING = osl.Mapping(
    [
        osl.rule(
            "stacked",
            osl.stack(osl.tensor("layers.{i}.w").rearrange("(h d) e -> e h d", d=4), over="i"),
        ),
        osl.rule("bias", osl.tensor("half").cast("float32").scale(2.0)),
    ],
    ignore=["small", "none", "scalar"],
)


def test_comparison_through_a_mapping(tmp_path):
    saved(tmp_path / "source")
    mapped = osl.load(tmp_path / "source", mapping=MAPPING)
    osl.save(tmp_path / "model", mapped)
    for budget in (2**31, 1000):
        options = osl.ReadOptions(memory_budget_bytes=budget)
        report = osl.verify(
            tmp_path / "model", tmp_path / "source", mapping=MAPPING, options=options
        )
        assert report.ok, str(report)
        assert report.compared_tensors == 2
    wrong = {name: np.array(value) for name, value in mapped.items()}
    wrong["stacked"][4, 1, 2, 3] += 1
    osl.save(tmp_path / "wrong", wrong)
    (finding,) = texts(osl.verify(tmp_path / "wrong", tmp_path / "source", mapping=MAPPING))
    assert "'stacked' differs: 1 elements, the first at [4, 1, 2, 3]" in finding


def test_packed_elements_are_compared(tmp_path):
    values = np.arange(96, dtype=np.uint8).reshape(4, 24) % 16
    tree = {"w": values.astype(ml_dtypes.float4_e2m1fn)}
    osl.save(tmp_path / "a", tree)
    osl.save(tmp_path / "b", tree)
    for budget in (2**31, 40):
        options = osl.ReadOptions(memory_budget_bytes=budget)
        report = osl.verify(tmp_path / "a", tmp_path / "b", options=options)
        assert report.ok, str(report)


def test_the_command_line(tmp_path):
    saved(tmp_path / "a", digests=True)
    saved(tmp_path / "b")
    done = run("verify", tmp_path / "a", "--against", tmp_path / "b", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole" in done.stdout
    other = tensors()
    other["small"][0] = 9
    osl.save(tmp_path / "b", other, overwrite=True)
    done = run("verify", tmp_path / "a", "--against", tmp_path / "b", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert report["findings"][0]["kind"] == "value"
    assert "100%" in done.stderr
    assert run("verify", tmp_path / "nothing").returncode == 1
    assert run("verify", tmp_path / "a", "--mapping", "llama").returncode == 2


@given(st.lists(st.binary(max_size=40), max_size=8), st.randoms(use_true_random=False))
def test_checksums_of_ranges_join_to_that_of_the_whole(parts, random):
    ranges, at = [], 0
    for part in parts:
        if part:
            ranges.append((at, len(part), zlib.crc32(part)))
        at += len(part)
    random.shuffle(ranges)
    whole = b"".join(parts)
    assert join_crc32(ranges, len(whole)) == zlib.crc32(whole)
    if ranges:
        with pytest.raises(ValueError, match=r"tile|end at"):
            join_crc32(ranges[1:], len(whole))


def test_digests_are_read_as_they_are_written():
    digests = {"b": 1, "a": 2**32 - 1}
    assert parse_digests(dump_digests(digests), file="x") == digests
    for bad in (b"", b"[]", b"{", b'{"orbax_safetensors_layout_digests": 2}', b"\xff"):
        with pytest.raises(osl.InvalidManifestError):
            parse_digests(bad, file="x")
    bad = dump_digests(digests).replace(b"00000001", b"1")
    with pytest.raises(osl.InvalidManifestError, match="malformed digest"):
        parse_digests(bad, file="x")
    for name in ("\ud800", "a\0b", "../x", "/x", "", "a//b", "a\\b", "C:x"):
        bad = dump_digests({"name": 1}).replace(b'"name"', json.dumps(name).encode())
        with pytest.raises(osl.InvalidManifestError, match="leads outside of its folder"):
            parse_digests(bad, file="x")
    assert parse_digests(dump_digests({"a/ü.json": 1}), file="x") == {"a/ü.json": 1}


def orbax_tree():
    """Arrays of odd shapes and dtypes, and what stands beside them."""
    arrays = {name: value for name, value in tensors().items() if name != "none"}
    layers = {str(n): {"w": arrays.pop(f"layers.{n}.w")} for n in range(6)}
    arrays["scalar"] = np.asarray(arrays["scalar"])
    return {"params": {"layers": layers, **arrays}, "step": 7}


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_what_orbax_saved_is_compared(tmp_path, use_ocdbt, use_zarr3):
    tree = orbax_tree()
    theirs = save_pytree(tmp_path / "orbax", tree, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    osl.save(tmp_path / "ours", tree)
    saved(tmp_path / "plain")
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree["params"]))
    for budget in (2**31, 4000):
        options = osl.ReadOptions(memory_budget_bytes=budget)
        alone = osl.verify(theirs, options=options)
        assert alone.ok, str(alone)
        assert alone.tensors == 9
        for first, other in ((theirs, "ours"), (tmp_path / "ours", "orbax")):
            report = osl.verify(first, tmp_path / other, options=options)
            assert report.ok, str(report)
            assert (report.compared_tensors, report.compared_bytes) == (9, size)
    (finding,) = texts(osl.verify(theirs, tmp_path / "plain", subtree="params"))
    assert finding == "'none' is in the other checkpoint alone"


def test_differences_from_what_orbax_saved(tmp_path):
    tree = orbax_tree()
    theirs = save_pytree(tmp_path / "orbax", tree)
    tree["step"] = 8
    tree["params"]["layers"]["4"]["w"][3, 5] += 1
    tree["params"]["small"] = np.arange(6, dtype=np.int8)
    osl.save(tmp_path / "ours", tree)
    findings = texts(osl.verify(theirs, tmp_path / "ours"), "value")
    assert len(findings) == 3
    assert "the value 'step' is 7, in the other 8" in findings
    assert "'params.small' is int8 [5], in the other int8 [6]" in findings
    (place,) = [text for text in findings if text.startswith("'params.layers.4.w' differs")]
    assert "1 elements, the first at [3, 5]" in place


def test_chunks_of_both_may_differ(tmp_path):
    """They are read in boxes of the larger ones, so none is decoded many times."""
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    for name, mesh, shape in (("a", {"x": 8}, P("x")), ("b", {"x": 2, "y": 4}, P("y", "x"))):
        save_pytree(tmp_path / name, {"w": place(values, shape, mesh_of(**mesh))})
    for budget in (2**31, 16_000):
        options = osl.ReadOptions(memory_budget_bytes=budget)
        assert osl.verify(tmp_path / "a", tmp_path / "b", options=options).ok
    with pytest.raises(osl.SafetensorsLayoutError, match="quarter of the memory budget") as info:
        osl.verify(tmp_path / "a", options=osl.ReadOptions(memory_budget_bytes=1000))
    assert info.value.tensor == "w"


def test_arrays_of_orbax_that_cannot_be_read(tmp_path):
    """All are named, and the others are read nevertheless."""
    tree = {f"w{n}": np.full((16, 16), n + 1, np.float32) for n in range(4)}
    folder = save_pytree(tmp_path / "orbax", tree, use_ocdbt=False)
    (folder / "w1" / "0.0").unlink()
    (folder / "w3" / "0.0").write_bytes(b"no zstd")
    done = []
    report = osl.verify(folder, options=osl.ReadOptions(progress=done.append))
    findings = texts(report, "chunk")
    assert len(findings) == 2
    assert "'w1'" in findings[0]
    assert "'w3'" in findings[1]
    assert done[-1].done_bytes == done[-1].total_bytes == 4 * 16 * 16 * 4


def test_steps_and_models_of_orbax(tmp_path):
    """A training state of Orbax against the weights that it is made of."""
    saved(tmp_path / "source")
    model = dict(osl.load(tmp_path / "source", mapping=MAPPING))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"params": model, "step": np.int32(3)}))
    step = tmp_path / "run" / "3"
    assert osl.verify(step).tensors == 3
    report = osl.verify(step, tmp_path / "source", mapping=MAPPING, subtree="params")
    assert report.ok, str(report)
    assert report.compared_tensors == 2
    with pytest.raises(osl.MappingError, match="Exchange the two"):
        osl.verify(tmp_path / "source", step, mapping=MAPPING)
    with pytest.raises(osl.MissingTensorError, match="no such part"):
        osl.verify(step, tmp_path / "source", mapping=MAPPING, subtree="model")


def test_typed_keys_and_four_bits_of_orbax(tmp_path):
    values = (np.arange(96, dtype=np.int8).reshape(4, 24) % 16 - 8).astype(ml_dtypes.int4)
    tree = {"key": jax.random.key(5), "raw": jax.random.PRNGKey(6), "w": jnp.asarray(values)}
    save_pytree(tmp_path / "orbax", tree)
    osl.save(tmp_path / "ours", tree)
    report = osl.verify(tmp_path / "orbax", tmp_path / "ours")
    assert report.ok, str(report)
    assert report.compared_tensors == 3
    tree["key"] = jax.random.key(7)
    osl.save(tmp_path / "ours", tree, overwrite=True)
    (finding,) = texts(osl.verify(tmp_path / "ours", tmp_path / "orbax"))
    assert finding.startswith("'key' differs")


def test_damage_of_metadata_and_keys_hides_nothing_else(tmp_path):
    tree = {f"w{n}": np.full((4, 4), n + 1, np.float32) for n in range(3)}
    tree |= {"key": jax.random.key(1), "raw": jax.random.PRNGKey(2), "step": 5}
    folder = save_pytree(tmp_path / "orbax", tree, use_ocdbt=False, use_zarr3=False)
    (folder / "w0" / ".zarray").unlink()
    (folder / "w1" / "0.0").unlink()
    (folder / "raw" / "0").write_bytes(b"no zstd")
    report = osl.verify(folder)
    findings = texts(report, "array")
    assert len(findings) == 2
    assert all("cannot be opened" in text for text in findings)
    assert all(any(f"'{name}'" in text for text in findings) for name in ("raw", "w0"))
    (finding,) = texts(report, "chunk")
    assert "'w1'" in finding
    done = run("inspect", folder)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 3  # what is wrong, and a line for each array
    assert "'w0'" in done.stderr
    with pytest.raises(osl.StorageError, match="cannot be opened"):
        osl.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(osl.StorageError, match=r"(?s)2 arrays cannot be opened .*'raw'.*'w0'"):
        osl.verify(folder, folder)
    (folder / "_METADATA").write_text("{}")
    with pytest.raises(osl.SafetensorsLayoutError, match="Orbax"):
        osl.verify(folder)


def test_numbers_and_arrays_without_dimensions(tmp_path):
    """Orbax gives a numpy scalar back as a number; this package has a tensor of it."""
    tree = {"w": np.ones(3), "scalar": np.float32(2.5), "step": 3}
    theirs = save_pytree(tmp_path / "orbax", tree)
    osl.save(tmp_path / "ours", tree)
    for first, other in ((theirs, "ours"), (tmp_path / "ours", "orbax")):
        report = osl.verify(first, tmp_path / other)
        assert report.ok, str(report)
    tree["scalar"] = np.float32(1.5)
    tree["more"] = tree.pop("step")
    osl.save(tmp_path / "ours", tree, overwrite=True)
    assert sorted(texts(osl.verify(theirs, tmp_path / "ours"))) == [
        "the value 'more' is in the other checkpoint alone: 3",
        "the value 'scalar' is 2.5, in the other 1.5",
        "the value 'step' is 3, and not in the other checkpoint",
    ]
    (finding,) = texts(osl.verify(theirs, tmp_path / "ours", subtree="step"), "value")[-1:]
    assert finding == "the value 'step' is 3, and not in the other checkpoint"


@pytest.mark.parametrize("other", [3, 4])
def test_a_number_and_an_array_of_files_that_record_no_numbers(tmp_path, other):
    osl.save(tmp_path / "a", {"w": np.zeros(2), "step": 3})
    (tmp_path / "b").mkdir()
    theirs = {"w": np.zeros(2), "step": np.array(other)}
    safetensors.numpy.save_file(theirs, tmp_path / "b" / "model.safetensors")
    for first, second in (("a", "b"), ("b", "a")):
        report = osl.verify(tmp_path / first, tmp_path / second)
        assert report.ok == (other == 3), str(report)
        assert [text for text in texts(report) if "'step'" not in text] == []


def test_keys_of_another_generator_differ(tmp_path):
    data = jnp.arange(4, dtype=jnp.uint32)
    for impl in ("rbg", "unsafe_rbg"):
        osl.save(tmp_path / impl, {"key": jax.random.wrap_key_data(data, impl=impl)})
    report = osl.verify(tmp_path / "rbg", tmp_path / "unsafe_rbg", subtree="key")
    (finding,) = texts(report)
    assert "(rbg)" in finding
    assert "(unsafe_rbg)" in finding
    assert osl.verify(tmp_path / "rbg", tmp_path / "rbg", subtree="key").ok
    assert texts(osl.verify(tmp_path / "rbg", tmp_path / "unsafe_rbg")) == [finding]
    assert osl.verify(tmp_path / "rbg", tmp_path / "rbg").ok
    # Files alone do not say what is a key.
    osl.save(tmp_path / "plain", {"key": data})
    (difference,) = texts(osl.verify(tmp_path / "rbg", tmp_path / "plain"))
    assert "PRNG" in difference
    for path in (tmp_path / "plain").iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    assert osl.verify(tmp_path / "rbg", tmp_path / "plain").ok


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_bytes_that_are_no_narrow_integers(tmp_path, layout):
    values = np.arange(-8, 8).astype(ml_dtypes.int4)
    osl.save(tmp_path, {"w": values}, options=osl.WriteOptions(layout=layout))
    assert osl.verify(tmp_path).ok
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] = 0x64
    file.write_bytes(data)
    (finding,) = texts(osl.verify(tmp_path), "value")
    assert "not values of its dtype" in finding
    with pytest.raises(osl.FormatError, match="not values of its dtype"):
        osl.load(tmp_path)


def test_a_file_by_itself_is_held_against_its_checksum(tmp_path):
    saved(tmp_path, digests=True)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    report = osl.verify(files[0])
    assert report.ok
    assert report.digested_files == 1
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    assert len(texts(osl.verify(files[0]), "digest")) == 1
    assert osl.verify(files[1]).ok


def test_what_only_a_comparison_needs(tmp_path):
    saved(tmp_path / "a")
    for arguments in ({"mapping": MAPPING}, {"subtree": "layers"}):
        with pytest.raises(ValueError, match="give against="):
            osl.verify(tmp_path / "a", **arguments)
    theirs = save_pytree(tmp_path / "orbax", {"w": np.ones(3)})
    for words in (["--subtree", "layers"], ["--against", theirs, "--mapping", "llama:maxtext"]):
        assert run("verify", tmp_path / "a", *words).returncode == 2


@pytest.mark.parametrize("budget", [4 << 20, 16 << 20, 2 << 30])
def test_few_chunks_are_decoded_at_once(tmp_path, monkeypatch, budget):
    """Those of the other checkpoint, which a block may overlap many of, included."""
    values = np.arange(1 << 21, dtype=np.uint32).reshape(2048, 1024)
    mesh = mesh_of(x=8)
    save_pytree(tmp_path / "rows", {"w": place(values, P("x"), mesh)})
    save_pytree(tmp_path / "columns", {"w": place(values, P(None, "x"), mesh)})
    chunks = []

    def read(source, blocks):
        boxes = [(source.chunk(array), box) for array, box in blocks]
        counts = [len([*chunk_parts(box, chunk)]) for chunk, box in boxes]
        chunks.append(sum(counts) * chunk_bytes(source, blocks[0][0]))
        return original(source, blocks)

    original = OrbaxReader.read
    monkeypatch.setattr(OrbaxReader, "read", read)
    options = osl.ReadOptions(memory_budget_bytes=budget)
    assert osl.verify(tmp_path / "rows", tmp_path / "columns", options=options).ok
    assert max(chunks) <= min(budget // 4, values.nbytes)
    assert (len(chunks) == 2) == (budget == 2 << 30)


def test_a_prefix_of_all_names_suggests_a_subtree(tmp_path):
    tree = {"layers": {str(i): {"w": np.ones(2), "b": np.ones(1)} for i in range(8)}}
    osl.save(tmp_path / "plain", tree)
    osl.save(tmp_path / "params", {"params": {"params": tree}, "step": 1})
    report = osl.verify(tmp_path / "params", tmp_path / "plain")
    said = "names are the same but for 'params.params.': compare with"
    said += " subtree='params.params'"
    assert report.findings[-1].text == f"{said} (--subtree params.params)"
    assert not report.findings[-1].is_error
    assert len(str(report).splitlines()) == 7
    inner = osl.verify(tmp_path / "params", tmp_path / "plain", subtree="params")
    assert "subtree='params.params'" in inner.findings[-1].text
    swapped = osl.verify(tmp_path / "plain", tmp_path / "params")
    assert "exchange the two, and compare with subtree=" in swapped.findings[-1].text
    assert osl.verify(tmp_path / "params", tmp_path / "plain", subtree="params.params").ok
