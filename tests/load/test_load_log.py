"""What a load logs of its cost, and the advice where it reads much more than it needs."""

from __future__ import annotations

import importlib
import logging
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from accelerators import Accelerator
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.plan import ReadPlan

MIB = 1 << 20
SMALL = osl.ReadOptions(memory_budget_bytes=64 << 10)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = {f"w{n}": np.zeros((1024, 512), np.float32) for n in range(2)}
    file = tmp_path_factory.mktemp("log") / "model.safetensors"
    safetensors.numpy.save_file(tensors, file)
    return str(file)


@pytest.fixture
def logged(monkeypatch):
    """Levels and texts of the lines that loads log, those of much over-read of any size."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    monkeypatch.setattr(importlib.import_module("orbax_safetensors_layout.load"), "_MUCH_BYTES", 0)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield lambda level: [
        record.getMessage()
        for record in records
        if record.levelno == level and record.getMessage().startswith("Loading ")
    ]
    logger.setLevel(before)


def tree(spec, names=("w0", "w1"), shape=(1024, 512), dtype=np.float32):
    sharding = NamedSharding(mesh_of(x=8), spec)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name in names}


def test_one_line_with_the_figures_of_the_plan(path, logged):
    osl.load(path, tree(P(None, "x")))
    (line,) = logged(logging.INFO)
    _, cost, time = str(osl.plan_load(path, tree(P(None, "x")))).rsplit("\n", 2)
    assert line == f"Loading {path}: {cost}; {time}"
    assert "4,194,304 bytes read (1.00x)" in line
    assert "; about " in line
    assert logged(logging.WARNING) == []


def test_no_figures_are_made_where_nobody_asks_for_them(path, logged, monkeypatch):
    logging.getLogger("absl").setLevel(logging.WARNING)
    monkeypatch.setattr(ReadPlan, "cost", lambda plan: pytest.fail("costs time"))
    osl.load(path, tree(P(None, "x")))
    assert logged(logging.INFO) == logged(logging.WARNING) == []


def stacked():
    rule = osl.rule("stack", osl.stack(osl.tensor("w{l}"), over="l"))
    return tree(P(None, None, "x"), ["stack"], (2, 1024, 512)), osl.Mapping([rule])


CASES = {
    "columns": lambda: (tree(P(None, "x")), None),
    "columns cast": lambda: (tree(P(None, "x"), dtype=jax.numpy.bfloat16), None),
    "stacked columns": stacked,
}


@pytest.mark.parametrize("case", CASES)
def test_a_budget_for_which_rows_are_read_again_and_one_that_holds_them(
    path, logged, monkeypatch, case
):
    Accelerator(monkeypatch)
    abstract, mapping = CASES[case]()
    osl.load(path, abstract, mapping=mapping, options=SMALL)
    (line,) = logged(logging.WARNING)
    planned = osl.plan_load(path, abstract, mapping=mapping, options=SMALL).cost()
    assert f" reads {planned.over_read:.1f} bytes for each that is needed. " in line
    assert planned.over_read > 2
    assert "auto" not in line
    assert "outer dimensions" in line
    budget = int(re.search(r"memory_budget_bytes=(\d+)", line)[1])
    enough = osl.ReadOptions(memory_budget_bytes=budget)
    assert osl.plan_load(path, abstract, mapping=mapping, options=enough).cost().over_read == 1
    osl.load(path, abstract, mapping=mapping, options=enough)
    assert len(logged(logging.WARNING)) == 1


def test_gaps_that_a_mapping_leaves(path, logged):
    """No option helps, and no sharding."""
    mapping = osl.Mapping([osl.rule("w{n}", osl.tensor("w{n}").slice(1, 0, 16))])
    osl.load(path, tree(P(), shape=(1024, 16)), mapping=mapping, options=SMALL)
    (line,) = logged(logging.WARNING)
    assert "Fewer are read with: a checkpoint converted to what is loaded" in line


def test_advice_that_fails_does_not_fail_the_load(path, logged, monkeypatch):
    Accelerator(monkeypatch)
    monkeypatch.setattr(ReadPlan, "by_tensor", lambda plan: 1 // 0)
    loaded = osl.load(path, tree(P(None, "x")), options=SMALL)
    assert len(loaded) == 2
    (line,) = logged(logging.WARNING)
    assert "memory_budget_bytes" in line  # what came before
    assert "outer dimensions" not in line
    assert line.endswith("mesh (format 'sharded').")


def test_advice_for_many_leaves_is_by_those_that_read_most(path, logged, monkeypatch):
    Accelerator(monkeypatch)
    module = importlib.import_module("orbax_safetensors_layout.load")
    monkeypatch.setattr(module, "_MOST_ADVISED", 1)
    planned = []
    plan = module._plan
    monkeypatch.setattr(
        module, "_plan", lambda sourced, **how: planned.append(sourced) or plan(sourced, **how)
    )
    abstract = tree(P("x"), ["w0"]) | tree(P(None, "x"), ["w1"])
    osl.load(path, abstract, options=osl.ReadOptions(memory_budget_bytes=16 << 10))
    (line,) = logged(logging.WARNING)
    assert "memory_budget_bytes" in line
    names = [[leaf.name for leaf in sourced.leaves] for sourced in planned]
    assert names[0] == ["w0", "w1"]
    assert names[1:]
    assert all(of_plan == ["w1"] for of_plan in names[1:])
