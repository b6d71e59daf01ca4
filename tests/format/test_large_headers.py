"""Folders of hostile headers, and side files beyond their limits: refused in bounded memory."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors
from format_helpers import file_bytes
from programs import program_path

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import manifest

EMPTY = '"dtype":"U8","shape":[0],"data_offsets":[0,0]'
DIGESTS = "orbax_safetensors_layout.digests.json"


def entry(inside: str, size: int) -> str:
    """An entry with `size` characters of lists under a key that the format does not define."""
    return f'{{{EMPTY},"x":[{",".join([inside] * (size // (len(inside) + 1)))}]}}'


def write(path: pathlib.Path, text: str) -> None:
    path.write_bytes(file_bytes(text))


def header(inside: str, size: int, nbytes: int, *, first: str = "") -> str:
    value = entry(inside, size)
    count = nbytes // (len(value) + 12)
    return f"{{{first}{','.join(f'{chr(34)}{n}{chr(34)}:{value}' for n in range(count))}}}"


@pytest.mark.parametrize("inside", ["[]", "{}", '{"": 0}', "[[[[]]]]", "1", "-0", "1.5", '"é"'])
def test_entries_up_to_their_limit_are_read_and_longer_ones_refused(tmp_path, inside):
    path = tmp_path / "model.safetensors"
    write(path, header(inside, 8_000, 100_000))
    with safetensors.safe_open(path, "numpy") as opened, Catalog.open(path) as catalog:
        assert set(catalog.names) == set(opened.keys())
    write(path, header(inside, 9_000, 100_000))
    with pytest.raises(osl.InvalidHeaderError, match=r"more than 8192 characters"):
        Catalog.open(path)


@pytest.mark.parametrize("rank", [64, 400])
def test_the_longest_shape_is_read(tmp_path, rank):
    """No framework has arrays of more than 64 dimensions."""
    path = tmp_path / "model.safetensors"
    shape = [0, *[1] * (rank - 1)]
    fields = {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
    write(path, json.dumps({"a": fields}, indent=4))
    with safetensors.safe_open(path, "numpy") as opened, Catalog.open(path) as catalog:
        assert opened.get_slice("a").get_shape() == shape
        assert list(catalog.entries(["a"])["a"].shape) == shape


def test_the_keys_of_an_entry_in_any_order(tmp_path):
    """As writers have it that sort keys."""
    path = tmp_path / "model.safetensors"
    write(path, '{"a":{"data_offsets":[0,0],"dtype":"U8","shape":[0]}}')
    with Catalog.open(path) as catalog:
        assert catalog.entries(["a"])["a"].shape == (0,)


def test_verify_lists_the_first_findings_of_a_kind(tmp_path):
    malformed = ",".join(f'"{n}":[]' for n in range(12_000))
    write(tmp_path / "model.safetensors", f"{{{malformed}}}")
    report = osl.verify(tmp_path)
    assert [finding.kind for finding in report.findings] == ["header"] * 10_001
    assert report.findings[-1].text == "2,000 more are not listed"


def test_verify_of_several_hostile_files_tells_of_each(tmp_path):
    for number in range(4):
        write(tmp_path / f"{number}.safetensors", header("[]", 900_000, 2_000_000))
    report = osl.verify(tmp_path)
    assert len(report.findings) == 4
    assert all("more than 8192 characters" in finding.text for finding in report.findings)
    with pytest.raises(osl.InvalidHeaderError, match="more than 8192 characters"):
        Catalog.open(tmp_path)


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 1_000)
    tree = {"a": np.zeros(2), "text": "x" * 1_000}
    with pytest.raises(osl.InvalidManifestError, match=r"too large.*at most 1000 bytes"):
        osl.save(tmp_path / "new", tree)
    assert not (tmp_path / "new").exists()


def test_a_list_of_checksums_beyond_its_limit(tmp_path):
    osl.save(tmp_path / "a", {"a": np.zeros(2)}, options=osl.WriteOptions(digests=True))
    os.truncate(tmp_path / "a" / DIGESTS, 100_000_001)
    (finding,) = osl.verify(tmp_path / "a").findings
    assert finding.kind == "digest"
    assert "at most 100000000 bytes" in finding.text


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ["verify", "open"])
@pytest.mark.parametrize("size", [900_000, 8_000])
def test_thirty_headers_of_99_megabytes(tmp_path, action, size):
    """One character beyond Latin makes each of the text take four bytes in memory."""
    first = tmp_path / "0.safetensors"
    write(first, header("[[]]", size, 99_000_000, first='"😀":{%s},' % EMPTY))  # noqa: UP031
    for number in range(1, 30 if size > 8_192 else 4):
        os.link(first, tmp_path / f"{number}.safetensors")
    command = [sys.executable, program_path("large_headers.py"), action, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    result, peak = run.stdout.splitlines()
    print(action, size, peak, result)
    assert result == "False" or "more than 8192 characters" in result or "Duplicate" in result
    assert int(peak) * 1024 < 1_500_000_000
