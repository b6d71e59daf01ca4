"""Options: every knob of the package and its default, in one place."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np

PathLike = str | os.PathLike[str]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_CALL_SECONDS = 1e-5  # of a request, in the interpreter and the system


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageProfile:
    """The cost model of a storage class, for read plans.

    A gap between two needed ranges is read through when that takes less time than a request. The
    latency of local files is that of a system call and the interpreter (4 to 9 us measured), not
    the disk's.
    """

    latency_seconds: float  # time of one more request, without its bytes
    bandwidth_bytes_per_second: float  # of one stream
    request_bytes: int  # the largest request; longer ranges are split to run concurrently
    staging_bytes: int  # the largest one through a buffer; of local reads, what a cache holds
    concurrency: int  # requests in flight at once
    cached_concurrency: int | None = None  # the same for files in the host's page cache
    modelled_concurrency: int | None = None  # the same in cost models, see `streams`
    least_request_bytes: int = 1 * MIB  # long ranges are split no further
    shared_bytes_per_second: float = 25e9  # of all hosts together
    host_bytes_per_second: float | None = None  # of a host with all its streams, if it is known
    streams_share: bool = False  # the bandwidth: then it is also that of all streams of a host

    @property
    def max_gap_bytes(self) -> int:
        """The largest gap that is cheaper to read than to skip.

        Streams that share a bandwidth wait for storage together, but what a host does for each
        request follows one after the other.
        """
        own = min(self.latency_seconds, _CALL_SECONDS)
        waiting = (self.latency_seconds - own) / (self.streams if self.streams_share else 1)
        return int((own + waiting) * self.bandwidth_bytes_per_second)

    @property
    def streams(self) -> int:
        """Requests in flight at once by the cost model, the same on hosts of any CPUs."""
        return self.modelled_concurrency or self.concurrency

    def balanced_request_bytes(self, total_bytes: int) -> int:
        """Return the length of requests that costs least time, where streams limit a load.

        With requests of `n` bytes, latency takes the share `max_gap_bytes / n` of the time; at the
        end streams idle for half a request, the share `n * concurrency / (2 * total_bytes)`.
        """
        each = total_bytes / self.concurrency
        return max(self.least_request_bytes, int(math.sqrt(2 * self.max_gap_bytes * each)))

    def within(self, budget_bytes: int) -> StorageProfile:
        """Return the profile with a concurrency whose staging takes a quarter of a budget."""
        most = max(1, budget_bytes // (4 * self.staging_bytes))
        return dataclasses.replace(self, concurrency=min(self.concurrency, most))


# One stream brings 85 to 90 MB/s from S3, after 0.1 to 0.2 s for a small object (Amazon's "Best
# practices design patterns: optimizing Amazon S3 performance"), so about 32 fill 25 Gbit/s.
_OBJECT_STORE = StorageProfile(
    latency_seconds=0.05,
    bandwidth_bytes_per_second=85e6,
    request_bytes=16 * MIB,
    staging_bytes=8 * MIB,
    concurrency=32,
)

# A web server or a CDN; not measured, and `ReadOptions` takes others.
_WEB = StorageProfile(
    latency_seconds=0.03,
    bandwidth_bytes_per_second=50 * MIB,
    request_bytes=32 * MIB,
    staging_bytes=16 * MIB,
    concurrency=32,
)

_LEAST_LOCAL = 8

# 2.4 GiB/s: one cold virtio disk; a page-cached file is five times faster. Copies out of the page
# cache need a thread a core, disks some requests in flight: of what O_DIRECT alone reaches, 4
# reached 0.85, 8 0.92 (a virtio disk of 3.4 GiB/s).
_LOCAL = StorageProfile(
    latency_seconds=1e-5,
    bandwidth_bytes_per_second=2.4 * GIB,
    request_bytes=8 * MIB,
    least_request_bytes=8 * MIB,
    staging_bytes=2 * MIB,
    concurrency=min(32, max(_LEAST_LOCAL, 2 * (os.cpu_count() or 1))),
    modelled_concurrency=_LEAST_LOCAL,
    cached_concurrency=min(32, max(2, os.cpu_count() or 1)),
    streams_share=True,
)

PROFILES: Mapping[str, StorageProfile] = {
    "local": _LOCAL,
    # docs/storage.md says where these come from: the clouds' own guides.
    "gs": _OBJECT_STORE,
    "s3": _OBJECT_STORE,
    "az": dataclasses.replace(_OBJECT_STORE, bandwidth_bytes_per_second=60 * MIB),
    "hf": _WEB,
    "https": _WEB,
}


def storage_profile(kind: str) -> StorageProfile:
    """Return the cost model of a storage class; without a row of its own, that of a local disk."""
    return PROFILES.get(kind, _LOCAL)


class ExchangeProfile(NamedTuple):
    """The cost model of an exchange among the devices of several processes."""

    bytes_per_second: float  # that the devices of a process gather
    round_seconds: float
    program_seconds: float  # XLA compiles it, while a load reads

    def seconds(
        self, nbytes: float, rounds: int = 0, programs: int = 0, *, reading: float = 0.0
    ) -> float:
        """Return the time of rounds in which `nbytes` are gathered, and of `reading` before."""
        gathering = nbytes / self.bytes_per_second + rounds * self.round_seconds
        return max(reading, programs * self.program_seconds) + gathering


# Fitted to `benchmarks/exchange.py`: 2, 4 and 8 processes of two devices, on one host of two cores.
# The rate and a round are for each process of a host, and each device of it that it exchanges with;
# a program is for each process, and takes longer the more parts rows are cut into; at times this
# machine compiles as slowly as that, at others in two thirds of it.
_CPU = ExchangeProfile(bytes_per_second=8e9, round_seconds=0.00025, program_seconds=0.036)
_CPU_PART_SECONDS = 0.0128
_ACCELERATOR = ExchangeProfile(bytes_per_second=3e9, round_seconds=0.002, program_seconds=0.2)


def exchange_profile(
    platform: str = "", devices: int = 4, processes_per_host: int = 1, parts: int = 1
) -> ExchangeProfile:
    """Return the cost model of the devices of a platform, as JAX names it; or of accelerators.

    On CPUs the cores of a host do all of the work: each of its processes compiles, and sends to
    those `devices` on it that exchange with each other. Each keeps one of so many `parts` of rows.
    """
    if platform != "cpu":
        return _ACCELERATOR
    rate, round_seconds, program_seconds = _CPU
    each = processes_per_host * devices
    program_seconds += _CPU_PART_SECONDS * parts * (parts > 1)
    return ExchangeProfile(rate / each, round_seconds * each, program_seconds * processes_per_host)


class CacheFolder(NamedTuple):
    """A folder of this host for ranges of remote files, of at most so many bytes."""

    path: str
    most_bytes: int


class Progress(NamedTuple):
    """The argument of progress callbacks, after each tensor; bytes are of this process's share."""

    done_bytes: int
    total_bytes: int
    tensor: str  # the one that was finished last


