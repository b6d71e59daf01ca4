"""Dtypes of numbers and casts of host values.

Floats round. Where that is not intended, and in integers and booleans, every value must survive.
What may be codes of quantised values becomes floats only where a mapping says `.cast()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError, listed
from orbax_safetensors_layout.format import NARROW_INTEGERS
from orbax_safetensors_layout.options import is_floating

_OF_CODES = re.compile("scale|zero|absmax|codebook|quant|pack|qw")


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds numbers or booleans."""
    return dtype.kind in "biufc" or dtype.type.__module__ == ml_dtypes.bfloat16.__module__


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds integers, also such narrower than a byte."""
    return dtype.kind in "iu" or dtype.name in NARROW_INTEGERS


def is_whole(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds integers or booleans."""
    return is_integer(dtype) or dtype.kind == "b"


def cast_problem(source: np.dtype[Any], dtype: np.dtype[Any]) -> str | None:
    """Return why a cast is refused whatever the values are; None if it is not."""
    if not (is_number(source) and is_number(dtype)):
        return "has no numeric meaning"
    if source.kind == "c" and dtype.kind != "c":
        return "would drop the imaginary part"
    return None


def whole_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the greatest value of an integer dtype, or of booleans."""
    if dtype.kind == "b":
        return 0, 1
    narrow: Any = ml_dtypes.iinfo  # untyped
    bounds = narrow(dtype) if dtype.name in NARROW_INTEGERS else np.iinfo(dtype)
    return int(bounds.min), int(bounds.max)


def in_range(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return which integers are in a range, bounds included."""
    least, most = whole_range(values.dtype)
    if values.dtype.name in NARROW_INTEGERS:
        values = values.astype(np.int8)
    kept = np.ones(values.shape, np.bool_)
    if low > least:
        kept &= values >= low
    if high < most:
        kept &= values <= high
    return kept


