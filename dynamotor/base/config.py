"""Every knob of the compiler: one frozen dataclass and the handle through which it is read and patched;
and the arguments of `dynamotor.compile`, which may name knobs.

>>> from dynamotor import config
>>> with config.patch(strict=True):
...     config.strict
True
"""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, dataclass_transform

from .errors import SettingWarning, UsageError

# Channels of the log: base/events.py says at which level each is shown.
CHANNELS = ("breaks", "recompiles", "fallbacks", "timings", "guards", "code", "graphs", "passes", "bytecode")


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    return default if value is None else value.lower() not in ("", "0", "false", "no", "off")


def _default_cache_dir() -> str:
    root = os.environ.get("DYNAMOTOR_CACHE_DIR")
    if root:
        return root
    try:
        return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynamotor")
    except RuntimeError:  # neither $HOME nor an entry in the password file
        return os.path.join(tempfile.gettempdir(), f"dynamotor-{os.geteuid()}")


T = TypeVar("T")


@dataclass_transform()
def _frozen(cls: type[T]) -> type[T]:
    """A frozen dataclass. Type checkers see a plain one, since `ConfigHandle` assigns to the same fields."""
    return dataclass(frozen=True)(cls)


@_frozen
class Config:
    """The settings, with their defaults. The comment above a field says what changing it gains or loses;
    docs/settings.md is generated from these comments.
    """

    # What cannot be captured or built raises instead of running in eager PyTorch.
    strict: bool = False
    # Programs kept per compiled callable (eight times as many with dynamic=True); further variants run in
    # eager PyTorch with a RecompileWarning.
    cache_size_limit: int = 16
    # Random ops draw eager's exact numbers (slower) instead of the compiler's counter-based ones.
    fallback_random: bool = False
    # Reduced precision is rounded after every op, as eager rounds, instead of once per fused kernel.
    exact: bool = False
    # Compiled artefacts are kept on disk and shared by processes.
    disk_cache: bool = True
    # The folder of the disk cache: $DYNAMOTOR_CACHE_DIR, else dynamotor in $XDG_CACHE_HOME or ~/.cache.
    cache_dir: str = ""
    # Whole programs are kept in that folder, so that another process differentiates, lowers and writes no
    # graph again.
    program_cache: bool = True
    # Megabytes that the folder may hold; the least recently used entries go first.
    cache_megabytes: int = 4096
    # The C++ compiler; "" means $CXX, then g++, then clang++.
    cxx: str = ""
    # Further flags of the C++ compiler.
    cxx_flags: tuple[str, ...] = ()
    # Seconds after which a C++ compiler that has not ended is stopped (DM303).
    build_seconds: float = 300.0
    # The vectors that C++ kernels are built for: "" this machine's, "avx512", "avx2", "neon", "sve" or
    # "portable" (the compiler's default). Only instruction sets of this machine can run.
    isa: str = ""
    # What loop kernels are written in: "" follows the device (C++ on a CPU, Triton on an NVIDIA GPU);
    # "triton" on CPU tensors runs them in Triton's interpreter: for tests (bench.verification).
    target: str = ""
    # Warm calls on a GPU are replayed as CUDA graphs (mode="reduce-overhead" turns it on): less host time,
    # more memory held.
    cuda_graphs: bool = False
    # For so many sets of sizes a compiled graph whose sizes differ between calls keeps CUDA graphs; the least
    # recently called with makes room.
    cuda_graph_sizes: int = 16
    # Matrix products on a GPU are timed against generated kernels that do the work around them too
    # (mode="max-autotune" turns it on): seconds more at the first call ever, kept on disk.
    max_autotune: bool = False
    # What backend="auto" (and mode="max-autotune") measures for each graph; "inductor" and other backends may
    # be named too.
    auto_backends: str = "eager,native,native_cudagraphs,xla"
    # How long it takes turns for each graph, after five rounds.
    auto_seconds: float = 1.0
    # With dynamic=None, sizes that differ at a later call become symbols where the backend takes them;
    # otherwise each size is compiled separately.
    symbolic_sizes: bool = True
    # Which graphs run op by op on a GPU while their kernels, or those for new sizes, are built, so that no
    # call waits: "general" ones (whose sizes differ between calls), "all" or "none".
    run_while_building: str = "general"
    # Threads of generated kernels; 0 follows torch.get_num_threads() at the call.
    threads: int = 0
    # Convolutions run channels-last.
    layout_opt: bool = True
    # At inference, values computed from parameters alone are computed once (batch norm, packed weights).
    fold_constants: bool = True
    # Products of half precision on a GPU get rows that fill 16 bytes when each of their sizes is at least
    # this.
    pad_products_from: int = 512
    # The cross-entropy of a linear layer is computed in chunks, with its gradients, where the logits would
    # take so many megabytes in the type of the loss; 0: never. A loss without a backward then costs
    # gradients too.
    chunk_logits_from: float = 512.0
    # How products of groups (mixtures of experts) multiply float32 on a GPU where TF32 is not allowed:
    # "tf32x3" or "bf16x6" (products of parts on the tensor cores, about as exact as float32), "auto" (the
    # quicker of these for the operands' layouts), or "ieee".
    grouped_float32: str = "auto"
    # Pooling and bilinear upsampling on a CPU call aten's kernels, which are quicker; False makes loops of
    # them, as on a GPU, which fuse with what stands around them.
    aten_windows: bool = True
    # Intermediate buffers are kept between calls, so that no call pays for page faults.
    reuse_memory: bool = True
    # How gradients of a DistributedDataParallel module are reduced: "ingraph" (all-reduces inside the
    # compiled backward), "split" (the graph cut at DDP's buckets), "off" (DDP's own way after the whole
    # backward), "auto" (ingraph where it can be).
    ddp: str = "auto"
    # An op or dtype that the XLA device cannot run raises instead of running on the CPU.
    xla_strict: bool = False
    # Indices and integer divisors are checked in XLA's graphs: a wrong one raises at the barrier with its
    # line (costs time).
    xla_debug: bool = False
    # Backend "xla": sizes that differ between calls are padded to a multiple of this, to the next of these,
    # or ("powers") to the next power of two, so that one executable serves many; 0 compiles for each size.
    pad: int | str | tuple[int, ...] = 0
    # Recorded operations after which the XLA device flushes by itself (a loop without mark_step would keep
    # every value alive; XLA compiles 30,000 operations in half a minute, and its compiler may die of more).
    xla_trace_limit: int = 30_000
    # Verify the graph between passes, kernels too after `import bench.verification` (tests do; it costs
    # compile time).
    verify: bool = False
    # Generated C++ is built with GCC's address and undefined-behaviour sanitizers, and planned buffers are
    # allocations of their own (DYNAMOTOR_SANITIZE=1; `make sanitize` preloads the libraries for it): the
    # first
    # wrong access ends the process with a report.
    sanitize: bool = False
    # Every compiled graph runs beside eager, over poisoned and guarded memory; the first node that differs is
    # named (tests do).
    check: bool = False
    # On a CPU, each new graph runs a few times beside its torch calls, for about 3 % of its compilation's
    # time; a callable whose graphs are slower than eager gives one warning.
    warn_slower: bool = True
    # DYNAMOTOR_DEBUG=0..7 and DYNAMOTOR_LOG=name,name; see base/events.py.
    debug: int = 0
    log: str = ""
    # Files for a whole program, read at import: DYNAMOTOR_TRACE (.jsonl, or .json for Perfetto),
    # DYNAMOTOR_REPORT (.html).
    trace: str = ""
    report: str = ""


