"""`plan`: figures against counts by brute force, and against what real processes read."""

import json
import math
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from checkpoints import llama_like, save
from command_line import run
from http_server import file_server
from hypothesis import given, strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from matplotlib.axes._secondary_axes import SecondaryAxis
from programs import run_alone, run_processes

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import estimate
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.plan import coverage
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Partition,
    ShardingRule,
    ShardingRules,
    spec_text,
)
from orbax_safetensors_layout.sharding.sharding_rules import auto_spec

RULES = [
    "'.*norm.weight' = replicated",
    "'.*(q|k|v|up|gate)_proj.*' = -,fsdp",
    "'.*' = fsdp,tensor",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("plan") / "ckpt", llama_like(), files=3)


def planned(capsys, *arguments, code=0):
    assert main(["plan", *map(str, arguments), "--json", "-q"]) == code
    return json.loads(capsys.readouterr().out)


def specs(rules=RULES):
    return [part for rule in rules for part in ("--spec", rule)]


def test_needed_bytes_are_those_of_the_shards_counted_one_by_one(path, capsys):
    report = planned(capsys, path, "--mesh", "fsdp=4,tensor=2", "--hosts", "2", *specs())
    needed = [0, 0]
    for name, tensor in llama_like().items():
        for host in (0, 1):
            held = np.zeros(tensor.shape, bool)
            for device in range(host * 4, host * 4 + 4):
                fsdp, tensor_axis = divmod(device, 2)
                rows = np.arange(tensor.shape[0])
                if name.endswith("norm.weight"):
                    held[...] = True
                elif any(f"{part}_proj" in name for part in ("q", "k", "v", "up", "gate")):
                    n = tensor.shape[1] // 4
                    held[:, fsdp * n : fsdp * n + n] = True
                else:
                    n, m = tensor.shape[0] // 4, tensor.shape[1] // 2
                    block = np.isin(rows, range(fsdp * n, fsdp * n + n))
                    held[block, tensor_axis * m : tensor_axis * m + m] = True
            needed[host] += int(held.sum()) * tensor.itemsize
    assert [result["needed_bytes"] for result in report["processes"]] == needed
    assert report["total"]["needed_bytes"] == sum(needed)
    assert report["parameters"] == sum(t.size for t in llama_like().values())
    assert report["complete"]
    assert not report["misfits"]


@pytest.mark.parametrize("latency", [None, 0.0])
def test_eight_real_processes_read_what_was_planned(path, latency):
    grid = MeshShape({"fsdp": 4, "tensor": 4}, 8)
    rules = [ShardingRule.parse(rule) for rule in RULES]
    options = ReadOptions() if latency is None else ReadOptions(latency_seconds={"local": latency})
    estimated = estimate(path, grid, rules, options=options)
    placer = ShardingRules(rules, grid)
    placed = {name: placer.place(name, t.shape).spec for name, t in llama_like().items()}
    results = run_processes(
        "cli_plan_load.py",
        processes=8,
        devices=2,
        path=str(path),
        mesh=dict(grid.axes),
        specs=placed,
        options={} if latency is None else {"latency_seconds": {"local": latency}},
    )
    for cost, result in zip(estimated.costs, results, strict=True):
        read, needed = [cost.read_bytes], cost.needed_bytes
        assert result == {"read": read, "needed": needed, "planned": []}


def test_a_plan_for_one_host_is_what_its_eight_processes_read(tmp_path):
    """That alone would exchange it: eight share the storage, and the cores that an exchange takes.

    16 MB at 250 MB/s are read in 0.06 s by one process on a host, in 0.5 s by eight.
    """
    values = np.arange(4 << 20, dtype=np.float32).reshape(2048, 2048)
    results = run_processes(
        "cli_plan_load.py",
        processes=8,
        devices=2,
        path=str(save(tmp_path, {"t": values})),
        mesh={"x": 16},
        specs={"t": []},
        options={"bandwidth_bytes_per_second": {"local": 250e6}},
        on_one_host=[1, 8],
    )
    for result in results:
        alone, of_eight = result["planned"]
        assert result["read"] == [of_eight] == [values.nbytes]
        assert alone < values.nbytes // 4


