"""Options: every knob of the package and its default, in one place."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageProfile:
    """The cost model of a storage class, for read plans.

    A gap between two needed ranges is read through when `gap / bandwidth < latency`: when reading
    and discarding it is cheaper than one more request.

    Attributes:
        latency_seconds: Time of one more request, without its bytes. For local files it is that of
            a system call and the interpreter (4 to 9 us measured), not the disk's.
        bandwidth_bytes_per_second: Rate of one stream.
        request_bytes: The largest single request; longer ranges are split to run concurrently.
        staging_bytes: The largest request through a staging buffer, for strided destinations; for
            local reads what a core's cache holds.
        concurrency: Requests in flight at once.
        cached_concurrency: The same for files in the host's page cache.
        least_request_bytes: Long ranges are not split into shorter requests to keep all streams
            busy. A disk is not faster for more streams.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    request_bytes: int
    staging_bytes: int
    concurrency: int
    cached_concurrency: int | None = None
    least_request_bytes: int = 1 * MIB

    @property
    def max_gap_bytes(self) -> int:
        """The largest gap, in bytes, that is cheaper to read than to skip."""
        return int(self.latency_seconds * self.bandwidth_bytes_per_second)

    def balanced_request_bytes(self, total_bytes: int) -> int:
        """Return the length of requests that costs least time, where streams limit a load.

        Of requests of `n` bytes, latency takes the share `gap / n` of the time, `gap` being
        `max_gap_bytes`; at the end streams idle for half a request, the share
        `n * concurrency / (2 * total_bytes)`. The sum is least at this length.
        """
        each = total_bytes / self.concurrency
        return max(self.least_request_bytes, int(math.sqrt(2 * self.max_gap_bytes * each)))

    def within(self, budget_bytes: int) -> StorageProfile:
        """Return the profile with a concurrency whose staging takes a quarter of a budget."""
        most = max(1, budget_bytes // (4 * self.staging_bytes))
        return dataclasses.replace(self, concurrency=min(self.concurrency, most))


# A web server or a CDN: tens of milliseconds to the first byte, tens of MB/s a stream. These are
# not measured; `ReadOptions` takes others.
_WEB = StorageProfile(
    latency_seconds=0.03,
    bandwidth_bytes_per_second=50 * MIB,
    request_bytes=32 * MIB,
    staging_bytes=16 * MIB,
    concurrency=32,
)

# One stream brings 85 to 90 MB/s from S3, after 0.1 to 0.2 s for a small object (Amazon's "Best
# practices design patterns: optimizing Amazon S3 performance"), so about 32 fill 25 Gbit/s.
_OBJECT_STORE = StorageProfile(
    latency_seconds=0.05,
    bandwidth_bytes_per_second=85e6,
    request_bytes=16 * MIB,
    staging_bytes=8 * MIB,
    concurrency=32,
)

PROFILES: Mapping[str, StorageProfile] = MappingProxyType(
    {
        # 2.4 GiB/s: one cold virtio disk; a page-cached file is five times faster.
        "local": StorageProfile(
            latency_seconds=1e-5,
            bandwidth_bytes_per_second=2.4 * GIB,
            request_bytes=8 * MIB,
            least_request_bytes=8 * MIB,
            staging_bytes=2 * MIB,
            # Copies out of the page cache need a thread a core, disks some requests in flight: of
            # what O_DIRECT alone reaches, 4 reached 0.85, 8 0.92 (a virtio disk of 3.4 GiB/s).
            concurrency=min(32, max(8, 2 * (os.cpu_count() or 1))),
            cached_concurrency=min(32, max(2, os.cpu_count() or 1)),
        ),
        # docs/storage.md says where these come from: the clouds' own guides.
        "gs": _OBJECT_STORE,
        "s3": _OBJECT_STORE,
        "az": dataclasses.replace(_OBJECT_STORE, bandwidth_bytes_per_second=60 * MIB),
        "hf": _WEB,
        "https": _WEB,
    }
)


class Progress(NamedTuple):
    """The argument of progress callbacks, after each tensor.

    Attributes:
        done_bytes: Finished bytes of this process's share.
        total_bytes: Bytes of this process's share.
        tensor: The tensor that was finished last.
    """

    done_bytes: int
    total_bytes: int
    tensor: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long a request to a remote storage is retried when it fails temporarily.

    Temporary failures are: time-out, connection reset, HTTP status 408, 429 or 5xx, a body that
    ends too soon. Pauses grow from `base_seconds`, doubling, up to `max_seconds`, and are longer
    where the server asks for it (`Retry-After`).

    Attributes:
        attempts: The most tries of one request, the first included; 1 never tries again.
        total_seconds: After this time, counted from the first try, no other is begun.
        attempt_seconds: How long one try may take.
        base_seconds: The longest first pause.
        max_seconds: The longest pause.
        jitter: Which share of a pause is random, 0 to 1, so that many hosts do not come back at
            the same moment.
    """

    attempts: int = 10
    total_seconds: float = 180.0
    attempt_seconds: float = 60.0
    base_seconds: float = 0.1
    max_seconds: float = 15.0
    jitter: float = 1.0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a checkpoint is read.

    Attributes:
        memory_budget_bytes: Host bytes that reads may hold beyond the arrays that are returned:
            staging buffers, and buffers whose shard is not yet on its device. On the CPU backend
            arrays adopt the buffers they were read into, so those do not count.
        concurrency: Requests in flight at once; `None` takes the storage class's default.
        request_bytes: Largest single request; `None` takes the storage class's default.
        latency_seconds: Per storage class (`{"local": 1e-5}`), instead of the default.
        bandwidth_bytes_per_second: Per storage class, instead of the default.
        replicated: What becomes of bytes that several processes need, because a tensor is
            replicated or partly so, or because they lie in short gaps between what each needs.
            `"each"`: each process reads them; there is no communication. `"read_once"`: one process
            reads them, and gathers and exchanges among the devices spread them; all processes must
            load the same tree with the same options. What is read before it is spread takes at most
            a quarter of `memory_budget_bytes` on a host, what is being spread as much on a device,
            or two of the largest shards.
        timeout_seconds: With `"read_once"`: how long a process waits for the others at each step.
        mmap: Let arrays on the CPU backend adopt the mapped pages of local files where the data is
            64-byte aligned, instead of reading them. The file must then not be overwritten in
            place or truncated while an array lives (replacing it by rename is safe), and numpy
            arrays are read-only.
        verify: Hold what is read against the checksums of a save with `WriteOptions(digests=True)`:
            of the manifest, the index and every file that something is read of. What a load leaves
            out of such a file is read as well, so this suits loads of whole files. Nothing is
            mapped. A checkpoint without checksums is refused.
        strict: Refuse a checkpoint that has tensors which the abstract tree does not name.
        progress: False, True (a bar where stderr is a terminal and the `progress` extra is
            installed, else lines at intervals), or a callable that is given a `Progress`.
        retries: How long requests to a remote storage are tried.
    """

    memory_budget_bytes: int = 2 * GIB
    concurrency: int | None = None
    request_bytes: int | None = None
    latency_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth_bytes_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    replicated: Literal["each", "read_once"] = "each"
    timeout_seconds: float = 1800.0
    mmap: bool = False
    verify: bool = False
    strict: bool = False
    progress: bool | Callable[[Progress], None] = False
    retries: RetryPolicy = dataclasses.field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_by_storage_class("latency_seconds", self.latency_seconds)
        _check_by_storage_class("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second)

    def profile(self, kind: str, total_bytes: int | None = None) -> StorageProfile:
        """Return the cost model of a storage class with this object's overrides applied.

        Args:
            kind: The storage class.
            total_bytes: Bytes to read, for requests that are not too long for them.
        """
        base = PROFILES[kind]
        profile = dataclasses.replace(
            base,
            latency_seconds=self.latency_seconds.get(kind, base.latency_seconds),
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second.get(
                kind, base.bandwidth_bytes_per_second
            ),
            concurrency=self.concurrency or base.concurrency,
            cached_concurrency=self.concurrency or base.cached_concurrency,
        )
        request_bytes = self.request_bytes
        if request_bytes is None:  # a small budget does not make ever smaller requests
            request_bytes = min(base.request_bytes, max(self.memory_budget_bytes, 64 * KIB))
            if total_bytes is not None:
                request_bytes = min(request_bytes, profile.balanced_request_bytes(total_bytes))
        staged = max(self.memory_budget_bytes // (4 * profile.concurrency), 64 * KIB)
        return dataclasses.replace(
            profile,
            request_bytes=request_bytes,
            staging_bytes=min(base.staging_bytes, request_bytes, staged),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a checkpoint is written.

    Attributes:
        layout: `"hf"`: whole tensors in files that `safetensors` and `transformers` open.
            `"sharded"`: every process writes its own shards to its own file and nothing is
            exchanged; `consolidate` makes it `"hf"` later.
        max_file_bytes: In layout `"hf"` the most bytes of tensors in one file, by default 5 GB; a
            larger tensor has a file of its own. Files are what processes share out among them, so
            several a process keep a save in balance.
        metadata: `__metadata__` strings of every file; `format` is `"pt"` unless given.
        dtype: Writes floating-point tensors in this dtype, rounded as numpy does.
        memory_budget_bytes: Host bytes that a save may hold beyond its arrays. The blocking part
            of an asynchronous save then lasts until what is left to copy fits it, from devices with
            memory of their own and of numpy arrays; None copies everything at once.
        concurrency: Writes in flight at once; None takes one a core, or two where files are
            flushed to the disk, at most eight.
        fsync: Flush every file to the disk before the save counts as done. Without it a crash of
            the machine, not of the process, can lose a save that was reported as done.
        replicate_below_bytes: In layout `"sharded"` tensors up to this size are written by every
            process that holds them, or a shard of them, so that a restore on the same processes
            opens one file each.
        digests: Keep a checksum of every file beside them, worked out while they are written, for
            `verify`.
        progress: False, True (a bar where stderr is a terminal and the `progress` extra is
            installed, else lines at intervals), or a callable that is given a `Progress`.
        timeout_seconds: How long a process waits for the others at each step of a save.
        retries: How long requests to a remote storage are tried.
    """

    layout: Literal["hf", "sharded"] = "hf"
    max_file_bytes: int = 5 * 10**9
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtype: Any = None
    memory_budget_bytes: int | None = None
    concurrency: int | None = None
    fsync: bool = True
    replicate_below_bytes: int = 64 * KIB
    digests: bool = False
    progress: bool | Callable[[Progress], None] = False
    timeout_seconds: float = 1800.0
    retries: RetryPolicy = dataclasses.field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_dtype(self)
        _check_metadata(self)

    @property
    def writers(self) -> int:
        """Threads that write: one a core that copies, two where they also wait for the disk."""
        return self.concurrency or min(8, max(2, os.cpu_count() or 1) * (2 if self.fsync else 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How a checkpoint is converted.

    Attributes:
        memory_budget_bytes: Host bytes that a conversion may hold, whatever the checkpoint's size.
            Arrays of an Orbax checkpoint that are larger than half of it pass through a temporary
            file beside the target.
        dtype: Writes floating-point arrays in this dtype, rounded as numpy does.
        max_file_bytes: In format `"hf"` the most bytes of tensors in one file.
        metadata: `__metadata__` strings of safetensors files, besides the source's.
        use_ocdbt: In format `"orbax"` whether arrays are in OCDBT databases.
        use_zarr3: In format `"orbax"` whether arrays are of version 3 of zarr, or of 2.
        use_compression: In format `"orbax"` whether arrays are compressed with zstd.
        verify: Read back what was written, and compare every bit with what was read.
        progress: False, True (a bar on stderr; needs the `progress` extra), or a callable that is
            given a `Progress`.
        timeout_seconds: How long a process waits for the others at each step.
    """

    memory_budget_bytes: int = 2 * GIB
    dtype: Any = None
    max_file_bytes: int = 5 * 10**9
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    use_ocdbt: bool = True
    use_zarr3: bool = True
    use_compression: bool = True
    verify: bool = True
    progress: bool | Callable[[Progress], None] = False
    timeout_seconds: float = 7 * 24 * 3600.0

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_dtype(self)
        _check_metadata(self)


OptionsT = TypeVar("OptionsT", ReadOptions, WriteOptions, ConvertOptions)


def given_or_default(options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
    """Return the caller's options, or the defaults.

    Raises:
        TypeError: They are of another kind.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"options is {options!r}; a {kind.__name__}(...).")
    return options


_DTYPE_NAMES = {
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
}
"""Short names, as files have them in capitals, to numpy's."""


def _check_dtype(options: WriteOptions | ConvertOptions) -> None:
    """Makes `options.dtype` a numpy dtype: a floating-point one of whole bytes."""
    if options.dtype is None:
        return
    kind = type(options).__name__
    try:
        found: np.dtype = np.dtype(
            _DTYPE_NAMES.get(options.dtype.lower(), options.dtype)
            if isinstance(options.dtype, str)
            else options.dtype
        )
    except TypeError as error:
        raise ValueError(f"{kind}.dtype is {options.dtype!r}, which is not a dtype.") from error
    if not is_floating(found) or found.name.startswith(("float4_", "float6_")):
        raise ValueError(
            f"{kind}.dtype is {found}; floating-point tensors are written in a floating-point"
            " dtype of whole bytes."
        )
    object.__setattr__(options, "dtype", found)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype holds floating-point numbers, those of ml_dtypes included.

    Older releases of JAX do not know all of these.
    """
    is_extended = dtype.type.__module__ == ml_dtypes.bfloat16.__module__
    return dtype.kind == "f" or (is_extended and "float" in dtype.name)


def _check_metadata(options: WriteOptions | ConvertOptions) -> None:
    metadata: Any = options.metadata
    kind = type(options).__name__
    if not isinstance(metadata, Mapping):
        raise ValueError(f"{kind}.metadata is {metadata!r}; a dict of strings.")
    for pair in metadata.items():
        for text in pair:
            if type(text) is not str:
                raise ValueError(f"{kind}.metadata: {pair!r} must be two strings.")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{kind}.metadata: {text!r} is no text.") from error


def _check_by_storage_class(name: str, values: Any) -> None:
    """Checks a number for some storage classes."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"ReadOptions.{name} must be a dict of storage classes such as {{'local': ...}}, not"
            f" {values!r}."
        )
    unknown = sorted(set(values) - set(PROFILES))
    if unknown:
        raise ValueError(
            f"ReadOptions.{name} names unknown storage classes {unknown};"
            f" known: {sorted(PROFILES)}."
        )
    for kind, value in values.items():
        is_number = isinstance(value, numbers.Real) and 0 <= float(value) < math.inf
        if not is_number or (value == 0 and name != "latency_seconds"):
            raise ValueError(
                f"ReadOptions.{name}[{kind!r}] must be a positive number, not {value!r}."
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


_POLICY = "a RetryPolicy(attempts=..., ...)"
_COUNTS = "memory_budget_bytes concurrency request_bytes max_file_bytes attempts"
_FLAGS = "mmap strict verify fsync digests use_ocdbt use_zarr3 use_compression"
_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (_COUNTS, "a positive integer", lambda v: _is_integer(v) and v > 0),
    ("replicate_below_bytes", "a non-negative integer", lambda v: _is_integer(v) and v >= 0),
    (_FLAGS, "True or False", lambda v: isinstance(v, bool)),
    ("timeout_seconds attempt_seconds", "a positive number", lambda v: _is_seconds(v) and v > 0),
    ("total_seconds base_seconds max_seconds", "a number of seconds", _is_seconds),
    ("jitter", "a number from 0 to 1", lambda v: _is_seconds(v) and v <= 1),
    ("replicated", '"each" or "read_once"', lambda v: v in ("each", "read_once")),
    ("layout", '"hf" or "sharded"', lambda v: v in ("hf", "sharded")),
    ("progress", "a bool or a function", lambda v: isinstance(v, bool) or callable(v)),
    ("retries", _POLICY, lambda v: isinstance(v, RetryPolicy)),
)
"""Names of options, what their values must be, and whether one is that."""
_RULE_OF = {name: (text, test) for names, text, test in _RULES for name in names.split()}


def _check_fields(options: RetryPolicy | ReadOptions | WriteOptions | ConvertOptions) -> None:
    """Refuses a value that its rule does not accept; None is accepted where it is the default."""
    for field in dataclasses.fields(options):
        expected, accepts = _RULE_OF.get(field.name, ("", bool))
        value = getattr(options, field.name)
        is_default = value is None and field.default is None
        if expected and not is_default and not accepts(value):
            kind = type(options).__name__
            raise ValueError(f"{kind}.{field.name} must be {expected}, not {value!r}.")