# Options of torch.compile's inductor that `options=` takes too: those with a counterpart set it.
InductorOptions = TypedDict(
    "InductorOptions",
    {
        "triton.cudagraphs": bool,
        "epilogue_fusion": bool,
        "shape_padding": bool,
        "max_autotune_gemm": bool,
        "layout_optimization": bool,
        "emulate_precision_casts": bool,
        "force_disable_caches": bool,
        "cpp.threads": int,
        "trace.enabled": bool,
        "trace.graph_diagram": bool,
    },
    total=False,
)


class Settings(TypedDict, total=False):
    """Fields of `Config` as keyword arguments, for type checkers (`patch`, `update`)."""

    strict: bool
    cache_size_limit: int
    fallback_random: bool
    exact: bool
    disk_cache: bool
    cache_dir: str
    program_cache: bool
    cache_megabytes: int
    cxx: str
    cxx_flags: tuple[str, ...]
    build_seconds: float
    isa: str
    target: str
    cuda_graphs: bool
    cuda_graph_sizes: int
    max_autotune: bool
    auto_backends: str
    auto_seconds: float
    symbolic_sizes: bool
    run_while_building: str
    threads: int
    layout_opt: bool
    fold_constants: bool
    pad_products_from: int
    chunk_logits_from: float
    grouped_float32: str
    aten_windows: bool
    reuse_memory: bool
    ddp: str
    xla_strict: bool
    xla_debug: bool
    pad: int | str | tuple[int, ...]
    xla_trace_limit: int
    verify: bool
    sanitize: bool
    check: bool
    warn_slower: bool
    debug: int
    log: str
    trace: str
    report: str


