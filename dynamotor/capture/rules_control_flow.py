"""`torch.cond`, `while_loop`, `scan` and `map` in the graph: their functions are interpreted, each on fresh examples,
and one node runs them. What PyTorch refuses (results that differ, effects, results that are arguments)
breaks the graph, so that eager says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import compat
from ..base.narrowing import checked
from ..graph.control_flow import Cond, ControlFlow, Scan, WhileLoop
from ..graph.shape_tensor import ShapeTensor
from ..graph.sizes import Dim, is_unbacked, leaves_in, mapped
from ..graph.spec import TensorSpec
from ..graph.subgraphs import Body, Leaf
from .bodies import interpret, template_of, value_of
from .breaks import unsupported, unsupported_if
from .values.base import Trace, Value, builtin_rule
from .values.constant import Constant
from .values.containers import ListValue, TupleValue
from .values.tensor import TensorValue, lower, tensor_call, torch_call

# Before PyTorch 2.13, `scan` stacks its results along the first dimension, whatever `dim` is.
_STACKS_ALONG_DIM = torch.__version__ >= "2.13"


def _tensors(value: Value, name: str) -> tuple[Any, list[TensorValue]]:
    """Template and tensors of an operand, which holds nothing else."""
    leaves: list[TensorValue] = []
    template = template_of(value, leaves)
    unsupported_if(
        not leaves or not _only_leaves(template), "transform", f"{name} is given other operands than tensors"
    )
    return template, leaves


def _only_leaves(template: Any) -> bool:
    return all(type(leaf) is Leaf for leaf in leaves_in(template))


def _shifted(template: Any, by: int) -> Any:
    """The template with its leaves counted on from `by`."""
    return mapped(lambda leaf: Leaf(leaf.index + by), template)


def _body(
    trace: Trace, name: str, fn: Value, arguments: Sequence[Any], examples: Sequence[torch.Tensor]
) -> tuple[Body, list[TensorValue], tuple[TensorSpec, ...]]:
    """A function's graph, its inputs, and the specs of its results, which are new tensors."""
    body, free = interpret(trace, fn, (tuple(arguments), {}), examples, name=name)
    *_, output = body.gm.graph.nodes
    graph = body.gm.graph
    trial = [ShapeTensor.make(node.meta["val"]) for node in graph.nodes if node.op == "placeholder"]
    results = body.gm.forward(*trial)
    memories = [tensor.memory for tensor in (*trial, *results)]
    unsupported_if(
        len(set(memories)) != len(memories) or not _only_leaves(body.result),
        "transform",
        f"a function given to {name} returns something other than a new tensor",
    )
    return body, free, output.meta["val"]


def _alike(one: Any, other: Any) -> bool:
    """Whether two templates are nested alike."""
    if type(one) is not type(other):
        return False
    if type(one) is Leaf:
        return True
    if type(one) is dict:
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(_alike, one, other))