OnProgress = Callable[[Progress], None] | None


def require(is_valid: object, name: str, expected: str, value: object) -> None:
    """Refuses the value of an option or argument that is not valid."""
    if not is_valid:
        raise ValueError(f"{name} must be {expected}, not {value!r}.")


class _CheckedOptions:
    """Refuses values that make no sense, by the option's name; accepts None where it is default."""

    __slots__ = ()

    def __post_init__(self) -> None:
        kind, fields = type(self).__name__, dataclasses.fields(self)  # type: ignore[arg-type]
        for name, default in ((field.name, field.default) for field in fields):
            value = getattr(self, name)
            if value is None and default is None:
                continue
            if name == "dtype":
                object.__setattr__(self, name, _floating_dtype(kind, value))
            elif name == "metadata":
                _check_metadata(kind, value)
            elif name == "model":
                _check_model(f"{kind}.model", value)
            else:
                expected, accepts = _RULE_OF[name]
                require(accepts(value), f"{kind}.{name}", expected, value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy(_CheckedOptions):
    """Limits on retries of a request to a remote storage that fails temporarily.

    Temporary failures are: time-out, connection reset, a body that ends too soon, HTTP status 408,
    425, 429 or 5xx but for 501 and 505. Pauses grow from `base_seconds`, doubling, up to
    `max_seconds`, and are longer where the server asks for it (`Retry-After`).

    Attributes:
        attempts: The most tries of one request, the first included.
        total_seconds: After this time, counted from the first try, no other is begun.
        attempt_seconds: How long one try may take.
        jitter: The share of a pause that is random, 0 to 1, so that many hosts do not come back at
            the same moment.
    """

    attempts: int = 10
    total_seconds: float = 180.0
    attempt_seconds: float = 60.0
    base_seconds: float = 0.1
    max_seconds: float = 15.0
    jitter: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(_CheckedOptions):
    """Options of reading a checkpoint.

    Attributes:
        memory_budget_bytes: Host bytes that reads may hold beyond the arrays that are returned:
            staging buffers, and buffers whose shard is not yet on its device. On the CPU backend
            arrays adopt the buffers they were read into, so those do not count.
        concurrency: Requests in flight at once; None takes the storage class's default.
        request_bytes: Largest single request; None takes the storage class's default.
        latency_seconds: Per storage class (`{"local": 1e-5}`), instead of the default.
        bandwidth_bytes_per_second: Per storage class, instead of the default.
        host_bandwidth_bytes_per_second: Per storage class, of a host with all its streams; by
            default a guess.
        shared_bandwidth_bytes_per_second: Per storage class, of all hosts together.
        replicated: Who reads bytes that several processes need, because a tensor is replicated or
            partly so, or because they lie in short gaps between what each needs. `"each"`: each
            process, without communication. `"read_once"`: one process, and the devices exchange
            them. `"auto"`: of these for each group of tensors the one that takes less time. With
            the latter two all processes must load the same tree with the same options; `"auto"`
            waits for no others where no sharding of the tree has devices of theirs. What waits to
            be exchanged takes at most a quarter of `memory_budget_bytes` on a host, or its parts of
            one leaf; what is being exchanged takes as much on a device, or two of the largest
            shards.
        timeout_seconds: How long a process waits for the others at each step, unless each reads.
        mmap: Let arrays on the CPU backend adopt the mapped pages of local files where the data is
            64-byte aligned. Such a file must not be overwritten in place or truncated while an
            array lives (replacing it by rename is safe), and numpy arrays are read-only.
        register_memory: Register host memory with the driver of CUDA devices before they transfer
            from it, by a function of JAX that is not documented, where all leaves are on such
            devices and the version of JAX has been tried (0.11); elsewhere nothing changes. The
            end of a registration waits for what is queued on the devices, and Python with it.
        verify: Compare with the checksums of a save with `WriteOptions(digests=True)`: the
            manifest, the index and every file that something is read of, wholly, so this suits
            loads of whole files. Nothing is mapped. A checkpoint without checksums is refused.
        strict: Refuse a checkpoint that has tensors, numbers or strings which the abstract tree
            does not name. With a mapping nothing changes: its own `strict` and `ignore` say which
            tensors may be left.
        progress: False, True (a bar where stderr is a terminal and the `progress` extra is
            installed, else lines at intervals), or a callable that is given a `Progress`.
        retries: How long failed requests are tried again; see `RetryPolicy`.
        cache: A folder of this host in which ranges of remote files are kept, checked by checksums,
            for the next load of the same version on any mesh; None keeps nothing. Local paths do
            without. It may be shared by processes, and removed at any moment.
        cache_bytes: The most bytes in it; what was not used for longest is evicted.
    """

    memory_budget_bytes: int = 2 * GIB
    concurrency: int | None = None
    request_bytes: int | None = None
    latency_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth_bytes_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_bandwidth_bytes_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shared_bandwidth_bytes_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    replicated: Literal["auto", "each", "read_once"] = "auto"
    timeout_seconds: float = 1800.0
    mmap: bool = False
    register_memory: bool = True
    verify: bool = False
    strict: bool = False
    progress: bool | Callable[[Progress], None] = False
    retries: RetryPolicy = dataclasses.field(default_factory=RetryPolicy)
    cache: PathLike | None = None
    cache_bytes: int = 100 * GIB

    @property
    def cache_folder(self) -> CacheFolder | None:
        """The folder and the bound of the cache, if there is one."""
        if self.cache is None:
            return None
        return CacheFolder(os.path.abspath(os.path.expanduser(self.cache)), self.cache_bytes)

    def profile(self, kind: str, total_bytes: int | None = None) -> StorageProfile:
        """Return the cost model of a storage class, for a read of so many bytes."""
        base = storage_profile(kind)
        profile = dataclasses.replace(
            base,
            latency_seconds=self.latency_seconds.get(kind, base.latency_seconds),
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second.get(
                kind, base.bandwidth_bytes_per_second
            ),
            host_bytes_per_second=self.host_bandwidth_bytes_per_second.get(kind),
            shared_bytes_per_second=self.shared_bandwidth_bytes_per_second.get(
                kind, base.shared_bytes_per_second
            ),
            concurrency=self.concurrency or base.concurrency,
            cached_concurrency=self.concurrency or base.cached_concurrency,
            modelled_concurrency=self.concurrency or base.modelled_concurrency,
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

    def modelled_profile(self, kind: str) -> StorageProfile:
        """Return the cost model of a storage class, the same on hosts of any CPUs."""
        streams = self.profile(kind).streams
        return dataclasses.replace(self, concurrency=streams).profile(kind)


@runtime_checkable
class Quantizes(Protocol):
    """An `osl.Quantization`: which weights are written quantised, and how."""

    def apply(self, weights: Mapping[str, Any], dtype: Any = None) -> dict[str, Any]:
        """Return the tensors of the files, expressions as the weights are, by name."""

    def configured(
        self, files: Mapping[str, bytes], weights: Mapping[str, Any]
    ) -> dict[str, bytes]:
        """Return the files beside the model, with what they say of its weights."""

    def fingerprint(self) -> str:
        """Return a text that tells it from those that write other values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(_CheckedOptions):
    """Options of writing a checkpoint.

    Attributes:
        layout: `"hf"`: whole tensors in files that `safetensors` and `transformers` open.
            `"sharded"`: every process writes its own shards to its own file and nothing is
            exchanged; `consolidate` makes it `"hf"` later.
        max_file_bytes: In layout `"hf"` the most bytes of tensors in one file; a larger tensor has
            a file of its own. Processes share out files, so several a process keep a save in
            balance.
        file_stem: In layout `"hf"` what files are called, before their numbers and
            `.safetensors`: `model`, or for instance Diffusers' `diffusion_pytorch_model`.
        metadata: `__metadata__` strings of every file; `format` is `"pt"` unless given.
        dtype: Writes floating-point tensors in this dtype, rounded as numpy does.
        model: The folder of the model (or its URL: `hf://org/name`) whose `config.json`, tokenizer
            and the like are put beside the files, so that `transformers` opens them: as they are,
            but for the dtype, the vocabulary and the quantisation, which are those of what is
            written. Or the bytes of such files by name. A handler, layout or `using` block reads
            them when it begins, `save` when it writes.
        code: With `model`, the modules of a model that has its own (`*.py`) come along, too.
        card: Writes a model card, `README.md`: a dict, or a function that returns one for each
            save, of `base_model` and other fields of the hub's metadata, and of `step` and
            `metrics` (a dict), which are its text.
        quantize: Writes the weights that an `osl.Quantization` names quantised, in layout `"hf"`
            and without a manifest; `osl.dequantized` reads them as plain ones. Only for `save`.
        memory_budget_bytes: Host bytes that a save may hold beyond its arrays. The blocking part
            of an asynchronous save then lasts until what is left to copy fits it, from devices with
            memory of their own and of numpy arrays; None copies everything at once.
        concurrency: Writes in flight at once; None takes one a core, two with `fsync`, at most 8.
        fsync: Flush every file to the disk before the save counts as done. Without it a crash of
            the machine, not of the process, can lose a save that was reported as done.
        replicate_below_bytes: In layout `"sharded"` tensors up to this size are written by every
            process that holds a part, so that a restore on the same processes opens one file each.
        digests: Keep a checksum of every file beside them, for `verify`.
        progress: As in `ReadOptions`.
        timeout_seconds: How long a process waits for the others at each step of a save.
        retries: As in `ReadOptions`.
    """

    layout: Literal["hf", "sharded"] = "hf"
    max_file_bytes: int = 5 * 10**9
    file_stem: str = "model"
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtype: Any = None
    model: PathLike | Mapping[str, bytes] | None = None
    code: bool = False
    card: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    quantize: Quantizes | None = None
    memory_budget_bytes: int | None = None
    concurrency: int | None = None
    fsync: bool = True
    replicate_below_bytes: int = 64 * KIB
    digests: bool = False
    progress: bool | Callable[[Progress], None] = False
    timeout_seconds: float = 1800.0
    retries: RetryPolicy = dataclasses.field(default_factory=RetryPolicy)

    @property
    def stem(self) -> str:
        """The stem of files that a save replaces: `file_stem` is that of layout `"hf"` alone."""
        return self.file_stem if self.layout == "hf" else "model"

    @property
    def writers(self) -> int:
        """Threads that write: one a core that copies, two where they also wait for the disk."""
        return self.concurrency or min(8, max(2, os.cpu_count() or 1) * (2 if self.fsync else 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(_CheckedOptions):
    """Options of converting a checkpoint.

    Attributes:
        memory_budget_bytes: Host bytes that a conversion may hold, whatever the checkpoint's size.
            Arrays of an Orbax checkpoint that are larger than half of it pass through a temporary
            file beside the target.
        dtype: Floating-point arrays are rounded to it; None keeps theirs.
        max_file_bytes: In format `"hf"` the most bytes of tensors in one file.
        metadata: `__metadata__` strings of safetensors files, besides the source's.
        use_ocdbt: In format `"orbax"` whether arrays are in OCDBT databases.
        use_zarr3: In format `"orbax"` whether arrays are of version 3 of zarr, or of 2.
        use_compression: In format `"orbax"` whether arrays are compressed with zstd.
        verify: Read back what was written, and compare every bit with what was read.
        progress: As in `ReadOptions`.
        code: As in `WriteOptions`, of what is beside the source, or of `config`.
        timeout_seconds: How long a process of several waits for the others at each step.
        cache: As in `ReadOptions`, of a source of safetensors files.
        cache_bytes: As in `ReadOptions`.
    """

    memory_budget_bytes: int = 2 * GIB
    dtype: Any = None
    max_file_bytes: int = 5 * 10**9
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    use_ocdbt: bool = True
    use_zarr3: bool = True
    use_compression: bool = True
    verify: bool = True
    code: bool = False
    progress: bool | Callable[[Progress], None] = False
    timeout_seconds: float = 7 * 24 * 3600.0
    cache: PathLike | None = None
    cache_bytes: int = 100 * GIB


OptionsT = TypeVar("OptionsT", ReadOptions, WriteOptions, ConvertOptions)


def given_or_default(options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
    """Return the caller's options, or the defaults; refuses those of another kind."""
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"options must be a {kind.__name__}(...), not {options!r}.")
    return options


# Short names, as files have them in capitals, to numpy's.
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


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is floating-point; older releases of JAX do not know all of ml_dtypes'."""
    is_extended = dtype.type.__module__ == ml_dtypes.bfloat16.__module__
    return dtype.kind == "f" or (is_extended and "float" in dtype.name)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_local_path(value: Any) -> bool:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(text, str) and text != "" and "://" not in text and "\0" not in text


def _is_by_class(values: Any, least: float, most: float) -> bool:
    return (
        isinstance(values, Mapping)
        and set(values) <= set(PROFILES)
        and all(isinstance(v, numbers.Real) and least <= float(v) <= most for v in values.values())
    )


def _is_quantization(value: Any) -> bool:
    return isinstance(value, Quantizes) and not isinstance(value, type)


def _is_stem(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]+", value) is not None


_BY_CLASS = f"a dict of storage classes ({', '.join(PROFILES)}) to"
_COUNTS = "memory_budget_bytes concurrency request_bytes max_file_bytes attempts cache_bytes"
_FLAGS = "mmap register_memory strict verify fsync digests code use_ocdbt use_zarr3 use_compression"
# Names of options, what their values must be, and whether one is that.
_SIDE_FILE = re.compile(r"([^./\x00-\x1f\x7f-\x9f][^/\x00-\x1f\x7f-\x9f]*(/(?!$)|$)){1,2}")
_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (_COUNTS, "a positive integer", lambda v: _is_integer(v) and v > 0),
    ("replicate_below_bytes", "a non-negative integer", lambda v: _is_integer(v) and v >= 0),
    (_FLAGS, "True or False", lambda v: isinstance(v, bool)),
    ("timeout_seconds attempt_seconds", "a positive number", lambda v: _is_number(v) and v > 0),
    ("total_seconds base_seconds max_seconds", "a number of seconds", _is_number),
    (
        "latency_seconds",
        f"{_BY_CLASS} numbers of seconds, of a day at most",
        lambda v: _is_by_class(v, 0, 86_400),
    ),
    (
        "bandwidth_bytes_per_second host_bandwidth_bytes_per_second"
        " shared_bandwidth_bytes_per_second",
        f"{_BY_CLASS} numbers from 1 to 1e15",
        lambda v: _is_by_class(v, 1, 1e15),
    ),
    ("file_stem", "a name of letters, digits, '_' and '-'", _is_stem),
    ("jitter", "a number from 0 to 1", lambda v: _is_number(v) and v <= 1),
    (
        "replicated",
        '"auto", "each" or "read_once"',
        lambda v: v in ("auto", "each", "read_once"),
    ),
    ("layout", '"hf" or "sharded"', lambda v: v in ("hf", "sharded")),
    ("progress", "a bool or a function", lambda v: isinstance(v, bool) or callable(v)),
    ("cache", "the path of a local folder", _is_local_path),
    ("card", "a dict, or a function", lambda v: isinstance(v, Mapping) or callable(v)),
    ("quantize", "an osl.Quantization(...)", _is_quantization),
    ("retries", "a RetryPolicy(attempts=..., ...)", lambda v: isinstance(v, RetryPolicy)),
)
_RULE_OF = {name: (text, test) for names, text, test in _RULES for name in names.split()}