class Options(Settings, InductorOptions, total=False):
    """The dictionary that `dynamotor.compile(options=...)` takes."""


def _from_environment() -> Config:
    """The settings of the environment; a value that a field does not take is ignored with a warning."""
    debug = os.environ.get("DYNAMOTOR_DEBUG", "0")
    asked = {
        "debug": int(debug) if debug.isdigit() else debug,
        "log": os.environ.get("DYNAMOTOR_LOG", ""),
        "run_while_building": os.environ.get("DYNAMOTOR_RUN_WHILE_BUILDING", "general"),
    }
    for name in list(asked):
        try:
            check_values({name: asked[name]})
        except UsageError as error:
            warnings.warn(f"DYNAMOTOR_{name.upper()} is ignored: {error}", SettingWarning, stacklevel=2)
            del asked[name]
    return Config(
        strict=_flag("DYNAMOTOR_STRICT", False),
        xla_strict=_flag("DYNAMOTOR_XLA_STRICT", False),
        xla_debug=_flag("DYNAMOTOR_XLA_DEBUG", False),
        disk_cache=_flag("DYNAMOTOR_DISK_CACHE", True),
        program_cache=_flag("DYNAMOTOR_PROGRAM_CACHE", True),
        verify=_flag("DYNAMOTOR_VERIFY", False),
        sanitize=_flag("DYNAMOTOR_SANITIZE", False),
        check=_flag("DYNAMOTOR_CHECK", False),
        isa=os.environ.get("DYNAMOTOR_ISA", ""),
        cache_dir=_default_cache_dir(),
        trace=os.environ.get("DYNAMOTOR_TRACE", ""),
        report=os.environ.get("DYNAMOTOR_REPORT", ""),
        **asked,  # type: ignore[arg-type]
    )


# What holds inside `patch` on this thread (or in this task), instead of the process's settings.
_patched: ContextVar[Config | None] = ContextVar("dynamotor.config", default=None)
_FIELDS = frozenset(Config.__annotations__)
# Types that a field accepts, by the type of its default.
_HOLDS: dict[type, tuple[type, ...]] = {
    bool: (bool, int),
    int: (int,),
    float: (float, int),
    str: (str, os.PathLike),
    tuple: (tuple, list),
}
_TYPES = {name: _HOLDS[type(getattr(Config, name))] for name in _FIELDS} | {"pad": (int, str, tuple)}


