"""Draws a heat map of the parts of the files that each host needs, and of those that it reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from orbax_safetensors_layout.analysis import ClusterEstimate
from orbax_safetensors_layout.plan import Cost, Coverage, coverage
from orbax_safetensors_layout.runtime import size_text

try:
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("--plot needs matplotlib: pip install matplotlib") from error

_MOST_ROWS, _COLUMNS, _MOST_LABELS = 64, 1200, 24
_LEAST_SHARE = 1e-4
_LEAST_NAMED, _LEAST_APART = 0.02, 0.036  # of the width: for a tensor's name, and between two


def draw(estimate: ClusterEstimate, path: str, files: str = "*") -> None:
    """Draw the bytes that the shards need, and below those that are read, of files of a pattern."""
    if estimate.cluster is None:
        raise ValueError("--plot draws loads of plain tensors that are stored whole")
    count = min(estimate.mesh.processes, _MOST_ROWS)
    processes = [number * estimate.mesh.processes // count for number in range(count)]
    seen = coverage(estimate.cluster, processes, _COLUMNS, files=files)
    if not seen.edges:
        raise ValueError(f"no file is called {files!r}")
    rcParams["font.size"] = 9
    figure = Figure(figsize=(11, 3 + 0.1 * max(count, 20)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    shown = [np.ma.masked_less(share, _LEAST_SHARE) for share in (seen.needed, seen.read)]
    most = max(float(share.max() or 0.0) for share in shown) or 1.0
    least = min(float(share.min() or most) for share in shown)
    wide = most > 10 * least  # a few shares stand out from many small ones
    norm = LogNorm(least, most) if wide else Normalize(0, most)
    total, (owner, owners) = sum(estimate.costs, Cost()), estimate.rate.owners
    step = max(1, count // 8)
    for axes, share, label in (
        (upper, shown[0], f"{owner} needs: {size_text(total.needed_bytes)} in all"),
        (lower, shown[1], f"{owner} reads: {size_text(total.read_bytes)} in all"),
    ):
        image = axes.imshow(
            share,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis_r",
            norm=norm,
            extent=(0, seen.total_bytes, count - 0.5, -0.5),
        )
        axes.set_yticks(range(0, count, step), [str(number) for number in processes[::step]])
        axes.set_ylabel(label)
    _mark_tensors(upper, seen)
    _mark_files(lower, seen)
    mesh = ",".join(f"{name}={size}" for name, size in estimate.mesh.axes.items())
    shown_of = f"{count} of {estimate.mesh.processes:,} {owners}"
    of = shown_of if count < estimate.mesh.processes else owner
    name = estimate.path.rstrip("/").rpartition("/")[2]
    title = f"Bytes of {name} that each {of} needs and reads, mesh {mesh}"
    figure.suptitle(title, x=0.01, ha="left")
    bar = figure.colorbar(image, ax=[upper, lower], pad=0.01, fraction=0.03)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    bar.ax.yaxis.set_minor_formatter("")
    bar.set_label("of the bytes there (white: nothing)")
    figure.savefig(path)


def _mark_tensors(axes: Any, seen: Coverage) -> None:
    """Names of large tensors, but for those that would be written over the one before."""
    named: list[tuple[str, float]] = []
    for name, start, nbytes in seen.tensors:
        place = start + nbytes / 2
        is_near = named and place - named[-1][1] < _LEAST_APART * seen.total_bytes
        if nbytes > _LEAST_NAMED * seen.total_bytes and not is_near:
            named.append((name, place))
    if not named:
        return
    top = axes.secondary_xaxis("top")
    top.set_xticks([place for _, place in named])
    top.set_xticklabels([name for name, _ in named], rotation=20, ha="left", fontsize=7)


def _mark_files(axes: Any, seen: Coverage) -> None:
    """Lines between files and their numbers, or round places in a single file."""
    if len(seen.edges) == 1:
        axes.locator_params(axis="x", nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True)
        axes.xaxis.set_major_formatter(lambda place, _: size_text(place))
        axes.set_xlabel(f"place in {seen.edges[0][0].rpartition('/')[2]}, without its header")
        return
    step = -(-len(seen.edges) // _MOST_LABELS)
    if len(seen.edges) <= 4 * _MOST_LABELS:
        for _, start in seen.edges[1:]:
            axes.axvline(start, color="white", linewidth=0.8)
    places = [start for _, start in seen.edges[::step]]
    axes.set_xticks(places, [str(number * step + 1) for number in range(len(places))])
    size = size_text(seen.total_bytes)
    axes.set_xlabel(f"place in {len(seen.edges)} files one after the other, {size}, by number")
