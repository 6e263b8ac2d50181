"""The bridge to `torch.compile`: our backend under its capture, and its backends under ours.

This is the one module of the package that may import torch.compile's packages.
>>> torch.compile(model, backend="dynamotor")       # found through the package's entry point
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .autograd.aot import aot_compile
from .autograd.variants import Variants
from .base import compat
from .base.config import Config, did_you_mean
from .base.errors import SettingWarning, UsageError
from .base.events import counters, warn_once
from .base.probe import COMPILE, lost
from .base.registry import Deferred
from .codegen import compile_aten
from .graph.module import copy_of
from .graph.nested_size import NestedSize
from .graph.sizes import ShapeEnv, Size
from .graph.spec import TensorSpec
from .graph.tensor_subclass import HeldPart, WrapperSpec, is_wrapper

# `dynamotor.compile_fx`, for graphs that take floats: capture knows them, an aten graph has sizes alone.
capture_graph = Deferred[[torch.fx.GraphModule], Callable[..., Any]]("capture_graph")


def backend_for_torch_compile(
    backend: Callable[..., Callable[..., Any]], symbols: bool = False
) -> Callable[..., Callable[..., Any]]:
    """A backend `(gm, example_inputs) -> callable` of ours in the form that `torch.compile` calls.

    symbols: it takes graphs with symbolic sizes; others run these in eager PyTorch (counted as a fallback).
    """

    def compile_graph(
        gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        if lost(COMPILE):
            return gm.forward
        outputs = gm.graph.output_node().args[0]
        if type(outputs) is not tuple or not all(isinstance(out, torch.fx.Node) for out in outputs):
            return _with_structure(gm, list(example_inputs), compile_graph)
        nested = [_is_nested(x) for x in example_inputs]
        if any(nested) and not any(node.users for node in _placeholders(gm, nested)):
            return _without(gm, nested, example_inputs, compile_graph)
        repeated = _repeated_sizes(gm)
        if any(repeated):
            return _without(gm, repeated, example_inputs, compile_graph)
        floats = list(map(_is_float, gm.graph.find_nodes(op="placeholder")))
        if symbols and (any(floats) or any(map(_is_captured_only, gm.graph.nodes))):
            return _captured_again(gm, floats)
        if not all(isinstance(x, torch.Tensor) for x in example_inputs):
            if symbols:
                own = _in_own_sizes(gm)
                return _captured_again(gm, floats) if own is None else Variants(own, backend)
            counters["fallback"]["torch.compile: symbolic sizes"] += 1
            return gm.forward
        return backend(gm, list(example_inputs))

    return compile_graph


def _is_nested(value: Any) -> bool:
    """Whether a size is a jagged tensor's, or a multiple of one: no number."""
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


def _placeholders(gm: torch.fx.GraphModule, chosen: Sequence[bool]) -> list[torch.fx.Node]:
    return [
        node for node, is_one in zip(gm.graph.find_nodes(op="placeholder"), chosen, strict=True) if is_one
    ]


def _size_of(node: torch.fx.Node) -> object:
    """PyTorch's symbol of an input that is a size, or None."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.SymInt) or _is_nested(example) or not example.node.expr.is_Symbol:
        return None
    return example.node.expr


def _repeated_sizes(gm: torch.fx.GraphModule) -> list[bool]:
    """Which inputs are sizes that a guard of torch.compile's has found equal to an earlier input."""
    sizes = list(map(_size_of, gm.graph.find_nodes(op="placeholder")))
    return [size is not None and size in sizes[:k] for k, size in enumerate(sizes)]


def _without(
    gm: torch.fx.GraphModule,
    left_out: Sequence[bool],
    inputs: Sequence[Any],
    compile_graph: Callable[..., Callable[..., Any]],
) -> Callable[..., Any]:
    """A graph compiled without inputs that it does not use, or that are sizes which it has already."""
    less = copy_of(gm)
    first = {_size_of(node): node for node in reversed(less.graph.find_nodes(op="placeholder"))}
    for node in _placeholders(less, left_out):
        if (size := _size_of(node)) is not None:
            node.replace_all_uses_with(first[size])
        less.graph.erase_node(node)
    less.recompile()
    kept = [k for k, is_out in enumerate(left_out) if not is_out]
    run = compile_graph(less, [inputs[k] for k in kept])
    return lambda *args: run(*[args[k] for k in kept])


def _is_captured_only(node: torch.fx.Node) -> bool:
    """Whether a node calls a function of functions, or asks for a tensor's number."""
    return node.op == "get_attr" or (node.op, node.target) == ("call_method", "item")


