#!/usr/bin/env python3
"""Compares what a cluster reads of large models with "each" and with "auto", from their headers.

    python benchmarks/cluster_reads.py > reads.md      Llama-3.1-405B and DeepSeek-V3
    python benchmarks/cluster_reads.py --layers 4 --experts 8 --bandwidth 1e8 --only llama

The checkpoints are real headers and holes, so they take no disk; meshes are abstract, so they take
no devices. Tensors are loaded as they are stored, or through the mapping to MaxText (of FP8 as
bfloat16), of which `--hosts` are planned. The embeddings' axis is divided in "fsdp"; heads, MLP
and vocabulary in "tensor". It exits with 1 where, with "auto", all hosts together read more than
1.05 of the bytes that are needed once, or one reads more than 1.2 of its even share.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deepseek import FILES as DEEPSEEK_FILES, INDEX_NAME, deepseek_tensors, make_index
from llama405b import FILES as LLAMA_FILES, llama_tensors

MODELS, TARGETS = ("llama", "deepseek"), ("plain", "maxtext")
MESHES = ("64 x 4", "128 x 8")
"""Sizes of the axes "fsdp" and "tensor"; a host has the devices of one row."""
SPLITS = ("fsdp", "tensor", "fsdp x tensor")
CHOICES = ("each", "auto")
MOST_READ, MOST_OF_SHARE = 1.05, 1.2
LATENCY_SECONDS, CONCURRENCY = 1e-3, 32
"""Of the storage: a file system in the network."""
MEMORY_BUDGET_BYTES = 8 << 30
"""Stacked leaves have shards of a gigabyte; devices of a host that share rows read them at once."""

RULES = {
    "plain": (
        "'.*(scale_inv|norm.weight|bias)' = replicated",
        "'.*(o|down)_proj.weight' = fsdp,tensor",
        "'.*(q_a_proj|kv_a_proj_with_mqa|gate|eh_proj).weight' = -,fsdp",
        "'.*weight' = tensor,fsdp",
    ),
    "maxtext": (
        "'.*MoeBlock_0.wi_.' = -,-,fsdp,tensor",
        "'.*MoeBlock_0.wo' = -,-,tensor,fsdp",
        "'.*out.kernel' = tensor,-,-,fsdp",
        "'.*wo.kernel' = tensor,-,fsdp",
        "'.*(query|key|value|wi_.|wq_b|wkv_b).kernel' = fsdp,-,tensor",
        "'.*(wq_a|wkv_a|gate).kernel' = fsdp",
        "'.*logits_dense.kernel' = fsdp,tensor",
        "'.*embedding' = tensor,fsdp",
        "'.*' = replicated",
    ),
}


class Row(NamedTuple):
    """What a cluster reads."""

    model: str
    target: str
    mesh: str
    split: str
    once_bytes: int  # of the tensors that are needed, each once
    read_bytes: dict[str, float]  # of all hosts, by choice
    shares: dict[str, float]  # the most that a host reads, of its even share, by choice
    seconds: dict[str, float]
    exchanged_bytes: int  # with "auto", the most of a host

    @property
    def holds(self) -> bool:
        """Whether "auto" reads little more than once, and evenly."""
        much = self.read_bytes["auto"] > MOST_READ * self.once_bytes
        return not much and self.shares["auto"] <= MOST_OF_SHARE

    def cells(self) -> Iterator[str]:
        """The row of the table."""
        yield from (self.model, self.target, self.mesh, self.split)
        for choice in CHOICES:
            yield f"{self.read_bytes[choice] / self.once_bytes:.3f}"
            yield f"{self.shares[choice]:.2f}"
            yield f"{self.seconds[choice]:,.0f}"
        yield f"{self.exchanged_bytes / 1e9:,.1f}"
        yield "yes" if self.holds else "**no**"


HEAD = (
    *("model", "as", "devices", "sharding"),
    *("each: read", "of its share", "s"),
    *("auto: read", "of its share", "s"),
    *("GB exchanged", "holds"),
)


def config_of(model: str, layers: int | None, experts: int | None) -> dict[str, Any]:
    """The configuration of a model, or of one of the same form with fewer layers and experts."""
    if model == "llama":
        return {
            "model_type": "llama",
            "num_hidden_layers": layers or 126,
            "hidden_size": 16_384,
            "intermediate_size": 53_248,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            "tie_word_embeddings": False,
        }
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers or 61,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129_280,
        "n_routed_experts": experts or 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False,
    }


def make(root: Path, model: str, layers: int | None = None, experts: int | None = None) -> Path:
    """Makes a checkpoint of headers and holes, unless it is there; returns its folder."""
    config = config_of(model, layers, experts)
    folder = root / "-".join([model, *(str(n) for n in (layers, experts) if n)])
    if not (folder / INDEX_NAME).exists():  # it is written last
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        count = config["num_hidden_layers"]
        if model == "llama":
            make_index(folder, llama_tensors(count), files=-(-LLAMA_FILES * count // 126))
        else:
            tensors = deepseek_tensors(count, config["n_routed_experts"])
            make_index(folder, tensors, files=-(-DEEPSEEK_FILES * count // 61))
    return folder


def rules_of(target: str, split: str) -> list[str]:
    """The rules of a target, without the axes that a split leaves out."""
    rules = []
    for text in RULES[target]:
        pattern, _, right = text.rpartition("=")
        for axis in {"fsdp", "tensor"} - set(split.split(" x ")):
            right = right.replace(axis, "-")
        rules.append(f"{pattern}={right}")
    return rules


def measure(
    folder: Path, model: str, target: str, mesh: str, split: str, bandwidth: float, most_hosts: int
) -> Row:
    """Plans a load with both choices."""
    import orbax_safetensors_layout as osl
    from orbax_safetensors_layout.analysis import estimate
    from orbax_safetensors_layout.catalog import Catalog
    from orbax_safetensors_layout.plan import array_sources
    from orbax_safetensors_layout.sharding import MeshShape, parse_rules

    mapping = None
    if target != "plain":
        mapping = osl.families.mapping(folder, target="maxtext", dtype="bfloat16")
    with Catalog.open(folder) as catalog:
        entries = catalog.all_entries()
        names = set(entries)
        if mapping is not None:
            sources: Any = array_sources(catalog, mapping).values()
            names = {name for source in sources for name in source.bound.sources()}
        once_bytes = sum(entries[name].nbytes for name in names)
    hosts, devices = map(int, mesh.split(" x "))
    read, shares, seconds = {}, {}, {}
    exchanged = 0
    for choice in CHOICES:
        options = osl.ReadOptions(
            replicated=choice,  # type: ignore[arg-type]
            latency_seconds={"local": LATENCY_SECONDS},
            bandwidth_bytes_per_second={"local": bandwidth},
            concurrency=CONCURRENCY,
            memory_budget_bytes=MEMORY_BUDGET_BYTES,
        )
        shape = MeshShape({"fsdp": hosts, "tensor": devices}, hosts)
        rules = parse_rules(rules_of(target, split))
        estimated = estimate(
            folder,
            shape,
            rules,
            mapping=mapping,
            options=options,
            most_processes=most_hosts,
        )
        assert not estimated.misfits, estimated.misfits[:3]
        of_hosts = [cost.read_bytes for cost in estimated.costs]
        mean = sum(of_hosts) / len(of_hosts)
        read[choice], shares[choice] = mean * hosts, max(of_hosts) / mean
        seconds[choice] = max(estimated.seconds())
        exchanged = max(cost.exchanged_bytes for cost in estimated.costs)
    return Row(model, target, mesh, split, once_bytes, read, shares, seconds, exchanged)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="where the sparse checkpoints are made, and kept")
    parser.add_argument("--only", nargs="+", default=MODELS, choices=MODELS, metavar="MODEL")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--meshes", nargs="+", default=MESHES, metavar="HOSTS x DEVICES")
    parser.add_argument("--splits", nargs="+", default=SPLITS, choices=SPLITS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--experts", type=int, help="fewer experts")
    parser.add_argument("--bandwidth", type=float, default=2e9, help="bytes a second of a host")
    parser.add_argument("--hosts", type=int, default=16, help="those planned of a mapped load")
    options = parser.parse_args(arguments)
    root = options.dir or Path(tempfile.gettempdir()) / "osl-benchmark"
    print(_line(HEAD))
    print("|---" * len(HEAD) + "|")
    holds = True
    for model in options.only:
        folder = make(root, model, options.layers, options.experts)
        for target in options.targets:
            for mesh in options.meshes:
                for split in options.splits:
                    row = measure(
                        folder, model, target, mesh, split, options.bandwidth, options.hosts
                    )
                    holds &= row.holds
                    print(_line(row.cells()), flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
