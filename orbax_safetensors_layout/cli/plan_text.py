"""Forecasts for people and for programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from orbax_safetensors_layout.analysis import ClusterEstimate, LeafCost
from orbax_safetensors_layout.plan import Cost
from orbax_safetensors_layout.runtime import count_text, number_text, seconds_text, size_text
from orbax_safetensors_layout.sharding import spec_text

from .families import name_families
from .output import table


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


Figure = tuple[str, Callable[[Cost], float], Callable[[float], str]]

_LOAD: tuple[Figure, ...] = (
    ("bytes needed", lambda cost: cost.needed_bytes, size_text),
    ("bytes read", lambda cost: cost.read_bytes, size_text),
    ("over-read", lambda cost: cost.over_read, _ratio),
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
_SOME_ROWS = 8  # of rules


def forecast_text(found: ClusterEstimate, top: int) -> str:
    """A forecast as a page.

    Args:
        found: The forecast.
        top: How many costly tensors to name.
    """
    parts = [_head(found), _rules(found), _misfits(found, top), _table(found), _costly(found, top)]
    return "\n\n".join(part for part in parts if part)


def compared(labels: Sequence[str], found: Sequence[ClusterEstimate]) -> str:
    """Forecasts side by side; of the hosts of each, the most that one has.

    Args:
        labels: What each is called.
        found: The forecasts, all of loads or all of saves.
    """
    rows = [["devices, hosts", *(f"{one.grid.devices:,}, {one.grid.processes:,}" for one in found)]]
    for name, of, text in _figures(found[0]):
        rows.append([f"{name}, a host", *(text(max(map(of, one.costs))) for one in found)])
        if text is not _ratio:
            totals = (_sum(one, [*map(of, one.costs)], text) for one in found)
            rows.append([f"{name}, all hosts", *totals])
    rows.append(["device memory", *(size_text(one.device_bytes) for one in found)])
    rows.append(["largest shard", *(size_text(one.largest[1]) for one in found)])
    rows.append(["estimated time", *(seconds_text(max(one.seconds())) for one in found)])
    if any(one.misfits for one in found):
        rows.append(["tensors that do not fit", *(f"{len(one.misfits):,}" for one in found)])
    return table(["", *labels], rows)


def _figures(found: ClusterEstimate) -> tuple[Figure, ...]:
    return _LOAD if found.saves is None else _SAVE


def _scaled(found: ClusterEstimate, total: float) -> float:
    return total * found.grid.processes / len(found.processes)


def _head(found: ClusterEstimate) -> str:
    grid, profile = found.grid, found.profile
    axes = ",".join(f"{name}={size}" for name, size in grid.axes.items())
    hosts = "one host"
    if grid.processes > 1:
        hosts = f"{grid.processes:,} hosts with {grid.devices_per_process:,} each"
    doing = "load" if found.saves is None else f"save in layout {found.saves}"
    lines = [
        found.path,
        f"model    {count_text(found.parameters)} parameters, {size_text(found.checkpoint_bytes)}"
        f" in {number_text(found.checkpoint_files, 'file')};"
        f" {number_text(found.leaf_count, 'tensor')} to {doing}",
        f"cluster  mesh {axes}: {number_text(grid.devices, 'device')} on {hosts}",
        f"storage  {found.storage}: {seconds_text(profile.latency_seconds)} a request,"
        f" {profile.concurrency} at once; {_rate(profile.bandwidth_bytes_per_second)} a stream,"
        f" {_rate(found.rate.bytes_per_second)} a host",
    ]
    if not found.is_complete:
        lines.append(
            f"planned  {len(found.processes)} of {grid.processes:,} hosts, evenly spread; figures"
            " of all hosts are scaled up from them"
        )
    return "\n".join(lines)


def _rate(bytes_per_second: float) -> str:
    return f"{size_text(bytes_per_second)}/s"


def _rules(found: ClusterEstimate) -> str:
    rows = []
    for rule, leaves in found.rules:
        text = "no rule matches: replicated" if rule is None else str(rule)
        rows.append([text, f"{leaves:,}"])
    shown = rows[:_SOME_ROWS]
    more = f"\n… and {len(rows) - _SOME_ROWS} more rules" if len(rows) > _SOME_ROWS else ""
    return table(["sharding rule", "tensors"], shown) + more if rows else ""


def _misfits(found: ClusterEstimate, top: int) -> str:
    """Tensors that cannot be sharded as their rule says, those alike together."""
    families = name_families((one.name, (one.shape, one.reason)) for one in found.misfits)
    lines = [f"{pattern} {list(shape)}: {reason}" for pattern, (shape, reason), _ in families[:top]]
    more = len(families) - len(lines)
    lines += [f"… and {more:,} more like these"] if more > 0 else []
    return "\n".join(["not sharded as their rule says", *lines]) if families else ""


def _table(found: ClusterEstimate) -> str:
    rows = [
        [
            "parameters",
            *_span(found.process_parameters, count_text),
            _sum(found, found.process_parameters, count_text),
        ]
    ]
    for name, of, text in _figures(found):
        values = [of(cost) for cost in found.costs]
        total = _sum(found, values, text)
        if text is _ratio:
            total = text(sum(found.costs, Cost()).over_read)
        rows.append([name, *_span(values, text), total])
    times = found.seconds()
    rows.append(["estimated time", *_span(times, seconds_text), seconds_text(max(times))])
    name, nbytes = found.largest
    return (
        table(["", "least of a host", "most of a host", "all hosts"], rows)
        + f"\n\ndevice memory  {size_text(found.device_bytes)} a device;"
        f" largest shard {size_text(nbytes)}, of {name}"
    )


def _span(values: Sequence[float], text: Callable[[float], str]) -> tuple[str, str]:
    return text(min(values)), text(max(values))


def _sum(found: ClusterEstimate, values: Sequence[float], text: Callable[[float], str]) -> str:
    total = sum(values)
    return text(total) if found.is_complete else f"~{text(_scaled(found, total))}"


def _costly(found: ClusterEstimate, top: int) -> str:
    """The tensors that cost most, those alike together, and what would mend it."""
    patterns: dict[LeafCost, list[str]] = {}
    counts: dict[LeafCost, int] = {}
    for family in name_families((leaf.name, leaf._replace(name="")) for leaf in found.leaf_costs):
        patterns.setdefault(family.kind, []).append(family.pattern)
        counts[family.kind] = counts.get(family.kind, 0) + len(family.members)

    def excess(leaf: LeafCost) -> float:
        return counts[leaf] * leaf.excess_seconds(found.rate)

    lines = []
    for leaf in sorted(patterns, key=excess, reverse=True)[:top]:
        advice = _advice(found, leaf)
        if not advice:
            continue
        spec = "" if leaf.spec is None else f" {spec_text(leaf.spec)}"
        more = len(patterns[leaf]) - 1
        lines += [
            patterns[leaf][0] + (f" and {more} more like it" if more else ""),
            f"  {leaf.dtype} {list(leaf.shape)}{spec}: {counts[leaf]:,} x"
            f" {size_text(leaf.read_bytes)} read for {size_text(leaf.needed_bytes)} needed, in"
            f" {_requests(leaf.requests)} a host; costs {seconds_text(excess(leaf))} more"
            " than the needed bytes alone",
            f"  {advice}",
        ]
    return "\n".join(["costliest beyond their bytes", *lines]) if lines else ""


def _requests(count: int) -> str:
    return f"{count_text(count)} request{'' if count == 1 else 's'}"


def _advice(found: ClusterEstimate, leaf: LeafCost) -> str:
    """What would mend the cost of a leaf."""
    split = [axis for axis, names in enumerate(leaf.spec or ()) if names]
    ways = 1 if leaf.spec is None else found.grid.ways([*itertools.chain(*leaf.spec)])
    if leaf.read_bytes > 1.5 * leaf.needed_bytes:
        is_inner = found.fleet is not None and bool(split) and max(split) > 0
        other = "split dimension 0 instead, " if is_inner else ""
        return (
            f"Rows are too short to read alone, so gaps are read too: {other}let hosts exchange"
            " what each reads once (ReadOptions(replicated='read_once')), or store it in shards of"
            " this mesh (layout sharded)."
        )
    if leaf.requests > 64 and leaf.read_bytes < leaf.requests * found.profile.request_bytes // 2:
        each = size_text(leaf.read_bytes / leaf.requests)
        return (
            f"Requests of {each}: split an outer dimension, or store it in shards of this mesh"
            " (layout sharded)."
        )
    if ways == 1 and found.grid.processes > 1 and leaf.needed_bytes >= 1 << 20:
        return (
            "Every host reads all of it: split it over the mesh, or let one read it for all"
            " (ReadOptions(replicated='read_once'))."
        )
    return ""


def forecast_document(found: ClusterEstimate, top: int) -> dict[str, object]:
    """A forecast as a JSON document; bytes, seconds and counts are plain numbers."""
    total = sum(found.costs, Cost())
    times = found.seconds()
    return {
        "path": found.path,
        "save": found.saves,
        "mesh": dict(found.grid.axes),
        "devices": found.grid.devices,
        "hosts": found.grid.processes,
        "storage": {
            "class": found.storage,
            "latency_seconds": found.profile.latency_seconds,
            "bandwidth_bytes_per_second": found.profile.bandwidth_bytes_per_second,
            "concurrency": found.profile.concurrency,
            "host_bytes_per_second": found.rate.bytes_per_second,
        },
        "parameters": found.parameters,
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoint_files": found.checkpoint_files,
        "tensors": found.leaf_count,
        "rules": [
            {"rule": None if rule is None else str(rule), "tensors": leaves}
            for rule, leaves in found.rules
        ],
        "misfits": [misfit._asdict() for misfit in found.misfits],
        "device_bytes": found.device_bytes,
        "largest_shard": {"tensor": found.largest[0], "bytes": found.largest[1]},
        "processes": [
            {
                "process": process,
                "parameters": parameters,
                **_cost_document(cost),
                "estimated_seconds": time,
            }
            for process, parameters, cost, time in zip(
                found.processes, found.process_parameters, found.costs, times, strict=True
            )
        ],
        "total": _cost_document(total),
        "complete": found.is_complete,
        "estimated_seconds": max(times),
        "costliest": [
            {**leaf._asdict(), "excess_seconds": leaf.excess_seconds(found.rate)}
            for leaf in found.costliest(top)
        ],
    }


def _cost_document(cost: Cost) -> dict[str, object]:
    return {
        "needed_bytes": cost.needed_bytes,
        "read_bytes": cost.read_bytes,
        "written_bytes": cost.written_bytes,
        "requests": cost.requests,
        "files": cost.files,
        "peak_host_bytes": cost.peak_host_bytes,
    }
