"""The public functions, where the rooms are joined: capture → backend → the compiled callable.

>>> fast = dynamotor.compile(model)
>>> loss = fast(x).sum(); loss.backward()
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from . import _C
from ._module import compile_module
from .backends import resolve, takes_states, takes_symbols
from .base import failures
from .base.config import CompileOptions, Mode, Options, config
from .base.errors import BackendError, BuildError, DynamotorError, InternalError, UsageError
from .base.events import counters, emit, forget_warnings, phase_seconds, timed
from .base.narrowing import checked
from .capture import siblings
from .capture.frontend import make_dispatcher
from .capture.marks import disable, instances_are_called, plain_function
from .capture.optimizer_frames import OptimizerFrames
from .capture.source import trusted_module
from .distributed.data_parallel import data_parallel
from .graph.spec import Backend
from .runtime import device_memory, memory
from .runtime.cpp_build import find_compiler
from .torch_compile_adapter import capture_graph, own_options

__all__ = ["compile", "compile_fx", "disable", "reset"]

_dispatchers: weakref.WeakSet[Any] = weakref.WeakSet()
# Optimizers whose steps graph breaks have compiled; each holds the compiled forms, which end with it.
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_STEPS = "_dynamotor_steps"


# Rules of `step/` for callables that compile in another way, such as an optimizer's step:
# (callable, backend, settings) -> the compiled form, or None.
SPECIAL: list[Callable[[Any, Any, CompileOptions], Any]] = []


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)


C = TypeVar("C")


class Arguments(TypedDict, total=False):
    """Keyword arguments of `compile`."""

    backend: str | Backend | None
    fullgraph: bool
    dynamic: bool | None
    mode: Mode | None
    options: Options | None
    disable: bool
    name: str | None
    recompile_limit: int | None
    isolate_recompiles: bool
    shapes_spec: None
    dynamic_shapes: None


class Decorator(Protocol):
    """`compile(fullgraph=True)`: a decorator that keeps the type of its argument."""

    @overload
    def __call__(self, model: M, /) -> M: ...
    @overload
    def __call__(self, model: type[C], /) -> type[C]: ...
    @overload
    def __call__(self, model: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def compile(model: M, **arguments: Unpack[Arguments]) -> M: ...
@overload
def compile(model: type[C], **arguments: Unpack[Arguments]) -> type[C]: ...
@overload
def compile(model: Callable[P, R], **arguments: Unpack[Arguments]) -> Callable[P, R]: ...
@overload
def compile(model: None = None, **arguments: Unpack[Arguments]) -> Decorator: ...


def compile(
    model: Any = None,
    *,
    backend: str | Backend | None = "native",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
    name: str | None = None,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: Any = None,
    dynamic_shapes: Any = None,
) -> Any:
    """Compile a function or module; also a decorator, with and without arguments.

    model: a function, method, `torch.nn.Module` or any callable; an optimizer's `step` runs as one program
      (`step/optimizer_step.py`). The result is of the same kind: for a module, a module that shares its
      parameters, buffers, hooks and `state_dict` keys; a class is returned itself, with compiled calls.
    backend: "native", "auto" (measures several for each graph, see docs/backends.md), "aot_eager", "eager",
      any backend of `torch.compile` by name, or `(gm, example_inputs) -> callable`.
    fullgraph: raise CaptureError instead of breaking the graph.
    dynamic: None: the first program is for the sizes of its call. Sizes and integers that differ later become
      symbols of one general program; 0 and 1 compile separately. True: symbols from the first call on.
      False: never. `mark_dynamic` and `mark_static` choose single dimensions. XLA compiles each size.
    mode: "reduce-overhead" and "max-autotune" replay warm calls on a GPU as CUDA graphs. "max-autotune" and
      "max-autotune-no-cudagraphs" also time generated kernels against library products there, and choose
      the backend as "auto" does. "default" is None.
    options: fields of `dynamotor.config` for this callable. Options of inductor are accepted: those with a
      counterpart set it, others do nothing and say so once.
    disable: return `model` unchanged.
    recompile_limit: `config.cache_size_limit` for this callable.
    name, isolate_recompiles: accepted for torch.compile's signature; programs and limits are per callable.
    shapes_spec, dynamic_shapes: refused; mark dimensions with `mark_dynamic`.

    Compilation happens at the first call, or in `compiled.warm_up(*args, **kwargs)`: it builds everything
    that a call with these arguments and its backward need, in the present grad mode, and runs nothing. It
    returns the parts that have to be built later, such as code behind a graph break, and why.

    Raises UsageError for a bad argument.
    """
    backend = "native" if backend is None else backend
    if backend == "native" and isinstance(mode, str) and mode.startswith("max-autotune"):
        backend = "auto"
    _check_arguments(options, recompile_limit, {"shapes_spec": shapes_spec, "dynamic_shapes": dynamic_shapes})
    options = own_options(options or {})
    if recompile_limit is not None:
        options = {"cache_size_limit": recompile_limit, **options}
    settings = CompileOptions(fullgraph, dynamic, mode, types.MappingProxyType(options))
    compile_alike = functools.partial(
        compile, backend=backend, fullgraph=fullgraph, dynamic=dynamic, mode=mode, options=options
    )
    if model is None:
        return functools.partial(compile_alike, disable=disable)
    model = model.original if type(model) is _C.Dispatcher else model  # compiled anew, with these arguments
    UsageError.when(
        not callable(model),
        "DM100",
        f"compile() expects a function, a method or an nn.Module, not {type(model).__name__}",
        cure="pass a callable",
    )
    if disable:
        return model
    if isinstance(model, type) and instances_are_called(model):  # a decorator of a class
        return _class(model, compile_alike)
    for rule in SPECIAL:
        if (stands_in := rule(model, backend, settings)) is not None:
            return stands_in
    return _compiled(model, backend, settings, compile_alike)


def _class(model: type, compile_alike: Callable[..., Any]) -> type:
    """The class, with calls of its instances compiled."""
    UsageError.when(
        trusted_module(model.__module__),
        "DM145",
        f"compile({model.__qualname__}) would change the calls of all its instances in this process",
        cure="compile an instance, or a subclass of your own",
    )
    type.__setattr__(model, "__call__", compile_alike(plain_function(model.__call__)))
    return model


def _compiled(
    model: Callable[..., Any],
    backend: str | Backend,
    settings: CompileOptions,
    compile_alike: Callable[..., Any],
) -> Any:
    """The compiled function or module."""
    symbolic: Callable[[str, bool], bool] = functools.partial(takes_symbols, backend, settings)
    states = takes_states(backend)
    backend_call = data_parallel(_guarded_backend(resolve(backend), backend, settings), settings.options)
    step = functools.partial(_compiled_step, backend, settings)

    def make(fn: Callable[..., Any], backend: str | Backend | None) -> Any:
        dispatcher = make_dispatcher(fn, settings, backend_call, symbolic, states, backend)
        # A backend that is a callable may have effects; under check each call runs beside eager already.
        compiler = dispatcher.miss.__self__
        compiler.share.is_timed = backend == "native" and not settings.settings.get("check")
        OptimizerFrames(step, compiler.inner, compiler.share)
        _dispatchers.add(dispatcher)
        return dispatcher

    if isinstance(model, torch.nn.Module):
        return _module(model, make, backend, compile_alike)
    dispatcher = make(model, backend)
    functools.update_wrapper(dispatcher, model, updated=())
    own = {
        "warm_up": dispatcher.miss.__self__.warm_up_own,
        "compiled_again": compile_alike,
        "__prepare_scriptable__": lambda: model,  # torch.jit.script compiles the function itself
    }
    vars(dispatcher).update(own)  # attributes that are set are the function's
    return dispatcher


def _compiled_step(backend: str | Backend, settings: CompileOptions, method: types.MethodType) -> Any:
    """The compiled form of an optimizer's `step` that a graph break calls; None if it has none."""
    optimizer = checked(torch.optim.Optimizer, method.__self__)
    held = vars(optimizer).setdefault(_STEPS, [])
    key = method.__func__, backend, settings
    for known, step in held:
        if known == key:
            return step
    _optimizers.add(optimizer)
    step = next(filter(None, (rule(method, backend, settings) for rule in SPECIAL)), None)
    held.append((key, step))
    return step


