"""Programs as plain data: values, specs and graphs in what JSON can hold, and back. Nothing that is read is
run.

>>> decode(json.loads(json.dumps(encode(TensorSpec.dense((2, 3), torch.float32)))))
TensorSpec(shape=(2, 3), stride=(3, 1), dtype=torch.float32, device=device(type='cpu'), offset=0)

A tuple is a JSON list; whatever JSON has no word for is an object of one key, which names its kind. Sizes
that differ between calls name their symbols, which who reads them has to know (`symbols_by_name`).
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from ..base.compat import OpOverload
from ..base.errors import RaisedWhen, UserLine
from .module import graph_module
from .sizes import Atom, Guard, ShapeEnv, Size, Symbol
from .spec import GraphInfo, TensorSpec

C = TypeVar("C", bound=type)
NAMESPACES = (
    "aten",
    "prims",
    "mkldnn",
    "dynamotor",
)  # of ops whose meaning is told by PyTorch's version and ours


class NotPlain(RaisedWhen):
    """A value that no text can stand for; the message says which."""


_classes: dict[str, type] = {}


def plain(cls: C) -> C:
    """Decorator: a dataclass whose fields are plain data."""
    _classes[cls.__name__] = cls
    return cls


for _cls in (TensorSpec, UserLine, GraphInfo, Guard):
    plain(_cls)

_NAMED = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}
_OPERATORS = {
    getattr(operator, name): name for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg")
} | {torch.sym_min: "sym_min", torch.sym_max: "sym_max"}


def encode(value: Any) -> Any:
    """What `json.dumps` takes for a value. NotPlain for what cannot be written down; subclasses of plain
    types are none.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return value
    if kind is tuple:
        return [v if type(v) is int else encode(v) for v in value]
    rule = _ENCODERS.get(kind)
    if rule is not None:
        return rule(value)
    if _classes.get(kind.__name__) is kind:
        return {kind.__name__: [encode(getattr(value, name)) for name in kind.__match_args__]}
    if kind in (types.BuiltinFunctionType, types.FunctionType) and value in _OPERATORS:
        return {"operator": _OPERATORS[value]}
    raise NotPlain(f"a {kind.__module__}.{kind.__qualname__}")


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _op(value: OpOverload) -> Any:
    if value.namespace not in NAMESPACES:
        raise NotPlain(f"the custom op {value}")
    return {"op": str(value)}


def _named(word: str, value: Any) -> Any:
    return {word: str(value).removeprefix("torch.")}


def _atom(atom: Atom) -> Any:
    return atom.name if type(atom) is Symbol else [atom.kind, _terms(atom.a), _terms(atom.b)]


def _terms(value: Size) -> Any:
    return [[c, *map(_atom, monomial)] for monomial, c in value.terms.items()]


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    float: _float,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    list: lambda value: {"list": [encode(v) for v in value]},
    fx.immutable_collections.immutable_list: lambda value: {"list": [encode(v) for v in value]},
    torch.Size: lambda value: {"Size": list(map(encode, value))},
    dict: lambda value: {"dict": [[encode(k), encode(v)] for k, v in value.items()]},
    fx.immutable_collections.immutable_dict: lambda value: {
        "dict": [[encode(k), encode(v)] for k, v in value.items()]
    },
    frozenset: lambda value: {"set": sorted(map(encode, value))},
    slice: lambda value: {"slice": [encode(v) for v in (value.start, value.stop, value.step)]},
    type(...): lambda value: {"ellipsis": None},
    torch.device: lambda value: {"device": str(value)},
    OpOverload: _op,
    Size: lambda value: {"size": _terms(value)},
    Symbol: lambda value: {"symbol": value.name},
    fx.Node: lambda node: {"node": node.name},
    **{cls: functools.partial(_named, word) for cls, word in _NAMED.items()},
}


def symbols_by_name(env: ShapeEnv | None) -> dict[str, Any]:
    """What `decode` has to know of a program whose sizes differ between calls."""
    return {} if env is None else {f"%{symbol.name}": symbol for symbol in env.symbols}


def decode(value: Any, known: Mapping[str, Any] | None = None) -> Any:
    """The value of which `encode` wrote this; known: nodes by name, symbols behind a %. Any exception means
    that it was not written by this version.
    """
    kind = type(value)
    if kind is list:
        return tuple([decode(v, known) for v in value])
    if kind is not dict:
        return value
    ((word, data),) = value.items()
    rule = _DECODERS.get(word)
    return rule(data, known or {}) if rule is not None else _classes[word](*[decode(v, known) for v in data])


def _size(terms: Any, known: Mapping[str, Any]) -> Size:
    """The very expression: nothing is simplified, since nothing was when it was written."""
    env = next(iter(known.values())).env

    def atom(data: Any) -> Atom:
        if type(data) is str:
            return known[f"%{data}"]
        kind, a, b = data
        derived = env.derived(kind, _size(a, known), _size(b, known))
        ((monomial,),) = [derived.terms]
        return monomial[0]

    return Size({tuple(map(atom, monomial)): c for c, *monomial in terms}, env)


def _named_op(name: str) -> OpOverload:
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    NotPlain.when(namespace not in NAMESPACES or type(found) is not OpOverload, name)
    return found


def _of_torch(kind: type, name: str, known: Any) -> Any:
    found = getattr(torch, name)
    NotPlain.when(type(found) is not kind, name)
    return found


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "float": lambda data, known: float(data),
    "complex": lambda data, known: complex(*[decode(part) for part in data]),
    "list": lambda data, known: [decode(v, known) for v in data],
    "Size": lambda data, known: torch.Size([decode(v) for v in data]),
    "dict": lambda data, known: {decode(k): decode(v, known) for k, v in data},
    "set": lambda data, known: frozenset(decode(v) for v in data),
    "slice": lambda data, known: slice(*[decode(v, known) for v in data]),
    "ellipsis": lambda data, known: ...,
    "device": lambda data, known: torch.device(data),
    "op": lambda data, known: _named_op(data),
    "node": lambda data, known: known[data],
    "symbol": lambda data, known: known[f"%{data}"],
    "size": _size,
    "operator": lambda data, known: {name: function for function, name in _OPERATORS.items()}[data],
    **{word: functools.partial(_of_torch, cls) for cls, word in _NAMED.items()},
}


def encode_graph(gm: fx.GraphModule) -> list[Any]:
    """A graph's nodes, a row each: name, op, target, arguments, keywords, `val`, the user's line and, of what
    has another layout than in eager, eager's spec.
    """
    return [
        [
            node.name,
            node.op,
            node.target if node.op != "call_function" else encode(node.target),
            encode(node.args),
            encode(node.kwargs),
            encode(node.meta.get("val")),
            encode(node.meta.get("where")),
            encode(node.meta.get("traced")),
        ]
        for node in gm.graph.nodes
    ]


def decode_graph(rows: list[Any], symbols: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """The graph that `encode_graph` wrote down, of these symbols (`symbols_by_name`)."""
    graph = fx.Graph()
    known: dict[str, Any] = dict(symbols or {})
    for name, op, target, args, kwargs, val, where, traced in rows:
        called = decode(target) if op == "call_function" else target
        known[name] = node = graph.create_node(op, called, decode(args, known), decode(kwargs, known), name)
        if val is not None:
            node.meta["val"] = decode(val, known)
        if where is not None:
            node.meta["where"] = decode(where)
        if traced is not None:
            node.meta["traced"] = decode(traced, known)
    return graph_module(graph)
