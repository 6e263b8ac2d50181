"""Programs of `torch.export` as models with example arguments, for `dynamotor.export`.

>>> model, args, kwargs, dynamic_shapes = from_torch_export(torch.export.export(model, (x,)), None, None)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..base.compat import tree_leaves
from ..base.errors import UsageError
from ..graph.sizes import INFINITY


@dataclass(frozen=True)
class Range:
    """The sizes that a dimension of an ExportedProgram may have, and its text there."""

    min: int | None
    max: int | None
    __name__: str


def from_torch_export(
    program: torch.export.ExportedProgram, given: Any, dynamic_shapes: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """The model, its example arguments by position and by name, and its dynamic dimensions.

    given: other examples, a pair. Raises UsageError (DM140) for a program without examples, and for dynamic
    shapes beside those of the program.
    """
    if dynamic_shapes is not None:
        raise UsageError(
            "DM140",
            "an ExportedProgram has its own dynamic shapes",
            cure="pass them to torch.export.export",
        )
    examples = program.example_inputs if given is None else (given[0], given[1] or {})
    if examples is None:
        raise UsageError(
            "DM140", "the ExportedProgram has no example inputs", cure="export(program, args, kwargs)"
        )
    args, kwargs = examples
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    model: Any = program.module(check_guards=False)
    model._forward_pre_hooks.clear()  # the checks of arguments: what calls the result has its own
    _for_inference(model)
    dims = _dimensions(program)
    shapes: dict[str, Any] = {}
    leaves = iter(dims)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    for name, value in bound.items():
        shapes[name] = _shaped(value, leaves)
    return model, args, dict(kwargs), shapes


_METADATA = torch.ops.aten._assert_tensor_metadata.default
_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled


def _for_inference(model: torch.nn.Module) -> None:
    """Take out checks of dtypes and devices, which hold for tensors like the examples (no others are taken),
    and the grad modes of parts, since programs run without gradients.
    """
    for module in [m for m in model.modules() if isinstance(m, torch.fx.GraphModule)]:
        graph = module.graph
        for node in graph.find_nodes(op="call_function", target=_METADATA):
            if not any(node.args[1:3]) and not {"size", "stride"} & node.kwargs.keys() and not node.users:
                graph.erase_node(node)
        for node in graph.find_nodes(op="call_function", target=_GRAD_MODE):
            _, part, *given = node.args
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(part.target, tuple(given), node.kwargs))
            graph.erase_node(node)
        module.recompile()


def _dimensions(program: torch.export.ExportedProgram) -> Iterator[dict[int, Range]]:
    """Of each argument, the dimensions that may differ, with their ranges."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    ranges = {str(symbol): found for symbol, found in program.range_constraints.items()}
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            node = nodes.get(getattr(spec.arg, "name", ""))
            value = node.meta.get("val") if node is not None else None
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            yield {
                d: _range(str(n), ranges.get(str(n)))
                for d, n in enumerate(shape)
                if isinstance(n, torch.SymInt)
            }


def _range(name: str, found: Any) -> Range:
    """The range of a size; found: None for an expression of others, which follows from theirs."""
    if found is None:
        return Range(None, None, name)
    lower, upper = int(found.lower), found.upper
    bounded = (
        getattr(upper, "is_finite", True) is not False and "oo" not in str(upper) and int(upper) < INFINITY
    )
    return Range(lower, int(upper) if bounded else None, name)


def _shaped(value: Any, leaves: Iterator[dict[int, Range]]) -> Any:
    """The dynamic dimensions of an argument, which may hold several tensors."""
    if isinstance(value, Mapping):
        return {key: _shaped(item, leaves) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return {k: _shaped(item, leaves) for k, item in enumerate(value)}
    if len(tree_leaves(value)) != 1 and value is not None:
        return {}
    return next(leaves, {})