def _module(
    model: torch.nn.Module,
    make: Callable[[Callable[..., Any], str | Backend | None], Any],
    backend: str | Backend,
    compile_alike: Callable[..., Any],
) -> Any:
    """A module whose calls are compiled, or, for DDP's wrapper, those of the wrapped module. `make`: a
    dispatcher.
    """
    plain = _uncompiled(model)
    inside = _uncompiled(plain.module) if isinstance(plain, DistributedDataParallel) else plain
    dispatcher = make(types.MethodType(type(inside).__call__, inside), backend if inside is plain else None)
    dispatcher.__wrapped__ = dispatcher.original  # for inspect
    return compile_module(plain, dispatcher, compile_alike, compile)


def _check_arguments(options: Any, recompile_limit: Any, shapes: dict[str, Any]) -> None:
    UsageError.when(
        options is not None and not isinstance(options, Mapping),
        "DM146",
        f"`options` must be a dict, not {type(options).__name__}",
        cure="pass options={'threads': 2}",
    )
    UsageError.when(
        recompile_limit is not None and (type(recompile_limit) is not int or recompile_limit < 1),
        "DM146",
        f"`recompile_limit` must be a positive int, not {recompile_limit!r}",
        cure="pass an int of at least 1",
    )
    for name, value in shapes.items():
        UsageError.when(
            value is not None,
            "DM146",
            f"`{name}` is not supported",
            why="dynamic dimensions are found at later calls, or marked on tensors",
            cure="call mark_dynamic(tensor, dim, min=..., max=...), or pass dynamic=True",
        )


