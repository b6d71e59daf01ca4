"""Reports and side files beyond their limits."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
from format_helpers import file_bytes

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import manifest

DIGESTS = "orbax_safetensors_layout.digests.json"


def write(path: pathlib.Path, text: str) -> None:
    path.write_bytes(file_bytes(text))


def test_verify_lists_the_first_findings_of_a_kind(tmp_path):
    malformed = ",".join(f'"{n}":[]' for n in range(12_000))
    write(tmp_path / "model.safetensors", f"{{{malformed}}}")
    report = osl.verify(tmp_path)
    assert [finding.kind for finding in report.findings] == ["header"] * 10_001
    assert report.findings[-1].text == "2,000 more are not listed"


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
