"""Folders that torch's DCP itself has written, in processes; needs torch (`libraries.need`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from dcp_folders import dcp_weights
from jax.sharding import NamedSharding, PartitionSpec
from libraries import need
from meshes import mesh_of
from programs import program_path

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import inspect

WEIGHTS = dcp_weights()
SAVES = ["1-1", "1-2", "2-1", "2-2", "4-1", "4-2"]
SPECS = [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec(("y", "x"))]
SAME = osl.Mapping([osl.rule(f"model.{name}", osl.tensor(name)) for name in WEIGHTS])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    need("torch")
    folder = tmp_path_factory.mktemp("dcp")
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-W", "ignore", program_path("torch_dcp_save.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": support}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def abstract(arrays, spec=None):
    mesh = mesh_of(x=4, y=2)

    def leaf(array):
        if spec is None:
            return np.empty_like(array)
        fits = len(spec) <= array.ndim and all(
            part is None
            or extent % np.prod([mesh.shape[axis] for axis in np.atleast_1d(part)]) == 0
            for extent, part in zip(array.shape, spec, strict=False)
        )
        sharding = NamedSharding(mesh, spec if fits else PartitionSpec())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(leaf, arrays)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("save", SAVES)
def test_each_loads_bit_for_bit_under_other_shardings(root, save, spec):
    arrays = {name: array for name, array in WEIGHTS.items() if array.dtype != np.int64}
    tree = {**abstract(arrays, spec), "plain": np.empty_like(WEIGHTS["plain"])}
    assert_same(osl.load(root / save, tree), WEIGHTS)


@pytest.mark.parametrize("save", SAVES)
def test_each_loads_through_a_mapping(root, save):
    loaded = osl.load(root / save, {"model": abstract(WEIGHTS)}, mapping=SAME)["model"]
    assert_same(loaded, WEIGHTS)


@pytest.mark.parametrize("save", SAVES[2:])
def test_those_of_several_ranks_are_read_without_a_tree(root, save, tmp_path):
    assert_same(osl.load(root / save), WEIGHTS)
    found = osl.metadata(root / save)
    assert {name: leaf.shape for name, leaf in found.items()} == {
        name: array.shape for name, array in WEIGHTS.items()
    }
    assert inspect(root / save).total.parameters == sum(a.size for a in WEIGHTS.values())
    assert osl.verify(root / save).ok
    for format in ("hf", "orbax"):
        osl.convert(root / save, tmp_path / format, format=format)
        report = osl.verify(root / save, against=tmp_path / format)
        assert report.ok, report
    assert_same(osl.load(tmp_path / "hf"), WEIGHTS)


@pytest.mark.parametrize("save", SAVES[:2])
def test_those_of_one_rank_are_not_taken_for_whole(root, save, tmp_path):
    for use in (osl.load, osl.metadata, lambda path: osl.convert(path, tmp_path / "hf")):
        with pytest.raises(osl.FormatError, match="those of one rank"):
            use(root / save)
    assert not osl.verify(root / save).ok


@pytest.mark.parametrize("save", SAVES[1:])
def test_without_any_of_the_files_none_loads(root, save, tmp_path):
    """However many ranks; only where those of the last are gone, it takes the shapes to see it."""
    for number, file in enumerate(sorted((root / save).iterdir())):
        folder = tmp_path / str(number)
        shutil.copytree(root / save, folder)
        (folder / file.name).unlink()
        with pytest.raises((osl.FormatError, osl.MismatchError)):
            osl.load(folder, abstract(WEIGHTS))
        with pytest.raises((osl.FormatError, osl.MappingError)):
            osl.load(folder, {"model": abstract(WEIGHTS)}, mapping=SAME)
        with pytest.raises(osl.SafetensorsLayoutError):
            osl.load(folder)
        assert not osl.verify(folder).ok


def test_a_model_of_fsdp_with_tensor_parallelism(root):
    with np.load(root / "model.npz") as whole:
        expected = dict(whole)
    assert_same(osl.load(root / "model"), expected)
    assert_same(osl.load(root / "model", abstract(expected, PartitionSpec("y"))), expected)


def test_what_torch_has_consolidated_loads_as_any(root):
    """It leaves the ranks' files in a folder below, which make the same tensors."""
    expected = {n: a for n, a in WEIGHTS.items() if a.dtype.kind != "i" and a.ndim}
    for folder in ("consolidated", "consolidated/sharded"):
        assert_same(osl.load(root / folder), expected)


def test_ranks_that_wrote_one_file_over_another_are_found_out(root):
    """A save of shards without `save_distributed` leaves the last rank's parts, and an index."""
    for use in (osl.load, osl.metadata, lambda path: osl.load(path, abstract(WEIGHTS))):
        with pytest.raises(osl.FormatError):
            use(root / "one")
    assert not osl.verify(root / "one").ok