def _same(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> bool:
    return [(a.shape, a.dtype, a.device) for a in ours] == [(b.shape, b.dtype, b.device) for b in theirs]


def _laid_out_alike(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> bool:
    return _same(ours, theirs) and [a.stride for a in ours] == [b.stride for b in theirs]


def _call(
    trace: Trace, target: ControlFlow, own: list[TensorValue], free: list[TensorValue], result: Any
) -> Value:
    return value_of(trace, result, _results(trace, target, [*own, *free]))


def _results(trace: Trace, target: ControlFlow, tensors: list[TensorValue]) -> list[Value]:
    memories = [value.memory for value in {id(value): value for value in tensors}.values()]
    unsupported_if(
        len(set(memories)) != len(memories), "transform", f"tensors that {target.operator} takes share memory"
    )
    return torch_call(trace, target, list(tensors), {}).unpack(trace)


def _differ(name: str) -> Exception:
    return unsupported("transform", f"the functions given to {name} do not give tensors of one kind")


@builtin_rule(torch.cond)
def _cond(trace: Trace, pred: Value, true_fn: Value, false_fn: Value, operands: Value | None = None) -> Value:
    given = TupleValue([]) if operands is None else operands
    if not isinstance(pred, TensorValue):
        return trace.call(true_fn if trace.truth(pred) else false_fn, given.unpack(trace), {})
    unsupported_if(pred.example.numel() != 1, "transform", "cond is given a predicate of several elements")
    template, leaves = _tensors(given, "cond") if given.unpack(trace) else ((), [])
    examples = [lower(leaf, False) for leaf in leaves]
    bodies, free, specs = [], [], []
    for fn in (true_fn, false_fn):
        body, read, spec = _body(trace, "cond", fn, template, examples)
        bodies.append(body)
        free += read
        specs.append(spec)
    if not _alike(bodies[0].result, bodies[1].result) or not _laid_out_alike(*specs):
        raise _differ("cond")
    return _call(trace, Cond(bodies, specs[0], 1 + len(leaves)), [pred, *leaves], free, bodies[0].result)


@builtin_rule(compat.while_loop_operator)
def _while_loop(
    trace: Trace,
    cond_fn: Value,
    body_fn: Value,
    carried_inputs: Value,
    additional_inputs: Value | None = None,
) -> Value:
    if additional_inputs is not None and additional_inputs.unpack(trace):
        raise unsupported("unsupported-call", "while_loop is called with additional inputs")
    template, leaves = _tensors(carried_inputs, "while_loop")
    unsupported_if(
        any(leaf.example.requires_grad for leaf in leaves) and torch.is_grad_enabled(),
        "transform",
        "while_loop carries a tensor that requires a gradient",
    )
    examples = [lower(leaf, False) for leaf in leaves]
    test, test_reads, (flag,) = _body(trace, "while_loop", cond_fn, template, examples)
    body, reads, specs = _body(trace, "while_loop", body_fn, template, examples)
    if flag.shape or flag.dtype != torch.bool or not _laid_out_alike(specs, [e.spec for e in examples]):
        raise _differ("while_loop")
    if not _alike(tuple(template), body.result if type(body.result) is not list else tuple(body.result)):
        raise _differ("while_loop")
    target = WhileLoop([test, body], tuple(example.spec for example in examples), len(leaves))
    return _call(trace, target, leaves, [*test_reads, *reads], body.result)


def _row(example: torch.Tensor) -> torch.Tensor:
    spec = example.spec if isinstance(example, ShapeTensor) else TensorSpec.of(example)
    return ShapeTensor.make(
        TensorSpec(spec.shape[1:], spec.stride[1:], spec.dtype, spec.device),
        requires_grad=example.requires_grad,
    )


def _rows(trace: Trace, name: str, leaves: list[TensorValue]) -> Dim:
    """How many rows they have; they have as many."""
    counts = [leaf.spec.shape[0] if leaf.example.dim() else 0 for leaf in leaves]
    unsupported_if(
        is_unbacked(*counts) or any(n != counts[0] for n in counts) or counts[0] == 0,
        "transform",
        f"{name} goes through tensors of different or no length",
    )
    return counts[0]


def _stacked(spec: TensorSpec, rows: Dim) -> TensorSpec:
    return TensorSpec.dense((rows, *spec.shape), spec.dtype, spec.device)


def _flipped(trace: Trace, tensor: TensorValue) -> TensorValue:
    return tensor_call(trace, torch.flip, [tensor, ListValue([Constant(0)])])


def _moved(trace: Trace, tensor: TensorValue, at: int, to: int) -> TensorValue:
    return tensor_call(trace, torch.movedim, [tensor, Constant(at), Constant(to)])


@builtin_rule(compat.scan_operator)
def _scan(
    trace: Trace,
    combine_fn: Value,
    init: Value,
    xs: Value,
    dim: Value | None = None,
    reverse: Value | None = None,
) -> Value:
    if type(init) is type(xs) is Constant:
        raise unsupported("unsupported-call", "scan is called with other arguments")
    at, back = [0 if v is None else v.as_constant() for v in (dim, reverse)]
    carry, carried = _tensors(init, "scan")
    through, leaves = _tensors(xs, "scan")
    at = at % leaves[0].example.dim() if leaves[0].example.dim() else 0
    if at:
        leaves = [_moved(trace, leaf, at, 0) for leaf in leaves]
    if back:
        leaves = [_flipped(trace, leaf) for leaf in leaves]
    rows = _rows(trace, "scan", leaves)
    examples = [*[lower(leaf, False) for leaf in carried], *[_row(lower(leaf, False)) for leaf in leaves]]
    body, free, specs = _body(trace, "scan", combine_fn, (carry, _shifted(through, len(carried))), examples)
    n = len(carried)
    if type(body.result) not in (tuple, list) or len(body.result) != 2 or not _alike(carry, body.result[0]):
        raise _differ("scan")
    if not _same(specs[:n], [leaf.spec for leaf in carried]):
        raise _differ("scan")
    kept = [leaf.spec for leaf in carried]
    target = Scan(
        [body], (*kept, *[_stacked(spec, rows) for spec in specs[n:]]), n + len(leaves), n, len(leaves)
    )
    results = _results(trace, target, [*carried, *leaves, *free])
    made = [checked(TensorValue, value) for value in results[n:]]
    if back:
        made = [_flipped(trace, value) for value in made]
    if at and _STACKS_ALONG_DIM:
        made = [_moved(trace, value, 0, at) if at < value.example.dim() else value for value in made]
    return value_of(trace, tuple(body.result), [*results[:n], *made])


@builtin_rule(compat.map_operator)
def _map(trace: Trace, f: Value, xs: Value, *args: Value) -> Value:
    through, leaves = _tensors(xs, "map")
    rows = _rows(trace, "map", leaves)
    whole, others = _tensors(TupleValue([*args]), "map") if args else ((), [])
    examples = [*[_row(lower(leaf, False)) for leaf in leaves], *[lower(leaf, False) for leaf in others]]
    arguments = (through, *_shifted(whole, len(leaves)))
    body, free, specs = _body(trace, "map", f, arguments, examples)
    own = [*leaves, *others]
    target = Scan([body], tuple(_stacked(spec, rows) for spec in specs), len(own), 0, len(leaves))
    return _call(trace, target, own, free, body.result)
