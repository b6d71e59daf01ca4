"""Formats estimates as text and as JSON documents."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from orbax_safetensors_layout.analysis import ClusterEstimate
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.plan import Cost, LeafCost
from orbax_safetensors_layout.runtime import count_text, number_text, seconds_text, size_text
from orbax_safetensors_layout.sharding import spec_text

from .output import name_families, table


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _exchanged(cost: Cost) -> int:
    return cost.exchanged_bytes


Figure = tuple[str, Callable[[Cost], float], Callable[[float], str]]

_LOAD: tuple[Figure, ...] = (
    ("bytes needed", lambda cost: cost.needed_bytes, size_text),
    ("bytes read", lambda cost: cost.read_bytes, size_text),
    ("over-read", lambda cost: cost.over_read, _ratio),
    ("bytes exchanged", _exchanged, size_text),
    ("requests", lambda cost: cost.requests, count_text),
    ("files opened", lambda cost: cost.files, count_text),
    ("host memory, at most", lambda cost: cost.peak_host_bytes, size_text),
)
_SAVE: tuple[Figure, ...] = (
    ("own bytes", lambda cost: cost.needed_bytes, size_text),
    ("bytes written", lambda cost: cost.written_bytes, size_text),
    ("pieces read back", lambda cost: cost.read_bytes, size_text),
    ("files written", lambda cost: cost.files, count_text),
)
# Where hosts exchange tensors these are estimates.
_ABOUT = {"requests": "requests (about)", "host memory, at most": "host memory (about)"}
_MOST_RULES = 8
_LEAST_SAVED = 0.05  # share of the time that is worth a conversion


def estimate_text(estimate: ClusterEstimate, top: int) -> str:
    """Format an estimate as a page that names the `top` costliest tensors."""
    head, rules, figures = _head(estimate), _rules(estimate), _table(estimate)
    saving = _sharded_saving(estimate)
    parts = (head, rules, _misfits(estimate, top), figures, saving, _costly(estimate, top))
    return "\n\n".join(filter(None, parts))


def comparison_text(labels: Sequence[str], estimates: Sequence[ClusterEstimate]) -> str:
    """Format estimates, all of loads or all of saves, side by side: the most of a process."""
    each = [e.mesh.processes_per_host for e in estimates]
    owner, _ = estimates[each.index(max(each))].rate.owners
    rows = [["devices, hosts", *(f"{e.mesh.devices:,}, {e.mesh.hosts:,}" for e in estimates)]]
    if max(each) > 1:
        rows.append(["processes a host", *map(str, each)])
    for name, of, text in _figures(estimates):
        rows.append([f"{name}, a {owner}", *(text(max(map(of, e.costs))) for e in estimates)])
        if text is not _ratio:
            totals = (_sum(e, [*map(of, e.costs)], text) for e in estimates)
            rows.append([f"{name}, all hosts", *totals])
    rows.append(["device memory", *(size_text(e.device_bytes) for e in estimates)])
    rows.append(["largest shard", *(size_text(e.largest[1]) for e in estimates)])
    rows.append(["estimated time", *(seconds_text(max(e.seconds())) for e in estimates)])
    if any(e.misfits for e in estimates):
        rows.append(["tensors that do not fit", *(f"{len(e.misfits):,}" for e in estimates)])
    return table(["", *labels], rows)


def _head(estimate: ClusterEstimate) -> str:
    mesh, profile, (owner, owners) = estimate.mesh, estimate.profile, estimate.rate.owners
    axes = ",".join(f"{name}={size}" for name, size in mesh.axes.items())
    hosts = "one host"
    if mesh.hosts > 1:
        hosts = f"{mesh.hosts:,} hosts with {mesh.devices // mesh.hosts:,} each"
    if mesh.processes_per_host > 1:
        hosts += f", {mesh.processes_per_host:,} processes a host"
    doing = "load" if estimate.saves is None else f"save in layout {estimate.saves}"
    files = number_text(estimate.checkpoint_files, "file")
    lines = [
        estimate.path,
        f"model    {count_text(estimate.parameters)} parameters,"
        f" {size_text(estimate.checkpoint_bytes)} in {files};"
        f" {number_text(len(estimate.shards), 'tensor')} to {doing}",
        f"cluster  mesh {axes}: {number_text(mesh.devices, 'device')} on {hosts}",
        f"storage  {estimate.storage}: {seconds_text(profile.latency_seconds)} a request,"
        f" {profile.streams} at once; {size_text(profile.bandwidth_bytes_per_second)}/s a"
        f" stream, {size_text(estimate.rate.bytes_per_second)}/s a {owner},"
        f" {size_text(estimate.rate.shared_bytes_per_second)}/s all hosts",
    ]
    if any(map(_exchanged, estimate.costs)):
        lines.append(f"exchange {estimate.rate.exchange_text()} (accelerators)")
    if estimate.is_orbax:
        lines.append(
            f"chunks   read whole, for each shard of a {owner} that has a part of one; uncompressed"
        )
    if not estimate.is_complete:
        lines.append(
            f"planned  {len(estimate.processes)} of {mesh.processes:,} {owners}, at even"
            " distances; figures of all hosts are scaled up from them"
        )
    return "\n".join(lines)


def _rules(estimate: ClusterEstimate) -> str:
    rows = []
    for rule, leaves in estimate.rules:
        text = "no rule matches: replicated" if rule is None else str(rule)
        rows.append([text, f"{leaves:,}"])
    shown = rows[:_MOST_RULES]
    more = f"\n… and {len(rows) - _MOST_RULES} more rules" if len(rows) > _MOST_RULES else ""
    return table(["sharding rule", "tensors"], shown) + more if rows else ""


def _misfits(estimate: ClusterEstimate, top: int) -> str:
    """Format tensors that cannot be sharded as their rule says, by pattern."""
    families = name_families((m.name, (m.shape, m.reason)) for m in estimate.misfits)
    lines = [f"{pattern} {list(shape)}: {reason}" for pattern, (shape, reason), _ in families[:top]]
    more = len(families) - len(lines)
    lines += [f"… and {more:,} more like these"] if more > 0 else []
    return "\n".join(["not sharded as their rule says", *lines]) if families else ""


def _table(estimate: ClusterEstimate) -> str:
    values: Sequence[float] = estimate.process_parameters
    rows = [["parameters", *_span(values, count_text), _sum(estimate, values, count_text)]]
    for name, of, text in _figures([estimate]):
        values = [of(cost) for cost in estimate.costs]
        total = _sum(estimate, values, text)
        if text is _ratio:
            total = text(sum(estimate.costs, Cost()).over_read)
        rows.append([name, *_span(values, text), total])
    times = estimate.seconds()
    rows.append(["estimated time", *_span(times, seconds_text), seconds_text(max(times))])
    name, nbytes = estimate.largest
    owner, _ = estimate.rate.owners
    return (
        table(["", f"least of a {owner}", f"most of a {owner}", "all hosts"], rows)
        + f"\n\ndevice memory  {size_text(estimate.device_bytes)} a device;"
        f" largest shard {size_text(nbytes)}, of {name}"
    )


def _sharded_saving(estimate: ClusterEstimate) -> str:
    """Format what a conversion to shards of the mesh would save, if it saves time."""
    then = estimate.sharded_costs
    saved = max(estimate.seconds()) - max(estimate.seconds(then))
    if not then or saved < _LEAST_SAVED * max(estimate.seconds()):
        return ""
    read, exchanged = (
        _sum(estimate, [of(cost) for cost in then], size_text)
        for of in (lambda cost: cost.read_bytes, _exchanged)
    )
    return (
        f"stored in shards of this mesh (convert --format sharded --mesh ...): {read} read,"
        f" {exchanged} exchanged, {seconds_text(saved)} less"
    )


def _figures(estimates: Sequence[ClusterEstimate]) -> Iterator[Figure]:
    exchanged = any(any(map(_exchanged, estimate.costs)) for estimate in estimates)
    for name, of, text in _LOAD if estimates[0].saves is None else _SAVE:
        if exchanged or of is not _exchanged:
            yield _ABOUT.get(name, name) if exchanged else name, of, text


def _span(values: Sequence[float], text: Callable[[float], str]) -> tuple[str, str]:
    return text(min(values)), text(max(values))


def _sum(estimate: ClusterEstimate, values: Sequence[float], text: Callable[[float], str]) -> str:
    total = sum(values)
    if estimate.is_complete:
        return text(total)
    return f"~{text(total * estimate.mesh.processes / len(estimate.processes))}"


def _costly(estimate: ClusterEstimate, top: int) -> str:
    """Format the tensors that cost most, by pattern, each with advice."""
    patterns: dict[LeafCost, list[str]] = {}
    counts: dict[LeafCost, int] = {}
    unnamed = ((leaf.name, leaf._replace(name="")) for leaf in estimate.leaf_costs)
    for family in name_families(unnamed):
        patterns.setdefault(family.kind, []).append(family.pattern)
        counts[family.kind] = counts.get(family.kind, 0) + len(family.members)

    def excess(leaf: LeafCost) -> float:
        return counts[leaf] * estimate.rate.excess_seconds(leaf)

    lines, (owner, _) = [], estimate.rate.owners
    for leaf in sorted(patterns, key=excess, reverse=True)[:top]:
        advice = _advice(estimate, leaf)
        if not advice:
            continue
        spec = "" if leaf.spec is None else f" {spec_text(leaf.spec)}"
        more = len(patterns[leaf]) - 1
        lines += [
            patterns[leaf][0] + (f" and {more} more like it" if more else ""),
            f"  {leaf.dtype} {list(leaf.shape)}{spec}: {counts[leaf]:,} x"
            f" {size_text(leaf.read_bytes)} read for {size_text(leaf.needed_bytes)} needed, in"
            f" {count_text(leaf.requests)} request{'' if leaf.requests == 1 else 's'} a {owner};"
            f" costs {seconds_text(excess(leaf))} more than the needed bytes alone",
            f"  {advice}",
        ]
    return "\n".join(["costliest beyond their bytes", *lines]) if lines else ""


def _advice(estimate: ClusterEstimate, leaf: LeafCost) -> str:
    then = estimate.exchanged_costs
    exchange_saves = bool(then) and max(estimate.seconds(then)) < max(estimate.seconds())
    how = "(ReadOptions(replicated='auto'))"
    owner, owners = estimate.rate.owners
    split = [axis for axis, names in enumerate(leaf.spec or ()) if names]
    ways = 1 if leaf.spec is None else estimate.mesh.ways([*itertools.chain(*leaf.spec)])
    if estimate.is_orbax:
        is_much = leaf.read_bytes > 1.5 * leaf.needed_bytes
        return is_much * (
            "Chunks are read whole: `convert` it for this mesh, and each shard is a chunk; or to"
            " safetensors, of which hosts read parts."
        )
    if leaf.read_bytes > 1.5 * leaf.needed_bytes:
        is_inner = estimate.cluster is not None and bool(split) and max(split) > 0
        other = "split dimension 0 instead, " if is_inner else ""
        if exchange_saves:
            other += f"let {owners} exchange what each reads once {how}, "
        return (
            f"Rows are too short to read alone, so gaps are read too: {other}{'or ' * bool(other)}"
            "store it in shards of this mesh (layout sharded)."
        )
    if leaf.requests > 64 and leaf.read_bytes < leaf.requests * estimate.profile.request_bytes // 2:
        each = size_text(leaf.read_bytes / leaf.requests)
        return (
            f"Requests of {each}: split an outer dimension, or store it in shards of this mesh"
            " (layout sharded)."
        )
    if ways == 1 and estimate.mesh.processes > 1 and leaf.needed_bytes >= MIB:
        other = f", or let one read it for all {how}" * exchange_saves
        return f"Every {owner} reads all of it: split it over the mesh{other}."
    return ""


def estimate_document(estimate: ClusterEstimate, top: int) -> dict[str, object]:
    """Return an estimate as a JSON document; bytes, seconds and counts are plain numbers."""
    mesh, times, held = estimate.mesh, estimate.seconds(), estimate.process_parameters
    processes = zip(estimate.processes, held, estimate.costs, times, strict=True)
    return {
        "path": estimate.path,
        "save": estimate.saves,
        "mesh": dict(mesh.axes),
        "devices": mesh.devices,
        "hosts": mesh.hosts,
        "processes_per_host": mesh.processes_per_host,
        "storage": {
            "class": estimate.storage,
            "latency_seconds": estimate.profile.latency_seconds,
            "bandwidth_bytes_per_second": estimate.profile.bandwidth_bytes_per_second,
            "concurrency": estimate.profile.streams,
            "host_bytes_per_second": mesh.processes_per_host * estimate.rate.bytes_per_second,
            "all_hosts_bytes_per_second": estimate.rate.shared_bytes_per_second,
        },
        "exchange": estimate.rate.exchange._asdict(),
        "parameters": estimate.parameters,
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "checkpoint_files": estimate.checkpoint_files,
        "tensors": len(estimate.shards),
        "rules": [
            {"rule": None if rule is None else str(rule), "tensors": leaves}
            for rule, leaves in estimate.rules
        ],
        "misfits": [misfit._asdict() for misfit in estimate.misfits],
        "device_bytes": estimate.device_bytes,
        "largest_shard": {"tensor": estimate.largest[0], "bytes": estimate.largest[1]},
        "processes": [
            {
                "process": number,
                "parameters": held,
                **_cost_document(cost),
                "estimated_seconds": time,
            }
            for number, held, cost, time in processes
        ],
        "total": _total(estimate, estimate.costs),
        "complete": estimate.is_complete,
        "estimated_seconds": max(times),
        "estimated": _estimated(estimate),
        "sharded": _sharded_document(estimate),
        "costliest": [
            {**leaf._asdict(), "excess_seconds": estimate.rate.excess_seconds(leaf)}
            for leaf in estimate.costliest(top)
        ],
    }


def _estimated(estimate: ClusterEstimate) -> list[str]:
    """Return the names of figures that are estimates: more of them where hosts exchange tensors."""
    exchanged = any(map(_exchanged, estimate.costs))
    return ["estimated_seconds", *["requests", "peak_host_bytes"] * exchanged]


def _sharded_document(estimate: ClusterEstimate) -> dict[str, object] | None:
    """Return the cost of the same load from shards of the mesh, if it reads or exchanges less."""
    costs = estimate.sharded_costs
    if not costs:
        return None
    saved = max(estimate.seconds()) - max(estimate.seconds(costs))
    total, then = _total(estimate, estimate.costs), _total(estimate, costs)
    return {
        **then,
        "estimated_seconds": max(estimate.seconds(costs)),
        "saved_read_bytes": total["read_bytes"] - then["read_bytes"],
        "saved_exchanged_bytes": total["exchanged_bytes"] - then["exchanged_bytes"],
        "saved_seconds": saved,
    }


def _total(estimate: ClusterEstimate, costs: Sequence[Cost]) -> dict[str, Any]:
    """Return the sums over all processes, scaled up from those that were planned."""
    scale = estimate.mesh.processes / len(costs)
    total = _cost_document(sum(costs, Cost()))
    return {name: round(value * scale) for name, value in total.items()}


def _cost_document(cost: Cost) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(cost).items() if name != "tensors"}