def _floating_dtype(kind: str, value: Any) -> np.dtype:
    try:
        dtype: np.dtype = np.dtype(_DTYPE_NAMES.get(str(value).lower(), value))
    except TypeError as error:
        raise ValueError(f"{kind}.dtype must be a dtype, not {value!r}.") from error
    if not is_floating(dtype) or dtype.name.startswith(("float4_", "float6_")):
        raise ValueError(
            f"{kind}.dtype must be a floating-point dtype of whole bytes, not {dtype}."
        )
    return dtype


def _check_model(option: str, model: Any) -> None:
    is_valid, shown = isinstance(model, str | os.PathLike), model
    if isinstance(model, Mapping):
        odd = [name for name, data in model.items() if not _is_side_file(name, data)]
        is_valid, shown = bool(model) and not odd, odd[:3] or model  # without all files' bytes
    expected = (
        "the path or URL of a model's folder, or bytes by name, which is at most in one folder and"
        " has no control characters and no leading dot"
    )
    require(is_valid, option, expected, shown)


def _is_side_file(name: Any, data: Any) -> bool:
    is_named = isinstance(name, str) and _SIDE_FILE.fullmatch(name)
    return bool(is_named) and isinstance(data, bytes)


def _check_metadata(kind: str, metadata: Any) -> None:
    require(isinstance(metadata, Mapping), f"{kind}.metadata", "a dict of strings", metadata)
    for pair in metadata.items():
        if not all(type(text) is str for text in pair):
            raise ValueError(f"{kind}.metadata must be a dict of strings; it has {pair!r}.")
        try:
            "".join(pair).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{kind}.metadata must be Unicode text, not {pair!r}.") from error
