"""Large models on clusters: with "auto" little more than once is read, by all hosts as much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sampling import every

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def cluster_reads():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import cluster_reads
    finally:
        sys.path.remove(str(BENCHMARKS))
    return cluster_reads


CASES = [("llama", "plain"), ("llama", "maxtext"), ("deepseek", "plain"), ("deepseek", "maxtext")]


@pytest.mark.parametrize(("model", "target"), every(3, CASES))
def test_few_layers_are_read_once(cluster_reads, tmp_path, capsys, model, target):
    """Of real widths, with all kinds of tensors."""
    few = ["--layers", "4", "--experts", "8", "--meshes", "8 x 4", "--bandwidth", "1e7"]
    arguments = ["--dir", str(tmp_path), "--only", model, "--targets", target]
    assert cluster_reads.main([*few, *arguments]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[3] for row in rows] == list(cluster_reads.SPLITS)
    for row in rows:
        each, auto = float(row[4]), float(row[7])
        assert 0.99 <= auto <= each


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", ["llama", "deepseek"])
@pytest.mark.parametrize("target", ["plain", "maxtext"])
def test_all_layers_are_read_once(cluster_reads, tmp_path, model, target):
    arguments = ["--dir", str(tmp_path), "--only", model, "--targets", target, "--hosts", "2"]
    assert cluster_reads.main(arguments) == 0
