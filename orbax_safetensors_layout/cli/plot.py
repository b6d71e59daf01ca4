"""A heat map: which host reads which part of which file."""

from __future__ import annotations

import numpy as np

from orbax_safetensors_layout.cli.verb import UsageError
from orbax_safetensors_layout.forecast import Forecast
from orbax_safetensors_layout.plan.coverage import Coverage, coverage
from orbax_safetensors_layout.units import size_text

_MOST_ROWS, _COLUMNS, _MOST_LABELS = 64, 1200, 24
_LEAST_SHARE = 1e-4
_PARTS = 8  # of a file, marked


def draw(found: Forecast, path: str, files: str = "*") -> None:
    """Draws a forecast.

    Args:
        found: The forecast.
        path: The picture to write; its ending says of what kind.
        files: Pattern of the names of the files to draw.

    Raises:
        UsageError: The forecast is of a tree or of pieces, whose hosts are planned one by one.
        ImportError: matplotlib is not installed.
    """
    if found.fleet is None:
        raise UsageError("--plot draws loads of tensors as they stand, without a --mapping or such")
    try:
        from matplotlib import rcParams
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib: `pip install orbax-safetensors-layout[plot]`"
        ) from error
    count = min(found.grid.processes, _MOST_ROWS)
    hosts = [number * found.grid.processes // count for number in range(count)]
    seen = coverage(found.fleet, hosts, _COLUMNS, files=files)
    if not seen.edges:
        raise UsageError(f"no file is called {files!r}")
    rcParams["font.size"] = 9
    figure = Figure(figsize=(11, 2.2 + 0.09 * max(count, 20)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = np.ma.masked_less(seen.share, _LEAST_SHARE)
    most, least = float(shown.max() or 1.0), float(shown.min() or 1.0)
    wide = most > 10 * least  # a few shares stand out from many small ones
    image = axes.imshow(
        shown,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        norm=LogNorm(least, most) if wide else Normalize(0, most),
        extent=(0, seen.total_bytes, count - 0.5, -0.5),
    )
    _mark_files(axes, seen)
    ticks = range(0, count, max(1, count // 16))
    axes.set_yticks(list(ticks), [str(hosts[tick]) for tick in ticks])
    axes.set_ylabel("host")
    mesh = ",".join(f"{name}={size}" for name, size in found.grid.axes.items())
    read = sum(cost.read_bytes for cost in found.costs)
    needed = sum(cost.needed_bytes for cost in found.costs)
    of = f"{count} of {found.grid.processes:,} hosts" if count < found.grid.processes else "host"
    axes.set_title(
        f"What each {of} reads of {found.path.rstrip('/').rpartition('/')[2]}, mesh {mesh}\n"
        f"{size_text(read)} read in all for {size_text(needed)} needed",
        loc="left",
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    bar.ax.yaxis.set_minor_formatter("")
    bar.set_label("read, of the bytes there (white: nothing)")
    figure.savefig(path)


def _mark_files(axes: object, seen: Coverage) -> None:
    """Lines between files and their numbers, or as many as can be told apart."""
    step = -(-len(seen.edges) // _MOST_LABELS)
    if len(seen.edges) <= 4 * _MOST_LABELS:
        for _, start in seen.edges[1:]:
            axes.axvline(start, color="white", linewidth=0.8)  # type: ignore[attr-defined]
    places = [start for _, start in seen.edges[::step]]
    labels = [str(number * step + 1) for number in range(len(places))]
    size = size_text(seen.total_bytes)
    where = f"{len(seen.edges)} files one after the other, {size}, by number"
    if len(seen.edges) == 1:
        places = [seen.total_bytes * part // _PARTS for part in range(_PARTS + 1)]
        labels = [size_text(place) for place in places]
        where = f"{seen.edges[0][0].rpartition('/')[2]}, without its header"
    axes.set_xticks(places, labels)  # type: ignore[attr-defined]
    axes.set_xlabel(f"place in {where}")  # type: ignore[attr-defined]