def _is_float(node: torch.fx.Node) -> bool:
    """Whether an input is a float that has changed: torch.compile hands it over in a tensor."""
    example = node.meta.get("example_value")
    return (
        isinstance(example, torch.Tensor)
        and (example.dtype, example.dim(), example.device.type) == (torch.float64, 0, "cpu")
        and len(node.users) > 0
        and all((user.op, user.target) == ("call_method", "item") for user in node.users)
    )


Function = Callable[..., object]


def _branched(condition: torch.Tensor, yes: Function, no: Function, operands: Sequence[object]) -> object:
    """A branch's operands may be sizes in a graph of torch.compile's, which `torch.cond` does not take."""
    return torch.cond(condition, lambda: yes(*operands), lambda: no(*operands), ())


def _looped(condition: Function, body: Function, carried: Sequence[object], more: Sequence[object]) -> object:
    """The values that a loop's functions close over are arguments in a graph of torch.compile's."""
    return compat.while_loop_operator(
        lambda *args: condition(*args, *more), lambda *args: body(*args, *more), tuple(carried)
    )


# Functions that programs call and capture knows, by the operators that torch.compile makes of them.
_CALLED: dict[str, Function] = {
    "cond": _branched,
    "while_loop": _looped,
    "tag_activation_checkpoint": checkpoint,
}


def _captured_again(gm: torch.fx.GraphModule, floats: Sequence[bool]) -> Callable[..., Any]:
    """A graph captured again, for which an aten graph is not enough: floats that differ between calls are
    arguments, and functions that take functions are called as in programs."""
    own = copy_of(gm)
    for node in _placeholders(own, floats):
        for user in list(node.users):
            user.replace_all_uses_with(node)
            own.graph.erase_node(user)
    for node in own.graph.nodes:
        if (
            node.op == "call_function"
            and (called := _CALLED.get(getattr(node.target, "_name", ""))) is not None
        ):
            node.target = called
    own.recompile()
    run = capture_graph(own)

    def call(*args: Any) -> Any:
        return run(*[arg.item() if is_one else arg for arg, is_one in zip(args, floats, strict=True)])

    return call


