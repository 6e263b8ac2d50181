"""Control flow inside a graph: `cond`, `while_loop`, `scan` and `map` are nodes whose targets run graphs of
their own on real tensors.

>>> node = graph.call_function(Cond([body, other], specs, 1), (flag, x, weight))  # a branch reads weight

A backend that compiles cuts its graph around them and compiles the bodies (`Compile`). Gradients are those of
PyTorch's operators: an input that a float is given for gets one, of zeros where the path that was taken did
not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from .shape_tensor import ShapeTensor
from .sizes import Size, evaluate
from .spec import TensorSpec, copy_as
from .subgraphs import Body

Tensors = Sequence[torch.Tensor]
Compile = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


class ControlFlow:
    """A node's target. Takes the operator's own tensors, then what each of its bodies reads from outside;
    gives a flat tuple of tensors with `specs`."""

    operator: str

    def __init__(self, bodies: list[Body], specs: tuple[TensorSpec, ...], n_own: int) -> None:
        self.__name__ = self.__qualname__ = self.operator
        self.bodies, self.specs, self.n_own = bodies, specs, n_own
        self.compile: Compile | None = None
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shaped = any(type(tensor) is ShapeTensor for tensor in tensors)
        run = self._shapes if shaped else self._run
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _Whole.apply(run, *tensors)
        return tuple(run(*tensors))

    def _shapes(self, *tensors: torch.Tensor) -> Tensors:
        return [ShapeTensor.make(spec) for spec in self.specs]

    def _run(self, *tensors: torch.Tensor) -> Tensors:
        free: list[Tensors] = []
        at = self.n_own
        for body in self.bodies:
            free.append(tensors[at : at + body.n_free])
            at += body.n_free
        results = self.run(list(tensors[: self.n_own]), free)
        return [laid_out(result, spec) for result, spec in zip(results, self.specs, strict=True)]

    def run(self, own: list[torch.Tensor], free: list[Tensors]) -> Tensors:
        """The operator, on real tensors."""
        raise NotImplementedError

    def body(self, which: int, tensors: Tensors) -> Tensors:
        """Run a body; compiled anew for tensors that look different."""
        gm = self.bodies[which].gm
        if self.compile is None:
            return gm.forward(*tensors)
        key = which, torch.is_grad_enabled(), *[(t.shape, t.stride(), t.requires_grad) for t in tensors]
        call = self._compiled.get(key)
        if call is None:
            call = self._compiled[key] = self.compile(gm, list(tensors))
        return call(*tensors)

    def as_operator(self, bodies: list[fx.Node], args: Sequence[fx.Node]) -> tuple[Any, tuple[Any, ...]]:
        """PyTorch's own operator and its arguments; each body takes its own arguments and all free
        tensors.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{self.operator}({', '.join(str(body.gm.graph) for body in self.bodies)})"


def laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor with the strides of the spec: what follows was captured for these."""
    known = {
        s: n
        for size, n in zip(spec.shape, tensor.shape, strict=True)
        if isinstance(size, Size)
        for s in size.symbols
        if size.terms == {(s,): 1}
    }
    if any(not known.keys() >= s.symbols for s in spec.stride if type(s) is Size):
        return tensor  # a part that takes it is compiled for the strides that arrive
    stride = evaluate(spec.stride, known)
    return tensor if tensor.stride() == stride else copy_as(tensor, stride)


class Cond(ControlFlow):
    """Own tensors: the predicate, the operands. Bodies: what runs if it is true, and if not."""

    operator = "cond"

    def run(self, own: list[torch.Tensor], free: list[Tensors]) -> Tensors:
        which = 0 if own[0] else 1
        return self.body(which, [*own[1:], *free[which]])

    def as_operator(self, bodies: list[fx.Node], args: Sequence[fx.Node]) -> tuple[Any, tuple[Any, ...]]:
        return torch.ops.higher_order.cond, (args[0], *bodies, tuple(args[1:]))


class WhileLoop(ControlFlow):
    """Own tensors: those that are carried. Bodies: the condition and the step."""

    operator = "while_loop"

    def run(self, own: list[torch.Tensor], free: list[Tensors]) -> Tensors:
        carried: Tensors = own
        while self.body(0, [*carried, *free[0]])[0]:
            carried = list(map(laid_out, self.body(1, [*carried, *free[1]]), self.specs))
        return [tensor.clone() for tensor in carried] if carried is own else carried

    def as_operator(self, bodies: list[fx.Node], args: Sequence[fx.Node]) -> tuple[Any, tuple[Any, ...]]:
        own, free = tuple(args[: self.n_own]), tuple(args[self.n_own :])
        return torch.ops.higher_order.while_loop, (*bodies, own, free)


class Scan(ControlFlow):
    """Own tensors: `n_carried` that are carried, those that are gone through along their first dimension, and
    (of `map`) those that each step takes whole. The body gives the next carried ones and a row of each
    result."""

    operator = "scan"

    def __init__(
        self, bodies: list[Body], specs: tuple[TensorSpec, ...], n_own: int, n_carried: int, n_rows: int
    ) -> None:
        super().__init__(bodies, specs, n_own)
        self.n_carried, self.n_rows = n_carried, n_rows

    def run(self, own: list[torch.Tensor], free: list[Tensors]) -> Tensors:
        carried: Tensors = own[: self.n_carried]
        through = own[self.n_carried : self.n_carried + self.n_rows]
        whole = own[self.n_carried + self.n_rows :]
        rows = []
        for i in range(through[0].shape[0]):
            results = self.body(0, [*carried, *[x[i] for x in through], *whole, *free[0]])
            carried = list(map(laid_out, results[: self.n_carried], self.specs))
            rows.append(results[self.n_carried :])
        return [*carried, *[torch.stack(column) for column in zip(*rows, strict=True)]]

    def as_operator(self, bodies: list[fx.Node], args: Sequence[fx.Node]) -> tuple[Any, tuple[Any, ...]]:
        end = self.n_carried + self.n_rows
        if not self.n_carried:
            return torch.ops.higher_order.map_impl, (*bodies, list(args[:end]), list(args[end:]))
        return torch.ops.higher_order.scan, (
            *bodies,
            list(args[: self.n_carried]),
            list(args[self.n_carried : end]),
            tuple(args[end:]),
        )


class _Whole(torch.autograd.Function):
    """Runs an operator as one step of autograd, so that every input that wants a gradient gets one."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensors], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            outputs = tuple(run(*inputs))
        ctx.inputs, ctx.outputs = inputs, outputs
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*[r for r in results if not (r.is_floating_point() or r.is_complex())])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        pairs = [(o, g) for o, g in zip(ctx.outputs, grads, strict=True) if o.requires_grad and g is not None]
        wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        gradients = iter(
            [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
        )
        return None, *[next(gradients) if tensor.requires_grad else None for tensor in ctx.inputs]


def with_operators(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as other people's backends know control flow: calls of PyTorch's own operators, whose bodies
    are modules of the graph."""
    if not any(isinstance(node.target, ControlFlow) for node in gm.graph.nodes):
        return gm
    root, graph = torch.nn.Module(), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if not isinstance(node.target, ControlFlow):
            new[node] = graph.node_copy(node, new.__getitem__)
            continue
        target, bodies, at = node.target, [], 0
        n_free = sum(body.n_free for body in target.bodies)
        for k, body in enumerate(target.bodies):
            name = f"{target.operator}_{len(root._modules)}_{k}"
            root.add_module(name, _widened(body, n_free, at))
            at += body.n_free
            bodies.append(graph.get_attr(name))
        operator, args = target.as_operator(bodies, [new[arg] for arg in node.args])
        new[node] = graph.call_function(operator, args)
        new[node].meta = dict(node.meta)
    result = fx.GraphModule(root, graph, "Captured")
    result.meta.update(gm.meta)
    return result


def _widened(body: Body, n_free: int, at: int) -> fx.GraphModule:
    """The body's graph with the free tensors of all bodies behind its own arguments; its own are those from
    `at` on."""
    graph, new = fx.Graph(), {}
    old = [node for node in body.gm.graph.nodes if node.op == "placeholder"]
    n_own = len(old) - body.n_free
    for node in old[:n_own]:
        new[node] = graph.node_copy(node)
    free = [graph.placeholder(f"free{i}") for i in range(n_free)]
    for node, place in zip(old[n_own:], free[at:], strict=False):
        new[node] = place
        place.meta = dict(node.meta)
    for node in body.gm.graph.nodes:
        if node.op != "placeholder":
            new[node] = graph.node_copy(node, new.__getitem__)
    return fx.GraphModule(torch.nn.Module(), graph, "Body")
