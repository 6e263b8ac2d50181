"""Function transforms in the graph: `vmap`, `grad`, `vjp`, `jvp`, `jacrev`, `jacfwd` and transforms made of them are
nodes that call the real transform on a function whose body is a graph of its own.

PyTorch's wrappers are inlined down to the functions that have rules here. What the user's function is called
with is asked of the transform itself, so that `in_dims`, `argnums` and their errors need no rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..base import compat
from ..base.narrowing import checked
from ..graph.op_facts import facts
from ..graph.shape_tensor import ShapeTensor, infer, recording
from ..graph.subgraphs import Transformed, fill, flatten
from .bodies import called_with, interpret, template_of, value_of
from .breaks import unsupported_if
from .polyfills import autograd_function as polyfills
from .values.base import Trace, Value, builtin_rule
from .values.containers import DictValue, TupleValue
from .values.function import FunctionValue, code_rule
from .values.tensor import TensorValue, lower, torch_call, trial

Transform = Callable[..., Callable[..., Any]]


class Applied:
    """A transform of a function, applied to arguments: asked for the examples, interpreted, ready for
    nodes."""

    def __init__(
        self,
        trace: Trace,
        name: str,
        transform: Transform,
        fn: Value,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> None:
        # functorch gives normal tensors there, a graph inference tensors, which no backward may save
        plain = name == "vmap" or not torch.is_inference_mode_enabled()
        unsupported_if(not plain, "transform", f"{name} under torch.inference_mode()")
        self.trace, self.name = trace, name
        self.leaves: list[TensorValue] = []
        named = {key: template_of(value, self.leaves) for key, value in kwargs.items()}
        self.arguments = tuple([template_of(value, self.leaves) for value in args]), named
        examples = [lower(leaf, False) for leaf in self.leaves]

        def ask(*tensors: Any) -> Any:
            plain, words = fill(self.arguments, tensors)
            return called_with(lambda function: transform(function)(*plain, **words))

        asked = trial(trace, name, ask, examples, {})
        unsupported_if(asked is None, "transform", f"{name} does not call its function")
        inner: list[torch.Tensor] = []
        template = flatten((asked.args_of_call, asked.kwargs_of_call), inner)
        grad = torch.is_grad_enabled()
        compat.set_grad_enabled(asked.grad)
        try:
            self.body, self.free = interpret(trace, fn, template, inner, name=name, now=True)
        finally:
            compat.set_grad_enabled(grad)

    def node(self, transform: Transform, args: list[Value] | None = None) -> Value:
        """The value of a call `transform(function)(*args)`; the arguments are those of the beginning unless
        given."""
        leaves, arguments = self.leaves, self.arguments
        if args is not None:
            leaves = []
            arguments = tuple([template_of(value, leaves) for value in args]), {}
        target = Transformed(self.name, transform, self.body, arguments)
        result = torch_call(self.trace, target, [*leaves, *self.free], {})
        assert isinstance(result, TupleValue)
        return value_of(self.trace, target.result, result.items)


def _constants(values: dict[str, Value]) -> dict[str, Any]:
    return {name: value.as_constant() for name, value in values.items()}


@builtin_rule(compat.vmap_impl)
def _vmap(
    trace: Trace,
    func: Value,
    in_dims: Value,
    out_dims: Value,
    randomness: Value,
    chunk_size: Value,
    /,
    *args: Value,
    **kwargs: Value,
) -> Value:
    options = [value.as_constant() for value in (in_dims, out_dims, randomness)]
    chunks = chunk_size.as_constant()

    def transform(function: Callable[..., Any]) -> Any:
        return torch.vmap(function, *options, chunk_size=chunks)

    return Applied(trace, "vmap", transform, func, [*args], kwargs).node(transform)


def _gradient(
    name: str,
    make: Callable[..., Any],
    trace: Trace,
    fn: Value,
    argnums: Value,
    has_aux: Value,
    given: Value,
    words: Value,
) -> Value:
    options = argnums.as_constant(), has_aux.as_constant()

    def transform(function: Callable[..., Any]) -> Any:
        return make(function, *options)

    named = {key.as_constant(): value for key, value in checked(DictValue, words).load().values()}
    return Applied(trace, name, transform, fn, given.unpack(trace), named).node(transform)


builtin_rule(compat.grad_impl)(functools.partial(_gradient, "grad", torch.func.grad))
builtin_rule(compat.grad_and_value_impl)(
    functools.partial(_gradient, "grad_and_value", torch.func.grad_and_value)
)


@builtin_rule(compat.functorch_jvp)
def _jvp(trace: Trace, fn: Value, primals: Value, tangents: Value, **options: Value) -> Value:
    constants = _constants(options)

    def transform(function: Callable[..., Any]) -> Any:
        return lambda primals, tangents: torch.func.jvp(function, primals, tangents, **constants)

    return Applied(trace, "jvp", transform, fn, [primals, tangents], {}).node(transform)


@builtin_rule(compat.functorch_vjp)
def _vjp(trace: Trace, fn: Value, /, *args: Value, **options: Value) -> Value:
    """The outputs are a node; the pullback, when it is called, another one, which runs the function again."""
    constants = _constants(options)
    has_aux = bool(constants.get("has_aux"))

    def forward(function: Callable[..., Any]) -> Any:
        return lambda *primals: torch.func.vjp(function, *primals, **constants)[:: 2 if has_aux else 3]

    applied = Applied(trace, "vjp", forward, fn, [*args], {})
    _refuse_random(applied)
    results = applied.node(forward).unpack(trace)
    pullback = trace.call_python(polyfills.pullback, [PullbackValue(applied, [*args], has_aux)])
    return TupleValue([results[0], pullback, *results[1:]])


class PullbackValue(Value):
    """What `vjp` gives besides the outputs."""

    __slots__ = ("applied", "primals", "has_aux")
    kind = type(_vjp)

    def __init__(self, applied: Applied, primals: list[Value], has_aux: bool) -> None:
        super().__init__()
        self.applied, self.primals, self.has_aux = applied, primals, has_aux

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        has_aux = self.has_aux

        def pull(function: Callable[..., Any]) -> Any:
            return lambda primals, cotangents: torch.func.vjp(function, *primals, has_aux=has_aux)[1](
                cotangents
            )

        return self.applied.node(pull, [TupleValue(self.primals), args[0]])


def _refuse_random(applied: Applied) -> None:
    """A function that draws may not be run twice."""
    drawn = []

    class Watch:
        def record(self, func: Any, args: Any, kwargs: Any) -> Any:
            drawn.extend([func] if facts(func).random else [])
            return infer(func, args, kwargs)

    gm = applied.body.gm
    examples = [ShapeTensor.make(node.meta["val"]) for node in gm.graph.nodes if node.op == "placeholder"]
    with recording(Watch()):
        gm.forward(*examples)
    unsupported_if(drawn, "transform", "a function given to vjp draws random numbers")


@builtin_rule(compat.associative_scan)
def _scan(
    trace: Trace,
    combine_fn: Value,
    xs: Value,
    dim: Value | None = None,
    reverse: Value | None = None,
    combine_mode: Value | None = None,
) -> Value:
    """Pairs are combined in parallel, by `vmap`."""
    named = {"dim": dim, "reverse": reverse, "combine_mode": combine_mode}
    given = {name: value for name, value in named.items() if value is not None}
    options = {"combine_mode": "pointwise"} | _constants(given)
    leaves: list[TensorValue] = []
    template_of(xs, leaves)
    unsupported_if(
        options["combine_mode"] != "generic" and any(leaf.example.device.type != "cuda" for leaf in leaves),
        "transform",
        "associative_scan is called with a mode that is for GPUs",
    )
    options["combine_mode"] = "generic"

    def transform(function: Callable[..., Any]) -> Any:
        return lambda xs: compat.associative_scan(function, xs, **options)

    return Applied(trace, "associative_scan", transform, combine_fn, [xs], {}).node(transform)


def _jacobian(
    name: str,
    make: Callable[..., Any],
    trace: Trace,
    fn: FunctionValue,
    /,
    *args: Value,
    **kwargs: Value,
) -> Value:
    free: dict[str, Any] = dict(zip(fn.code.co_freevars, fn.closure, strict=True))
    func = free.pop("func").load(trace)
    options = {
        option: free[option].load(trace).as_constant()
        for option in ("argnums", "has_aux", "chunk_size", "randomness", "_preallocate_and_copy")
        if option in free
    }

    def transform(function: Callable[..., Any]) -> Any:
        return make(function, **options)

    return Applied(trace, name, transform, func, [*args], kwargs).node(transform)


for _make in (torch.func.jacrev, torch.func.jacfwd):
    code_rule(_make(torch.sin).__code__)(functools.partial(_jacobian, _make.__name__, _make))
