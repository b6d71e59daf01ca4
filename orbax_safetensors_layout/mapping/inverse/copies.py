"""Copies: elements of a tensor that leaves hold more than once, as `repeat` and ties make them.

The first of each is saved, and compared with the others. Until then those of a `repeat` are one
patch, whose first factors are of the copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import MappingError

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Broadcast, permuted
from ..expr.choices import CopyProblem
from .inverse_patches import Factor, Patch, assemble, held_elements, leaves_of

REPEATED = CopyProblem(
    "the copies that repeat(...) makes differ from one another",
    "Make them equal, as by their mean, or accept that the first of each is saved:"
    " repeat(..., lossy_inverse=True).",
)


def tie_problem(leaf: str, saved: str) -> CopyProblem:
    """Return the error where a leaf differs from the one that is saved for it."""
    return CopyProblem(
        f"leaf {leaf!r} differs from {saved!r}, to which it is tied",
        f"Make them equal, or accept that {saved!r} alone is saved:"
        f" rule({leaf!r}, ..., tied_to={saved!r}, lossy_inverse=True).",
    )


class Copies(NamedTuple):
    """Patches with elements of a tensor that are in a saved leaf, too.

    Before the tensor's own factors a patch has those of copies, if it has several.
    """

    saved: str  # the leaf
    patches: list[Patch]
    problem: CopyProblem  # where they differ

    def tensors(
        self, first: BoundExpr, of_leaf: Mapping[str, Sequence[Patch]]
    ) -> Iterator[BoundExpr]:
        """Yields a tensor with copies in place of what the leaf has of it, along a last axis.

        `first` is the tensor as it is saved, of the patches `of_leaf`.
        """
        shape, size = first.shape, math.prod(first.shape)
        rest = [p for leaf, own in of_leaf.items() if leaf != self.saved for p in own]
        of_count: dict[int, list[Patch]] = {}
        for patch in self.patches:
            factors = patch.factors[: copy_factors(patch, size)]
            count = math.prod(factor.extent for factor in factors)
            of_count.setdefault(count, []).append(patch)
        for count, patches in of_count.items():
            others = [p for n, own in of_count.items() if n != count for p in own]
            others = [_repeated(p, count) for p in (*rest, *first_copies(others, size))]
            dtypes = {patch.values.dtype.name for patch in patches} - {first.dtype.name}
            if dtypes:
                raise MappingError(
                    f"{self.problem.text}: it is {dtypes.pop()}, not {first.dtype.name}",
                    hint=self.problem.hint,
                )
            all_patches = [*patches, *others]
            held = held_elements(all_patches)
            if held != count * size:
                raise MappingError(
                    f"not all copies can be compared: of {count} x {size} elements only {held} are"
                    f" in {leaves_of(all_patches)}",
                    hint="Accept that: lossy_inverse=True, of repeat(...) or the tied leaf's rule.",
                )
            whole = assemble((count, *shape), all_patches)
            yield permuted(whole, (*range(1, len(shape) + 1), 0))


def copy_factors(patch: Patch, size: int) -> int:
    """Return how many factors a patch of an array of `size` elements has before those of it."""
    return sum(step >= size for step in patch.boundaries)


def first_copies(patches: Sequence[Patch], size: int) -> list[Patch]:
    """Return the patches of the first of each element's copies, without factors of copies."""
    restricted = [
        patch.restrict(0, 0, 1) if copy_factors(patch, size) else patch for patch in patches
    ]
    remaining = [patch for patch in restricted if patch is not None]
    is_done = all(a is b for a, b in zip(patches, restricted, strict=True))
    return remaining if is_done else first_copies(remaining, size)


def _repeated(patch: Patch, count: int) -> Patch:
    """Return a patch with the same values for each of several copies."""
    if count == 1:
        return patch
    values = patch.values
    values = Broadcast((count, *values.shape), values.dtype, values, 0)
    return Patch(values, (Factor(count, 0, 1, count), *patch.factors))


def copied_along(patch: Patch, number: int) -> Patch:
    """Return a patch of what is the same for all indices of a factor, which is of copies then."""
    factor = patch.factors[number]
    order = (number, *(i for i in range(len(patch.factors)) if i != number))
    moved = Patch(permuted(patch.values, order), tuple(patch.factors[i] for i in order))
    return moved.put(0, factor, moved.values)