# The words that a field takes, and the least number.
_WORDS: dict[str, tuple[str, ...]] = {
    "run_while_building": ("general", "all", "none"),
    "ddp": ("auto", "ingraph", "split", "off"),
    "target": ("", "cpp", "triton"),
}
_AT_LEAST: dict[str, float] = {
    "cache_size_limit": 0,
    "cache_megabytes": 0,
    "build_seconds": 0,
    "cuda_graph_sizes": 0,
    "auto_seconds": 0,
    "threads": 0,
    "pad_products_from": 0,
    "chunk_logits_from": 0,
    "xla_trace_limit": 1,
    "debug": 0,
}


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse a setting of a type that its field does not hold (DM123), and a word or number that means
    nothing there (DM141).
    """
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]):
            raise UsageError(
                "DM123",
                f"dynamotor.config.{name} cannot be {value!r}",
                why=f"its default is {getattr(Config, name)!r}",
                cure="pass " + " or ".join(kind.__name__ for kind in _TYPES[name]),
            )
        if problem := _problem(name, value):
            raise UsageError("DM141", f"dynamotor.config.{name} cannot be {value!r}", cure=problem)


def _problem(name: str, value: Any) -> str:
    """The accepted values, if this one has the right type and no meaning; else ""."""
    words = _WORDS.get(name)
    if words is not None and value not in words:
        return "use one of " + ", ".join(map(repr, words))
    if name in _AT_LEAST and not value >= _AT_LEAST[name]:
        return f"use a number of at least {_AT_LEAST[name]}"
    unknown = (
        [part for part in str(value).split(",") if part and part not in CHANNELS] if name == "log" else []
    )
    return f"{unknown[0]!r} is no channel; use some of {', '.join(CHANNELS)}" if unknown else ""


if TYPE_CHECKING:
    _Fields = Config  # for type checkers the handle has the fields, and no others
else:
    _Fields = object


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """`; did you mean 'x'?` for a name that is close to a known one, else nothing."""
    near = difflib.get_close_matches(str(name), map(str, known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class ConfigHandle(_Fields):
    """The live settings: reads give the current `Config`'s field, assignment replaces the whole `Config`.

    `patch` is a thread's (or task's) own: others neither see it nor change it, and go on with the process's
    settings.
    """

    __slots__ = ("_process",)
    _process: Config

    def __init__(self, current: Config) -> None:
        object.__setattr__(self, "_process", current)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(_patched.get() or self._process, name)

        def __setattr__(self, name: str, value: Any) -> None:
            self.update(**{name: value})

    def __dir__(self) -> list[str]:
        return [*sorted(_FIELDS), "patch", "update", "snapshot"]

    def __repr__(self) -> str:
        return repr(self.snapshot())

    def update(self, **changes: Unpack[Settings]) -> None:
        """Set fields by name, until the enclosing `patch` ends or for the process. An unknown name is an
        AttributeError that lists the known ones."""
        changed = self._changed(changes)
        if _patched.get() is None:
            object.__setattr__(self, "_process", changed)
        else:
            _patched.set(changed)

    def _changed(self, changes: Mapping[str, Any]) -> Config:
        if unknown := sorted(changes.keys() - _FIELDS):
            raise AttributeError(
                f"dynamotor.config has no field {unknown[0]!r}{did_you_mean(unknown[0], _FIELDS)}; "
                f"the fields are: {', '.join(sorted(_FIELDS))}"
            )
        check_values(changes)
        return Config(**{**vars(self.snapshot()), **changes})

    def snapshot(self) -> Config:
        """The current settings, immutable."""
        return _patched.get() or self._process

    @contextlib.contextmanager
    def patch(self, **changes: Unpack[Settings]) -> Iterator[None]:
        """Set fields on this thread for the duration of a `with` block (also usable as a decorator)."""
        before = _patched.get()
        _patched.set(self._changed(changes))
        try:
            yield
        finally:
            _patched.set(before)

    def bound(self, function: Callable[..., Any], *free: str) -> Callable[..., Any]:
        """The function under the settings that hold now (but `free` ones), whenever it is called: for what
        compiles later.
        """
        held = {name: value for name, value in vars(self.snapshot()).items() if name not in free}

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.patch(**held):
                return function(*args, **kwargs)

        return call


config = ConfigHandle(_from_environment())


Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of `compile`. `options` are fields of `config` that hold while this callable is
    compiled.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not isinstance(self.fullgraph, bool):
            raise UsageError(
                "DM102", f"fullgraph must be True or False, not {self.fullgraph!r}", cure="pass True or False"
            )
        if self.dynamic not in (None, True, False):
            raise UsageError(
                "DM103",
                f"dynamic must be None, True or False, not {self.dynamic!r}",
                cure="pass one of these",
            )
        if self.mode not in MODES:
            raise UsageError(
                "DM104",
                f"unknown mode {self.mode!r}{did_you_mean(self.mode, MODES[1:])}",
                cure="use one of " + ", ".join(repr(m) for m in MODES[1:]),
            )
        if unknown := sorted(set(self.options) - _FIELDS):
            raise UsageError(
                "DM105",
                f"unknown option {unknown[0]!r}{did_you_mean(unknown[0], _FIELDS)}",
                why="options are fields of dynamotor.config",
                cure="use one of " + ", ".join(sorted(_FIELDS)),
            )
        check_values(self.options)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `config` that the mode implies and the options set."""
        found: dict[str, Any] = {}
        if self.mode in ("reduce-overhead", "max-autotune"):
            found["cuda_graphs"] = True
        if (self.mode or "").startswith("max-autotune"):
            found["max_autotune"] = True
        return {**found, **self.options}
