"""Strided runs: a compressed description of a region's bytes, without an object per row."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from .affine import AffineView


@dataclasses.dataclass(frozen=True, slots=True)
class StridedRuns:
    """Equal byte runs at regular distances, in file order.

    Run number `(i, j, ...)` begins at `base + i * stride_0 + j * stride_1 + ...`.

    Attributes:
        base: First byte of the first run.
        run_bytes: Length of each run.
        levels: `(count, stride_bytes)` of each level, outermost first; empty for a single run.
    """

    base: int
    run_bytes: int
    levels: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, view: AffineView, itemsize: int, base: int = 0) -> StridedRuns:
        """Return the runs of all elements of a view of a sequence that begins at byte `base`.

        Dimensions that nest without a gap become one run, those of negative strides are reversed,
        and those that repeat elements (stride 0) have each element once.

        Raises:
            ValueError: The dimensions interlace: a run would begin before another one ends.
        """
        if 0 in view.shape:
            return cls(base + view.offset * itemsize, 0, ())
        run = itemsize
        levels: list[tuple[int, int]] = []
        sides = zip(view.shape, view.strides, strict=True)
        axes = [(n, abs(stride) * itemsize) for n, stride in sides if n > 1 and stride]
        reach = itemsize
        for count, stride in sorted(axes, key=lambda axis: axis[1]):
            if stride < reach:
                raise ValueError(f"the dimensions of {view} interlace")
            reach += (count - 1) * stride
            if not levels and stride == run:
                run *= count
            elif levels and stride == levels[-1][0] * levels[-1][1]:
                levels[-1] = (levels[-1][0] * count, levels[-1][1])
            else:
                levels.append((count, stride))
        return cls(base + view.bounds[0] * itemsize, run, tuple(reversed(levels)))

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(count for count, _ in self.levels)

    @property
    def total_bytes(self) -> int:
        """Bytes in all runs."""
        return self.count * self.run_bytes

    @property
    def stop(self) -> int:
        """One past the last byte of the last run."""
        return self.base + sum((n - 1) * stride for n, stride in self.levels) + self.run_bytes

    def coalesce(self, max_gap_bytes: int) -> StridedRuns:
        """Return the runs without gaps of at most `max_gap_bytes`, innermost level first."""
        run, levels = self.run_bytes, list(self.levels)
        while levels and levels[-1][1] - run <= max_gap_bytes:
            count, stride = levels.pop()
            run += (count - 1) * stride
        return StridedRuns(self.base, run, tuple(levels))

    def offsets(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the first bytes of runs `start` to `stop`."""
        number = np.arange(start, self.count if stop is None else stop, dtype=np.int64)
        offset = np.full(number.shape, self.base, dtype=np.int64)
        for count, stride in reversed(self.levels):
            number, index = np.divmod(number, count)
            offset += index * stride
        return offset
