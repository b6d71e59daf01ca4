"""Options that make no sense are refused by name, before anything is read or written."""

import jax
import ml_dtypes  # noqa: F401 - numpy learns of bfloat16
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget_bytes": 0},
        {"memory_budget_bytes": None},
        {"max_file_bytes": 0},
        {"max_file_bytes": 5e9},
        {"metadata": ["format"]},
        {"metadata": {"step": 1}},
        {"dtype": "int8"},
        {"dtype": "float4_e2m1fn"},
        {"dtype": "no such"},
        {"verify": "yes"},
        {"use_ocdbt": None},
        {"timeout_seconds": 0},
        {"progress": "yes"},
    ],
    ids=str,
)
def test_convert_options_that_make_no_sense(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"^ConvertOptions\.{name}"):
        osl.ConvertOptions(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latency_seconds", -1e-9),
        ("latency_seconds", 86_401),
        ("latency_seconds", float("nan")),
        ("bandwidth_bytes_per_second", 0),
        ("bandwidth_bytes_per_second", 1e-300),
        ("host_bandwidth_bytes_per_second", float("inf")),
        ("shared_bandwidth_bytes_per_second", 1e16),
    ],
)
def test_rates_by_which_nothing_can_be_planned(name, value):
    with pytest.raises(
        ValueError, match=rf"^ReadOptions\.{name} must be a dict of storage classes"
    ):
        osl.ReadOptions(**{name: {"local": value}})


@pytest.mark.parametrize("latency", [0, 86_400])
@pytest.mark.parametrize("stream", [1, 1e15])
@pytest.mark.parametrize("host", [1, 1e15])
@pytest.mark.parametrize("shared", [1, 1e15])
def test_the_extremes_of_rates_make_a_plan(tmp_path, latency, stream, host, shared):
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P(None, "x"))
    tensors = {"a": np.zeros((1024, 512), np.float32), "b": np.zeros(8, np.float32)}
    osl.save(tmp_path / "a", tensors)
    tree = {
        "a": jax.ShapeDtypeStruct((1024, 512), np.float32, sharding=sharding),
        "b": jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding.update(spec=P())),
    }
    options = osl.ReadOptions(
        latency_seconds={"local": latency},
        bandwidth_bytes_per_second={"local": stream},
        host_bandwidth_bytes_per_second={"local": host},
        shared_bandwidth_bytes_per_second={"local": shared},
    )
    plan = osl.plan_load(tmp_path / "a", tree, options=options, process_index=0, process_count=2)
    assert plan.seconds() >= 0
    assert "a host" in str(plan)


@pytest.mark.parametrize("options", [osl.WriteOptions, osl.ConvertOptions])
def test_dtypes_go_by_short_names_too(options):
    for name, dtype in (("bf16", "bfloat16"), ("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn")):
        assert options(dtype=name).dtype == np.dtype(dtype)


def test_options_of_another_kind(tmp_path):
    source = tmp_path / "source"
    osl.save(source, {"a": np.arange(3)})
    read, write = osl.ReadOptions(), osl.WriteOptions()
    target = tmp_path / "target"
    calls = {
        "load": lambda: osl.load(source, options=write),
        "plan_load": lambda: osl.plan_load(source, options=write),
        "save": lambda: osl.save(target, {"a": np.arange(3)}, options=read),
        "convert": lambda: osl.convert(source, target, options=write),
        "consolidate": lambda: osl.consolidate(source, target, options=read),
        "verify": lambda: osl.verify(source, options=write),
    }
    for name, call in calls.items():
        with pytest.raises(
            TypeError, match=r"options must be a \w+Options\(.*, not (Read|Write)Options\("
        ):
            call()
        assert not target.exists(), name