def _with_structure(
    gm: torch.fx.GraphModule, inputs: list[Any], compile_graph: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """A graph that returns anything else than a flat tuple: compiled with one, its own result rebuilt."""
    flat = copy_of(gm)
    output = flat.graph.output_node()
    leaves, spec = compat.tree_flatten(_mutable(output.args[0]))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    if not places:
        return gm.forward
    output.args = (tuple(leaves[k] for k in places),)
    flat.recompile()
    run = compile_graph(flat, inputs)

    def call(*args: Any) -> Any:
        found = list(leaves)
        for k, out in zip(places, run(*args), strict=True):
            found[k] = out
        return compat.tree_unflatten(found, spec)

    return call


def _mutable(value: Any) -> Any:
    """A graph's result with lists and dicts in the place of torch.fx's immutable ones."""
    if isinstance(value, list | tuple):
        items = [_mutable(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: _mutable(item) for key, item in value.items()} if isinstance(value, dict) else value


dynamotor_backend = backend_for_torch_compile(
    functools.partial(aot_compile, compile_graph=compile_aten), symbols=True
)


def _in_own_sizes(gm: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """The graph with placeholders in symbols of ours, to be compiled with the values of the first call; None
    for inputs that are neither tensors nor sizes.
    """
    env, symbols, own = ShapeEnv(), dict[Any, Size](), copy_of(gm)
    for node in own.graph.nodes:
        example = node.meta.get("example_value") if node.op == "placeholder" else None
        if isinstance(example, torch.SymInt) and example.node.expr.is_Symbol:
            made = symbols.setdefault(example.node.expr, env.symbol(4, name=f"s{len(symbols)}"))
            node.meta["val"] = made
        elif isinstance(example, torch.Tensor):
            node.meta["val"] = _own_spec(example, symbols)
        elif node.op == "placeholder":
            return None
    own.meta["static_inputs"] = frozenset()
    return own


def _own_spec(example: Any, symbols: Mapping[Any, Size], open_: bool = False) -> TensorSpec | WrapperSpec:
    """The spec of an input. open_: of a tensor inside of another, whose sizes PyTorch may have marked as open
    (those of a jagged tensor's empty tensors, which stand for numbers); `variants.py` checks them.
    """
    place = (example.shape, example.stride(), (example.storage_offset(),))
    shape, stride, (offset,) = (tuple([_own_size(n, symbols, open_) for n in part]) for part in place)
    own = TensorSpec(shape, stride, example.dtype, example.device, offset)
    if not is_wrapper(example):
        return own
    names, context = example.__tensor_flatten__()
    held = [getattr(example, name) for name in names]
    parts = [
        _own_spec(part, symbols, True) if isinstance(part, torch.Tensor) else HeldPart(part) for part in held
    ]
    known = WrapperSpec(type(example), tuple(names), context, own, tuple(parts))
    return known.with_sizes(lambda n: n if isinstance(n, Size | NestedSize) else _own_size(n, symbols), parts)


def _own_size(n: Any, symbols: Mapping[Any, Size], open_: bool = False) -> Any:
    """A size of PyTorch's in symbols of ours, a jagged tensor's by its name; any other expression becomes a
    number. open_: PyTorch may not be asked to keep that."""
    if _is_nested(n):
        return NestedSize(str(n))
    expr = n.node.expr if isinstance(n, torch.SymInt) else n

    def own(e: Any) -> Any:
        if getattr(e, "is_Add", False) or getattr(e, "is_Mul", False):
            return functools.reduce(operator.add if e.is_Add else operator.mul, map(own, e.args))
        return symbols[e] if e in symbols else int(e)

    try:
        return own(expr)
    except TypeError:  # "cannot convert expression to int"
        return n.node.hint if open_ else int(n)


def answer(name: str, target: str) -> None:
    """Let `torch.compile(backend=name)` load a function of ours, also where PyTorch has a backend of that
    name.
    """
    registry = compat.dynamo_registry()
    registry._BACKENDS[name] = EntryPoint(name, target, "torch_dynamo_backends")
    registry._COMPILER_FNS.pop(name, None)


def capture_as_plain_tensor(
    subclass: type[torch.Tensor], packages: Sequence[str], traced: Sequence[ModuleType] = ()
) -> None:
    """Let `torch.compile` capture tensors of a subclass as it does plain ones, without looking inside, and
    capture no code of the packages that compute on them, but for functions of `traced` modules that captured
    code calls.
    """
    builder, rules = compat.dynamo_builder(), compat.dynamo_trace_rules()
    for package in (__name__.partition(".")[0], *packages):
        rules.add(package)
    rules.get_mod_inlinelist().update(str(Path(module.__file__ or "").with_suffix("")) for module in traced)

    wrap = builder.VariableBuilder._wrap

    def wrap_plain(self: Any, value: Any) -> Any:
        return self.wrap_tensor(value) if type(value) is subclass else wrap(self, value)

    infer = builder.infer_subclass_type
    builder.infer_subclass_type = lambda value: None if type(value) is subclass else infer(value)
    builder.VariableBuilder._wrap = wrap_plain  # PyTorch has no hook for it


# Options of inductor that set a field of ours, and how a value is read.
_SAME_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "triton.cudagraphs": ("cuda_graphs", bool),
    "max_autotune_gemm": ("max_autotune", bool),
    "layout_optimization": ("layout_opt", bool),
    "emulate_precision_casts": ("exact", bool),
    "force_disable_caches": ("disk_cache", lambda value: not value),
    "cpp.threads": ("threads", lambda value: max(int(value), 0)),
}


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of `config`: inductor's names are translated, or left out with a hint. Unknown names
    stay.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        key = name.replace("-", "_")
        if key in _OURS:
            found[key] = value
        elif key in _SAME_OPTIONS:
            field, read = _SAME_OPTIONS[key]
            found[field] = read(value)
        elif _is_of_inductor(key):
            warn_once(
                f"option {key}",
                f"option {name!r} of torch.compile's inductor has no effect",
                SettingWarning,
            )
        else:
            found[name] = value
    return found


_OURS = frozenset(Config.__annotations__)


def _is_of_inductor(name: str) -> bool:
    return name in compat.inductor_options()()


def torch_backend(name: str, own: Sequence[str] = ()) -> Callable[..., Any]:
    """A backend registered with `torch.compile`, by name. Where there is none, the text of the UsageError
    lists `own` names first.
    """
    registry = compat.dynamo_registry()
    if name not in registry.list_backends(exclude_tags=()):
        known = [*own, *(other for other in torch_backends() if other not in own)]
        raise UsageError(
            "DM106",
            f"unknown backend {name!r}{did_you_mean(name, known)}",
            cure=f"pass a callable, or one of {', '.join(known)}",
        )
    return registry.lookup_backend(name)


def source_of(name: str) -> Any:
    """Where a symbol of a PyTorch ShapeEnv comes from: a name that the backend shows."""
    return compat.ConstantSource()(name)


def torch_backends() -> list[str]:
    """Names of the backends registered with `torch.compile`, without those of its tests and minifier."""
    names = compat.dynamo_registry().list_backends(exclude_tags=())
    return sorted(name for name in names if not re.search("TESTING_ONLY|minifier", name))