def _reduce(dispatcher: Any) -> str | tuple[Any, ...]:
    """How a compiled function is copied and pickled: as the name that leads to it, as functions are, or
    compiled again.
    """
    module, name = getattr(dispatcher, "__module__", None), getattr(dispatcher, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is dispatcher else (dispatcher.compiled_again, (dispatcher.original,))


copyreg.pickle(_C.Dispatcher, _reduce)


def dispatcher_of(fn: Callable[..., Any]) -> Any:
    """The dispatcher of a compiled function or module; None for anything else."""
    if isinstance(fn, torch.nn.Module):
        return getattr(type(fn), "_dynamotor", None)
    return fn if type(fn) is _C.Dispatcher else None


def plain(fn: Callable[..., Any]) -> Any:
    """The callable that a compiled function or module stands for, or the callable itself."""
    if isinstance(fn, torch.nn.Module):
        return _uncompiled(fn)
    return fn.original if type(fn) is _C.Dispatcher else fn


def _uncompiled(module: torch.nn.Module) -> Any:
    """The module that a compiled module stands for, or the module itself."""
    return module._orig_mod if hasattr(type(module), "_dynamotor") else module


def _guarded_backend(function: Backend, name: str | Backend, settings: CompileOptions) -> Backend:
    """The backend under the callable's options, its failures turned into coded errors."""
    label = name if isinstance(name, str) else getattr(name, "__name__", repr(name))

    def call(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        implied = {"strict": True} if settings.fullgraph and _has_compiler() else {}
        with config.patch(**{**implied, **settings.settings}), timed("backend"):
            try:
                compiled = function(gm, example_inputs)
            except InternalError as error:
                failures.note(gm, example_inputs, error)
                raise
            except DynamotorError:
                raise
            except Exception as error:
                raised = BackendError(
                    "DM401",
                    f"backend {label!r} raised {type(error).__name__}: {error}",
                    where=_first_line(gm),
                    cure="see the chained traceback; backend='eager' tells whether capture or the backend "
                    "is at fault",
                )
                if label == "native":
                    failures.note(gm, example_inputs, raised)
                raise raised from error
        if not callable(compiled):
            raise BackendError(
                "DM402",
                f"backend {label!r} returned {type(compiled).__name__}, which cannot be called",
                why="a backend returns a callable that takes the graph's inputs",
                cure="return gm.forward, for example",
            )
        emit("backend", name=label, nodes=len(gm.graph.nodes))
        return compiled

    return call


def _has_compiler() -> bool:
    """Whether this machine has a C++ compiler: without one, `fullgraph` runs on aten kernels, too."""
    try:
        find_compiler()
    except BuildError:
        return False
    return True


def _first_line(gm: torch.fx.GraphModule) -> Any:
    return next((n.meta["where"] for n in gm.graph.nodes if n.meta.get("where")), None)


def compile_fx(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile an FX graph that you already hold with the native backend.

    Parameters and submodules of the graph are read at each call, so they may be trained or replaced; other
    shapes or dtypes than those of the example inputs compile anew.
    """
    return compile(gm, fullgraph=True)


@capture_graph.define
def _capture_graph(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    return checked(torch.nn.Module, compile(gm))


def cudagraph_mark_step_begin() -> None:
    """For programs written for torch.compile. Nothing has to be marked here: the memory of a replayed graph's
    results is reused once they are released (docs/gpu.md)."""


def reset() -> None:
    """Forget all compiled code, counters and pooled memory; the next call of each compiled callable compiles
    again.
    """
    for dispatcher in list(_dispatchers):
        dispatcher.clear()
        dispatcher.miss.__self__.forget()
    for optimizer in list(_optimizers):
        vars(optimizer).pop(_STEPS, None)
    siblings.lasting.clear()
    counters.clear()
    phase_seconds.clear()
    forget_warnings()
    memory.release_all()
    device_memory.release_all()