def to_whole(values: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return values in an integer dtype or as booleans, and for each whether it is kept."""
    # By range, not by a round trip: C leaves the cast of a number out of range undefined.
    low, high = whole_range(dtype)
    kept = np.ones(values.shape, np.bool_)
    if not is_whole(values.dtype):
        with np.errstate(invalid="ignore"):  # of signalling NaN
            values = values.astype(np.float64)  # holds every float of 32 bits and fewer
            # As floats: `high + 1` is a power of two and exact, `high` may not be.
            kept = np.isfinite(values) & (np.trunc(values) == values)
            kept &= (values >= low) & (values < float(high + 1))
    elif values.dtype.kind != "b":
        kept = in_range(values, low, high)
    with np.errstate(invalid="ignore"):
        if dtype.name in NARROW_INTEGERS:
            values = values.astype(np.int8)  # numpy has no cast from all floats
        return values.astype(dtype), kept


def rounded(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `values.astype(dtype)`; see `assign`."""
    result = np.empty_like(values, dtype)
    assign(result, values)
    return result


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """`target[...] = values`, also between small dtypes of which ml_dtypes has no cast."""
    with np.errstate(all="ignore"):
        try:
            target[...] = values
        except TypeError:  # float32 holds every value of both
            target[...] = values.astype(np.float32)


def held(value: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return a number as `dtype`: rounded among floats, exact in others; None where that fails."""
    # Python integers of over 64 bits are objects.
    if is_whole(dtype):
        result, kept = to_whole(value, dtype)
        return result if kept and value.dtype.kind != "O" else None
    result = rounded(value, dtype)
    if value.dtype.kind == "O":
        return result if np.isfinite(result) else None
    is_same_kind = np.isfinite(value) == np.isfinite(result) and np.isnan(value) == np.isnan(result)
    return result if is_same_kind else None


class Subject(NamedTuple):
    """The leaf that is cast, for errors; `source` is its dtype before the cast."""

    name: str
    file: str | None
    source: np.dtype


def check_castable(source: np.dtype, dtype: np.dtype) -> None:
    """Refuses a cast from complex to real, or from or to a dtype that is not a number."""
    problem = None if source == dtype else cast_problem(source, dtype)
    if problem:
        expected = f"{dtype} (the abstract tree)"
        raise DtypeMismatchError(f"the cast {problem}", expected=expected, found=source)


def cast_into(out: np.ndarray, value: np.ndarray, *, exact: bool, subject: Subject) -> None:
    """Cast `value` into `out`.

    Floating-point targets round as numpy does, unless the cast has to be `exact`, as one that was
    not asked for: JAX imposes it (x64 is off). Integer and boolean targets must hold every value.
    """
    if is_whole(out.dtype):
        result, kept = to_whole(value, out.dtype)
        if not kept.all():
            raise _lost(value[~kept], out.dtype, subject, exact or not is_whole(value.dtype))
        out[...] = result
        return
    assign(out, value)
    if exact and not (kept := _survived(value, out)).all():
        raise _lost(value[~kept], out.dtype, subject, exact)


def _survived(value: np.ndarray, result: np.ndarray) -> np.ndarray:
    real = result if value.dtype.kind == "c" else result.real
    with np.errstate(invalid="ignore"):  # of signalling NaN
        if is_whole(value.dtype):
            back, kept = to_whole(real, value.dtype)
            kept &= back == value
        else:
            back = rounded(real, value.dtype)
            kept = (back == value) | ((back != back) & (value != value))
    return kept


def _lost(lost: np.ndarray, dtype: np.dtype, subject: Subject, exact: bool) -> DtypeMismatchError:
    source = subject.source
    hint = "Ask for a dtype that holds the values."
    if exact and source.itemsize == 8 and dtype.itemsize == 4:
        hint = (
            "If the tree asks for 64 bits: JAX's are off; set"
            " jax.config.update('jax_enable_x64', True), or ask for a dtype that holds the values."
        )
    return DtypeMismatchError(
        f"{lost.size} values do not fit {dtype}",
        file=subject.file,
        tensor=subject.name,
        expected=dtype,
        found=f"{source}, for instance {lost[0]}",
        hint=hint,
    )


def python_scalar(value: np.ndarray, kind: type, subject: Subject) -> bool | int | float:
    """Return a 0-d array as a Python scalar of a type, which must hold the value."""
    number = value.item() if value.dtype.kind in "biufc" else float(value)
    try:
        scalar: bool | int | float = kind(number)
        kept = scalar == number or (kind is float and number != number)
    except (TypeError, ValueError, OverflowError):  # complex, NaN or infinite
        kept = False
    if not kept:
        raise DtypeMismatchError(
            f"the value is not of type {kind.__name__}",
            file=subject.file,
            tensor=subject.name,
            expected=kind.__name__,
            found=f"{number} ({value.dtype})",
        )
    return scalar


class AskedCast(NamedTuple):
    """A cast of a tensor to the dtype that a tree or an option asks for."""

    name: str
    shape: tuple[int, ...]
    source: np.dtype
    dtype: np.dtype
    with_parts: bool = False  # whether what is beside the tensor is taken, too, as to decode it


class RelatedNames:
    """Names by the modules and tensors that they may go with.

    A tensor goes with another where its name has that one's, or its module's, in it: with `up.w` go
    `up.w.scale`, `up.w_scale`, `up.bias`, `up_scale`, `up.quant.scale` and `scales.up.w`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names
        self._texts: list[tuple[str, str]] | None = None
        self._found: dict[str, list[str]] = {}  # by what is in names

    def of(self, name: str) -> Iterator[str]:
        """Yields the other names that go with a tensor, perhaps more than once."""
        for stem in filter(None, (name, name.rpartition(".")[0])):
            yield from (other for other in self._with(stem) if other != name)

    def _with(self, stem: str) -> list[str]:
        if self._texts is None:
            self._texts = [(_dotted(name), name) for name in self._names]
        if stem not in self._found:
            text = _dotted(stem)
            self._found[stem] = [name for dotted, name in self._texts if text in dotted]
        return self._found[stem]


def _dotted(name: str) -> str:
    return f".{name.replace('_', '.')}."


def refuse_casts_of_codes(
    casts: Iterable[AskedCast],
    names: Iterable[str],
    dtype_of: Callable[[str], np.dtype],
    hint: Callable[[AskedCast], str],
    file: str | None = None,
) -> None:
    """Refuses to make floats of what may be codes, whose values follow from a scale or the like.

    These are numbers of 8 bits and fewer, whatever is beside them; matrices of wider integers that
    floats or bytes go with, as packed words are (not elements of lists); and bytes in the guise of
    floats, which have parts (`up.weight` beside `up.weight.absmax`).

    Args:
        casts: What is asked for.
        names: All tensors that there are.
        dtype_of: Returns the dtype of one of them.
        hint: Returns what to do instead of a cast.
        file: For the error.

    Raises:
        DtypeMismatchError: One of the casts may be of codes.
    """
    names = list(names)
    related = RelatedNames(names)
    modules: set[str] = set()

    def has_parts(name: str) -> bool:
        if not modules:
            modules.update(name.rpartition(".")[0] for name in names)
        return name in modules

    def may_be_codes(cast: AskedCast) -> bool:
        if is_whole(cast.dtype) or cast.dtype == cast.source or cast.source.kind in "bc":
            return False
        if cast.source.itemsize == 1:
            return cast.dtype.itemsize > 1 or is_integer(cast.source)
        if is_integer(cast.source):
            module, _, last = cast.name.rpartition(".")
            if last.isdecimal() or len(cast.shape) < 2:
                return False
            beside = [*related.of(cast.name)]
            if not module:  # and of a tree's own leaves all, where their names speak of it
                own = [name for name in names if "." not in name and name != cast.name]
                beside += own if any(map(_OF_CODES.search, [last, *own])) else []
            dtypes = map(dtype_of, beside)
            return any(is_floating(of) or (of.itemsize == 1 and of.kind != "b") for of in dtypes)
        return not cast.with_parts and has_parts(cast.name)

    codes = [cast for cast in casts if may_be_codes(cast)]
    if codes:
        raise DtypeMismatchError(
            "the tensor may be codes of quantised values, of which a cast makes other values",
            file=file,
            tensor=codes[0].name,
            expected=f"{codes[0].source}, as it is stored",
            found=f"{codes[0].dtype}, for {listed([repr(cast.name) for cast in codes], 3)}",
            hint=hint(codes[0]),
        )


def hint_to_cast_before(cast: AskedCast) -> str:
    """Return what to do where a save would cast codes."""
    return (
        "Leave out the dtype of the save; or, if these are values, cast the leaf before:"
        f" leaf.astype({cast.dtype.name!r})."
    )