@pytest.mark.parametrize("as_tree", [False, True])
def test_processes_of_one_host_share_its_rate(tmp_path, capsys, as_tree):
    """What 8 processes of a host each read in 0.1 s alone takes them 0.8 s, so they exchange it."""
    nbytes = 4 << 20
    path = save(tmp_path / "model", {"t": np.zeros((1024, 1024), np.float32)})
    given = [path, "--mesh", "x=16", "--spec", ".* = replicated", "--bandwidth", "40MB/s"]
    if as_tree:
        tree = tmp_path / "tree.py"
        tree.write_text("import jax\nt = {'t': jax.ShapeDtypeStruct((1024, 1024), 'float32')}\n")
        given += ["--abstract", f"{tree}:t"]
    apart = planned(capsys, *given, "--hosts", "16")
    together = planned(capsys, *given, "--hosts", "2", "--processes-per-host", "8")
    assert (apart["hosts"], apart["processes_per_host"]) == (16, 1)
    assert (together["hosts"], together["processes_per_host"]) == (2, 8)
    assert len(apart["processes"]) == len(together["processes"]) == 16
    assert [p["read_bytes"] for p in apart["processes"]] == [nbytes] * 16
    assert [p["read_bytes"] for p in together["processes"]] == [nbytes // 16] * 16
    each = "--hosts", "2", "--processes-per-host", "8", "--replicated", "each"
    alone = planned(capsys, *given, *each)
    assert alone["estimated_seconds"] == pytest.approx(8 * nbytes / 40e6, rel=0.01)
    assert apart["estimated_seconds"] == pytest.approx(nbytes / 40e6, rel=0.01)
    assert together["storage"]["host_bytes_per_second"] == 40e6
    assert main(["plan", *map(str, given), *each]) == 0
    out = capsys.readouterr().out
    assert "16 devices on 2 hosts with 8 each, 8 processes a host" in out
    assert "most of a process" in out
    assert "5.00 MB/s a process" in out
    assert "Every process reads all of it" in out
    assert main(["plan", *map(str, given), "--hosts", "16", "--compare", " ".join(each[:4])]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["devices,", "hosts", "16,", "16", "16,", "2"] in rows
    assert ["processes", "a", "host", "1", "8"] in rows


def test_a_plan_of_one_load_counts_the_processes_of_its_host(path):
    sharding = NamedSharding(AbstractMesh((8,), ("x",)), P())
    tree = {
        name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)
        for name, t in osl.metadata(path).items()
    }

    def plan(count):
        of_first = {"process_index": 0, "process_count": 8, "processes_per_host": count}
        return osl.plan_load(path, tree, options=osl.ReadOptions(replicated="each"), **of_first)

    alone, shared = plan(1), plan(8)
    assert alone.cost() == shared.cost()
    assert alone.seconds() < shared.seconds() <= 8 * alone.seconds()
    assert alone.seconds(1e6) < shared.seconds(1e6) <= 8 * alone.seconds(1e6)
    assert "/s a host" in str(alone)
    assert "/s a process" in str(shared)
    for count in (0, 9, 1.5):
        with pytest.raises(ValueError, match="processes_per_host must be an integer from 1 to 8"):
            plan(count)


def test_plan_agrees_with_plan_load(path):
    grid = MeshShape({"fsdp": 2, "tensor": 8}, 4)
    rules = [ShardingRule.parse("'.*' = auto")]
    estimated = estimate(path, grid, rules)
    mesh = AbstractMesh((2, 8), ("fsdp", "tensor"))
    tree = {
        name: jax.ShapeDtypeStruct(
            t.shape,
            t.dtype,
            sharding=NamedSharding(mesh, P(*(part or None for part in auto_spec(t.shape, grid)))),
        )
        for name, t in osl.metadata(path).items()
    }
    for process in range(4):
        plan = osl.plan_load(path, tree, process_index=process, process_count=4)
        assert plan.cost() == estimated.costs[process]


def test_runs_without_jax_and_orbax(path):
    run_alone("cli_without_jax.py", path)


def test_what_does_not_fit_is_told_and_is_a_finding(path, capsys):
    arguments = ["plan", str(path), "--mesh", "x=3", "--spec", ".* = x,-,x+x"]
    assert main(arguments) == 2
    assert "names an axis twice" in capsys.readouterr().err
    assert main(["plan", str(path), "--mesh", "x=3", "--spec", ".*up_proj.* = x"]) == 1
    out, err = capsys.readouterr()
    assert "layers.{0..1}.mlp.up_proj.weight [256, 64]: dimension 0 of 256 is not divisible" in out
    assert "tensors do not fit their rule" in err
    arguments += ["--compare", "--mesh x=2 --spec '.* = auto'"]
    assert main([*arguments[:4], "--spec", ".*up_proj.* = x", *arguments[-2:]]) == 1
    assert "tensors that do not fit" in capsys.readouterr().out
    assert "no rule matches: replicated" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "fsdp"], "is not a mesh; write for instance fsdp=64,tensor=4"),
        (["--mesh", "a=2,a=2"], "is not a mesh"),
        (["--mesh", "a=4", "--hosts", "3"], "3 processes do not divide 4 devices"),
        (
            ["--mesh", "a=4", "--hosts", "2", "--processes-per-host", "4"],
            "8 processes do not divide 4 devices",
        ),
        (
            ["--mesh", "a=4", "--hosts", "0"],
            "sizes of axes, and processes, must be positive integers, not [4, 0]",
        ),
        (["--mesh", "a=1000,b=1000000"], "1,000,000,000 devices are more than"),
        (["--mesh", "a=4", "--memory-budget-bytes", "2"], "2 is too little memory"),
        (["--mesh", "a=4", "--spec", "nothing"], "is not a sharding rule"),
        (["--mesh", "a=4", "--spec", "( = a"], "is malformed"),
        (["--mesh", "a=4", "--spec", ".* = b"], "names 'b'; the mesh has the axes a"),
        (["--mesh", "a=4", "--latency", "soon"], "is not a time"),
        (["--mesh", "a=4", "--mapping", "unknown"], "there is no mapping 'unknown'"),
        (["--mesh", "a=4", "--mapping", "llama:maxtext-unsliced"], "cannot be 'unsliced'"),
        (["--mesh", "a=4", "--abstract", "nowhere:f"], "No module named 'nowhere'"),
        ([], "name the mesh"),
        (["--mesh", "a=4", "--processes-per-host", "0"], "'0' is not a positive number"),
        (["--mesh", "a=4", "--processes-per-host", "-2"], "'-2' is not a positive number"),
        (["--mesh", "a=4", "--mapping", "llama", "--plot", "x.png"], "--plot draws"),
        (["--mesh", "a=4", "--save", "--plot", "x.png"], "--plot draws"),
    ],
)
def test_misuse_is_told_in_one_line(path, capsys, arguments, message):
    try:
        code = main(["plan", str(path), *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert "Traceback" not in err


def test_rules_from_a_file_and_costly_tensors(path, tmp_path, capsys):
    file = tmp_path / "rules.txt"
    file.write_text("# comment\n\n'.*(up|down)_proj.weight' = -,x\n'.*' = x\n")
    arguments = ["plan", str(path), "--mesh", "x=8", "--hosts", "8", "--spec", str(file)]
    assert main([*arguments, "--latency", "1ms", "--bandwidth", "1GB/s"]) == 0
    out = capsys.readouterr().out
    assert "'.*(up|down)_proj.weight' = -,x" in out
    assert "costliest beyond their bytes" in out
    assert "split dimension 0 instead" in out
    assert "layers.{0" in out


def test_no_rule_is_named_that_nobody_gave(path, tmp_path, capsys):
    """A tree with shardings of its own leaves nothing for the default."""
    tree = tmp_path / "tree.py"
    tree.write_text(
        "import jax\nfrom jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P\n"
        "sharding = NamedSharding(AbstractMesh((4,), ('x',)), P('x'))\n"
        "w = jax.ShapeDtypeStruct((64,), 'bfloat16', sharding=sharding)\n"
        "t = {'model': {'norm': {'weight': w}}}\n"
    )
    assert main(["plan", str(path), "--mesh", "x=4", "--abstract", f"{tree}:t"]) == 0
    assert not capsys.readouterr().err


def test_a_tensor_that_fits_in_no_plan_is_counted_once(path, capsys):
    arguments = ["plan", str(path), "--mesh", "x=3", "--spec", ".*norm.* = x"]
    assert main(arguments) == 1
    alone = capsys.readouterr().err
    assert main([*arguments, "--compare", "--hosts 3"]) == 1
    assert capsys.readouterr().err == alone
    assert "tensors do not fit their rule" in alone


def test_a_rule_that_no_tensor_uses_is_told(path, capsys):
    rules = specs(["'.*nowhere.*' = x", "'.*' = auto"])
    assert main(["plan", str(path), "--mesh", "x=8", *rules]) == 0
    out, err = capsys.readouterr()
    assert "8 devices on one host" in out
    assert err == "orbax-safetensors: the rule '.*nowhere.*' = x is used by no tensor\n"


def test_compare_sets_plans_side_by_side(path, capsys):
    other = "--mesh x=2,y=4 --hosts 2 --spec '.* = y'"
    arguments = [path, "--mesh", "x=8", "--hosts", "4", "--compare", other]
    report = planned(capsys, *arguments)
    assert set(report) == {"this", other}
    alone = planned(capsys, path, "--mesh", "x=2,y=4", "--hosts", "2", "--spec", ".* = y")
    assert report[other] == alone
    assert main(["plan", *map(str, arguments)]) == 0
    assert other in capsys.readouterr().out


def test_pieces_families_and_abstract_trees(tmp_path, capsys, monkeypatch):
    tensors = {f"layers.{n}.w": np.zeros((16, 8), np.float32) for n in range(3)}
    osl.save(tmp_path / "pieces", tensors, options=osl.WriteOptions(layout="sharded"))
    report = planned(capsys, tmp_path / "pieces", "--mesh", "x=4", "--hosts", "4")
    assert report["total"]["needed_bytes"] == sum(t.nbytes for t in tensors.values())
    assert report["total"]["read_bytes"] >= report["total"]["needed_bytes"]
    assert main(["plan", str(tmp_path / "pieces"), "--mesh", "x=4", "--save"]) == 2
    assert "planned for whole tensors, without a mapping" in capsys.readouterr().err
    osl.save(tmp_path / "whole", tensors)
    (tmp_path / "a_model.py").write_text(
        textwrap.dedent(
            """
            import jax, numpy as np
            from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
            def tree():
                mesh = AbstractMesh((4,), ("x",))
                split = NamedSharding(mesh, P("x"))
                leaf = jax.ShapeDtypeStruct((16, 8), np.float32)
                sharded = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=split)
                return {"layers": [{"w": sharded}, {"w": leaf}]}
            same = tree()
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for tree in ("a_model:tree", "a_model.py:tree", "a_model.py:same"):
        given = ("--abstract", tree, "--hosts", "2", "--spec", ".*1.w = replicated")
        report = planned(capsys, "whole", *given)
        assert report["mesh"] == {"x": 4}
        assert report["total"]["needed_bytes"] == 512 + 2 * 512
        assert report["device_bytes"] == 128 + 512


def test_the_costs_of_a_mapping(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "head_dim": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {
        "embed_tokens": (128, 64),
        "norm": (64,),
        **{
            f"layers.{n}.{name}": shape
            for n in range(2)
            for name, shape in {
                "self_attn.q_proj": (64, 64),
                "self_attn.k_proj": (32, 64),
                "self_attn.v_proj": (32, 64),
                "self_attn.o_proj": (64, 64),
                "mlp.gate_proj": (128, 64),
                "mlp.up_proj": (128, 64),
                "mlp.down_proj": (64, 128),
                "input_layernorm": (64,),
                "post_attention_layernorm": (64,),
            }.items()
        },
    }
    tensors = {f"model.{n}.weight": np.zeros(s, np.float32) for n, s in shapes.items()}
    tensors["lm_head.weight"] = np.zeros((128, 64), np.float32)
    osl.save(tmp_path, tensors)
    report = planned(
        capsys, tmp_path, "--mesh", "x=4", "--hosts", "4", "--mapping", "llama:maxtext",
        "--spec", "'.*layers.*kernel' = x", "--spec", "'.*' = replicated",
    )  # fmt: skip
    kernels = sum(t.nbytes for name, t in tensors.items() if "_proj" in name)
    rest = sum(t.nbytes for t in tensors.values()) - kernels
    assert report["total"]["needed_bytes"] == kernels + 4 * rest


def test_what_a_mapping_reads_too_much_is_told(tmp_path, capsys):
    save(tmp_path, {f"a.{n}.w": np.zeros((64, 256), np.float32) for n in range(3)})
    (tmp_path / "maps.py").write_text(
        "import orbax_safetensors_layout as osl\n"
        "columns = osl.Mapping([osl.rule('k_{i}', osl.tensor('a.{i}.w').transpose())])\n"
    )
    arguments = ["plan", str(tmp_path), "--mesh", "x=8", "--hosts", "8", "--latency", "1ms"]
    arguments += ["--mapping", f"{tmp_path}/maps.py:columns", "--spec", "'.*' = x"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "k_{0..2}" in out
    assert "64.6 kB read for 8.19 kB needed" in out
    assert "too: store it in shards" in out
    assert "dimension 0" not in out
    slow = ["--bandwidth", "100MB/s", "--host-bandwidth", "50kB/s"]
    for rates, advised in (([], False), (slow, True)):  # only where it saves time
        assert main([*arguments, "--replicated", "each", *rates]) == 0
        assert ("replicated='auto'" in capsys.readouterr().out) == advised


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("rate", "exchanges"), [("1MB/s", True), ("100GB/s", False)])
def test_auto_goes_by_the_rate_of_a_host(tmp_path, capsys, mapped, rate, exchanges):
    save(tmp_path, {"w": np.zeros((1024, 1024), np.float32)})
    arguments = ["plan", str(tmp_path), "--mesh", "x=4", "--hosts", "4", "--json"]
    arguments += ["--spec", "'.*' = replicated", "--bandwidth", "4MB/s", "--host-bandwidth", rate]
    if mapped:
        (tmp_path / "maps.py").write_text(
            "import orbax_safetensors_layout as osl\n"
            "same = osl.Mapping([osl.rule('w', osl.tensor('w'))])\n"
        )
        arguments += ["--mapping", f"{tmp_path}/maps.py:same"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["total"]["exchanged_bytes"] > 0) == exchanges


@pytest.mark.parametrize("replicated", ["each", "read_once"])
def test_what_shards_of_the_mesh_would_save(path, tmp_path, capsys, replicated):
    """Against the plan of a load of shards that were saved."""

    def spec(name):
        return P() if "norm" in name else P(None, "x")

    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    tree = {
        name: jax.device_put(value, NamedSharding(mesh, spec(name)))
        for name, value in llama_like().items()
    }
    osl.save(tmp_path / "shards", tree, options=osl.WriteOptions(layout="sharded"))
    abstract = {
        name: jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(AbstractMesh((8,), ("x",)), spec(name))
        )
        for name, value in tree.items()
    }
    options = osl.ReadOptions(replicated=replicated, latency_seconds={"local": 0.0})
    expected = sum(
        osl.plan_load(
            tmp_path / "shards", abstract, options=options, process_index=process, process_count=8
        )
        .cost()
        .read_bytes
        for process in range(8)
    )
    arguments = [
        *(path, "--mesh", "x=8", "--hosts", "8", "--latency", "1ms", "--bandwidth", "1MB/s"),
        *("--replicated", replicated, *specs(["'.*norm.*' = replicated", "'.*' = -,x"])),
    ]
    report = planned(capsys, *arguments)
    sharded = report["sharded"]
    assert sharded["read_bytes"] == expected
    read, exchanged = (report["total"][f"{kind}_bytes"] for kind in ("read", "exchanged"))
    assert sharded["saved_read_bytes"] == read - expected
    assert sharded["saved_exchanged_bytes"] == exchanged - sharded["exchanged_bytes"]
    assert (sharded["saved_read_bytes"] > 0) == (replicated == "each")
    assert (sharded["saved_exchanged_bytes"] > 0) == (replicated == "read_once")
    assert report["storage"]["all_hosts_bytes_per_second"] == 25e9
    assert ("requests" in report["estimated"]) == (replicated == "read_once")
    assert main(["plan", *map(str, arguments)]) == 0
    text = "stored in shards of this mesh (convert --format sharded --mesh ...):"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("replicated", ["each", "read_once"])
def test_gaps_are_joined_as_a_load_joins_them(tmp_path, replicated):
    tensors = {name: np.ones((64, 16), np.float32) for name in "abcd"}
    path = save(tmp_path, tensors)
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P("x"))
    abstract = {
        n: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding) for n, t in tensors.items()
    }
    options = osl.ReadOptions(replicated=replicated)
    loads = [
        osl.plan_load(path, abstract, options=options, process_index=n, process_count=4).cost()
        for n in range(4)
    ]
    rules = [ShardingRule.parse("'.*' = x")]
    costs = estimate(path, MeshShape({"x": 4}, 4), rules, options=options).costs
    assert [cost.read_bytes for cost in costs] == [cost.read_bytes for cost in loads]
    assert [cost.requests for cost in costs] == [cost.requests for cost in loads]


@pytest.mark.parametrize("megabytes", [1, 32])
def test_requests_of_a_server_are_those_of_a_load(tmp_path, megabytes):
    save(tmp_path, {"w": np.ones((megabytes << 9, 512), np.float32)})
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P("x"))
    abstract = {"w": jax.ShapeDtypeStruct((megabytes << 9, 512), np.float32, sharding=sharding)}
    options = osl.ReadOptions(replicated="each")
    with file_server(tmp_path) as server:
        url = f"{server.url}/files"
        load = osl.plan_load(url, abstract, options=options, process_index=0, process_count=4)
        rules = [ShardingRule.parse("'.*' = x")]
        costs = estimate(url, MeshShape({"x": 4}, 4), rules, options=options).costs
    assert {cost.requests for cost in costs} == {load.cost().requests}


def test_no_password_of_a_server_is_shown(tmp_path, capsys):
    save(tmp_path, {"w": np.ones(8, np.float32)})
    with file_server(tmp_path) as server:
        host = server.url.removeprefix("http://")
        url = f"http://me:password@{host}/files?signature=hidden"
        for more in ([], ["--json"]):
            assert main(["plan", url, "--mesh", "x=2", "--compare", url, *more]) == 0
            shown = "".join(capsys.readouterr())
            assert "password" not in shown
            assert "hidden" not in shown


def test_the_picture(path, tmp_path, capsys):
    target = tmp_path / "reads.png"
    arguments = ["plan", str(path), "--mesh", "x=8", "--hosts", "4", "--plot", str(target)]
    assert main([*arguments, "--plot-files", "model-00001*"]) == 0
    assert f"drew {target}" in capsys.readouterr().err
    assert target.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--plot-files", "nothing"]) == 2


def test_without_matplotlib_nothing_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "orbax_safetensors_layout.cli.plot", raising=False)
    nowhere = str(tmp_path / "nowhere")
    assert main(["plan", nowhere, "--mesh", "x=8", "--plot", str(tmp_path / "reads.png")]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err == "orbax-safetensors: --plot needs matplotlib: pip install matplotlib\n"


def test_names_in_the_picture_are_not_written_over_each_other(tmp_path, monkeypatch):
    """Layers of 2.4 % of a file each, whose names take 3.6 % of its width."""
    tensors = {f"layers.{n}": np.zeros((8, 100), np.float32) for n in range(40)}
    texts, places = [], []
    monkeypatch.setattr(SecondaryAxis, "set_xticks", lambda _, at: places.extend(at))
    monkeypatch.setattr(SecondaryAxis, "set_xticklabels", lambda _, at, **__: texts.extend(at))
    arguments = ["plan", str(save(tmp_path, tensors)), "--mesh", "x=8", "--hosts", "4"]
    assert main([*arguments, "--plot", str(tmp_path / "reads.png")]) == 0
    assert texts == [name for n, name in enumerate(sorted(tensors)) if n % 2 == 0]
    assert min(np.diff(places)) > 0.036 * sum(tensor.nbytes for tensor in tensors.values())


def test_the_picture_shows_every_byte_that_is_read(path):
    grid = MeshShape({"x": 4, "y": 2}, 4)
    rules = [ShardingRule.parse(rule) for rule in ("'.*up_proj.*' = -,x", "'.*' = auto")]
    estimated = estimate(path, grid, rules, options=ReadOptions(latency_seconds={"local": 0.0}))
    seen = coverage(estimated.cluster, [3, 0], 97)
    width = seen.total_bytes / 97
    for row, process in enumerate((3, 0)):
        assert math.isclose(seen.read[row].sum() * width, estimated.costs[process].read_bytes)
        assert math.isclose(seen.needed[row].sum() * width, estimated.costs[process].needed_bytes)
    assert seen.read.max() <= 1 + 1e-9
    assert (seen.needed <= seen.read + 1e-9).all()


def test_a_reader_that_goes_away(path):
    command = [sys.executable, "-m", "orbax_safetensors_layout", "inspect", str(path), "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_debug_shows_the_traceback(path):
    done = run("plan", path, "--mesh", "a=4", "--spec", "nothing", "--debug")
    assert done.returncode == 1  # Python's own
    assert "Traceback" in done.stderr


AXES = {"a": 2, "b": 3, "c": 4}


@given(
    st.text("ab.*()'= ", min_size=1).filter(str.strip),
    st.lists(st.lists(st.sampled_from(list(AXES)), max_size=2, unique=True), max_size=3),
)
def test_rules_are_read_as_they_are_written(pattern, parts):
    spec = tuple(tuple(part) for part in parts)
    try:
        rule = ShardingRule.parse(f"'{pattern}' = {spec_text(spec)}")
    except ValueError as error:
        assert "is malformed" in str(error)  # noqa: PT017 - a pattern that is no expression
        return
    assert rule.pattern == pattern
    assert rule.spec == (spec if spec else ())


@given(st.lists(st.sampled_from([1, 2, 3, 6, 8, 24, 25]), max_size=3))
def test_auto_splits_over_the_most_devices(shape):
    grid = MeshShape(AXES, 1)
    spec = auto_spec(shape, grid)
    Partition.of(tuple(shape), spec, grid)  # fits
    spans = [("a", "b", "c"), ("a", "b"), ("b", "c"), ("a",), ("b",), ("c",)]
    best = max(
        (grid.ways(names) for names in spans for n in shape if n % grid.ways(names) == 0),
        default=1,
    )
    assert math.prod(map(grid.ways, spec)) == (best if len(shape) > 1 else 1)


def test_a_save_takes_no_less_than_all_hosts_together_can_write(path, capsys):
    """What one host writes is little; what all write shares one bandwidth."""
    arguments = ["plan", str(path), "--mesh", "x=8", "--hosts", "8", "--save", "--json"]
    rates = ["--bandwidth", "1TB/s", "--latency", "0s", "--shared-bandwidth", "1MB/s"]
    assert main([*arguments, *rates]) == 0
    plan = json.loads(capsys.readouterr().out)
    written = plan["total"]["written_bytes"] + plan["total"]["read_bytes"]
    assert plan["estimated_seconds"] >= written / 1e6


def test_sums_of_some_hosts_are_scaled_up(tmp_path, capsys):
    osl.save(tmp_path, {"w": np.ones((64, 8), np.float32)})
    (tmp_path / "maps.py").write_text(
        "import orbax_safetensors_layout as osl\n"
        "mapping = osl.Mapping([osl.rule('w', osl.tensor('w').transpose())])\n"
    )
    arguments = ["plan", str(tmp_path), "--mesh", "x=64", "--hosts", "64", "--json"]
    mapping = ["--mapping", f"{tmp_path}/maps.py:mapping", "--spec", "'.*' = -,x"]
    assert main([*arguments, *mapping]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["complete"], len(plan["processes"])) == (False, 16)
    assert plan["total"]["needed_bytes"] == 64 * 8 * 4
