"""What each aten op does on an xla tensor: record it, view, write in place, decompose, or run on the CPU.

`classify` decides once per overload, from the schema and the registries; adding a lowering never touches this
file.

>>> classify(aten.add_.Tensor).__name__
'in_place'
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import get_default_dtype

from dynamotor.extension_api import Registry, UnsupportedOp, facts, functional_form, types_of, without_out

from . import compat, fallback, metrics, tensor, transfer
from .checks import check_types, check_values, values as value_checks
from .compat import OpOverload
from .ir import UNKNOWN, Node, Refused, XlaError, append, describe, record, remember, simple, unpack
from .layout import of_op, of_result, of_view, strided, strides_in
from .lowering import decompositions, find, on_registration
from .tensor import (
    Alias,
    Handler,
    XLATensor,
    check_views,
    inverses,
    new_root,
    node_of,
    value,
    wrap,
    wrap_view,
    write,
)

specials: Registry[Any, Handler] = Registry("special handler")
# Arguments that mean nothing on a device with opaque memory.
_NOT_RECORDED = frozenset(("device", "layout", "pin_memory", "memory_format", "non_blocking"))


def to_nodes(args: Any) -> tuple:
    """Arguments with nodes in place of tensors."""
    return tuple(
        [
            value(a._alias)
            if type(a) is XLATensor
            else a
            if type(a) is int or a is None
            else _convert(a, args)
            for a in args
        ]
    )


def _convert(arg: Any, args: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        if type(arg) is XLATensor:
            return value(arg._alias)
        if arg.dim() == 0 and arg.device.type == "cpu":
            return transfer.from_cpu(arg, _lane(args))
        kind = arg.type() if arg.device.type == "cpu" else f"{arg.dtype} on {arg.device}"
        raise XlaError(
            "DM613",
            f"Input tensor is not an XLA tensor: {kind}",
            where=metrics.user_line(),
            why="an operation got tensors of the xla device and of another one",
            cure='move the tensor (or the module) with .to("xla")',
        )
    return type(arg)([_convert(a, args) for a in arg]) if type(arg) is list or type(arg) is tuple else arg


def _lane(args: Any) -> Any:
    for arg in compat.tree_leaves(args):
        if type(arg) is XLATensor:
            return arg._alias.lane
    raise AssertionError("an op reached the xla device without an xla tensor")


def results(node: Node, strides: Any = None) -> Any:
    """Tensors for the results of an instruction, with memory of their own; `strides` as `layout.of_result`
    gives
    them.
    """
    if type(node.meta) is not tuple:
        return wrap(new_root(node, strides))
    laid = zip(unpack(node), strides or [None] * len(node.meta))
    return tuple([None if item is None else wrap(new_root(item, stride)) for item, stride in laid])


def plain(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """A functional op with a lowering. One that was recorded before, on row-major tensors and integers, has a
    shorter way.
    """
    if not kwargs:
        nodes: list[Node] = []
        key: list[Any] = [id(func), get_default_dtype()]
        for arg in args:
            if type(arg) is XLATensor:
                alias = arg._alias
                if alias.stride is not None:
                    break
                nodes.append(node := alias.node if alias.root is None else value(alias))
                key.append(node.meta)
            elif type(arg) is int or arg is None:
                key.append(arg)
            else:
                break
        else:
            instruction = simple.get(tuple(key))
            if instruction is not None:
                return wrap(new_root(append(nodes[0].lane, instruction, nodes, None)))
    return _plain(func, args, kwargs)


def _plain(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    try:
        node = record(func, to_nodes(args), _keywords(kwargs, args) if kwargs else None)
    except Refused as refused:
        return _without_lowering(func, args, kwargs, str(refused))
    if func in value_checks:
        check_values(func, to_nodes(args), _keywords(kwargs, args) if kwargs else None)
    strides = node.instruction.strides
    if strides is not None or kwargs or strided(args):
        strides = of_result(func, node.instruction, args, kwargs)
    if type(node.meta) is tuple:
        return compat.tree_unflatten(results(node, strides), node.instruction.tree)
    if not kwargs and strides is None and node.inputs and func not in value_checks:
        remember(node.instruction, args)
    return wrap(new_root(node, strides))


def _keywords(kwargs: dict[str, Any], args: Any) -> dict[str, Any]:
    return {
        name: value(a._alias) if type(a) is XLATensor else _convert(a, (args, list(kwargs.values())))
        for name, a in kwargs.items()
        if name not in _NOT_RECORDED
    }


# Of decomposed ops, by the kinds of their arguments: the strides of their results. Types were checked then.
_layouts: dict[tuple, Any] = {}
_MOST_LAYOUTS = 4096  # numbers that change are among the kinds


def _without_lowering(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None, reason: str) -> Any:
    """Decompose where a decomposition is known, else run on the CPU."""
    decomposition = (
        decompositions.get(func)
        or decompositions.get(func.overloadpacket)
        or compat.decomposition_table.get(func)
    )
    if decomposition is not None:
        # Composites are PyTorch's own program, which looks at types itself.
        by_parts = decomposition if _is_composite(func) else partial(_by_parts, func, decomposition)
        result = by_parts(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
    if _is_composite(func):
        result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
    return fallback.run_on_cpu(func, args, kwargs, reason)


def _by_parts(func: OpOverload, decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a decomposition with the strides of the op, whose types are checked first."""
    nodes, named = to_nodes(args), _keywords(kwargs, args)
    key: tuple[Any, ...] = (id(func), get_default_dtype(), kwargs.get("memory_format"))
    key += (describe(nodes), describe(named), *strides_in((*args, *kwargs.values())))
    # Asking a kernel that draws would move the CPU's generator.
    if key not in _layouts and torch.Tag.nondeterministic_seeded not in func.tags:
        leaves = compat.tree_leaves((nodes, named))
        check_types(func, nodes, named, [leaf.meta for leaf in leaves if type(leaf) is Node])
    result = decomposition(*args, **kwargs)
    if result is NotImplemented:
        return result
    if key not in _layouts:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[key] = of_op(func, args, kwargs)
    return _laid_out(result, _layouts[key])


def _laid_out(result: Any, strides: Any) -> Any:
    """A decomposition's results, with these strides."""
    if type(result) is XLATensor and type(strides) is not list:
        flat, tree = [result], None
    else:
        flat, tree = compat.tree_flatten(result)
    strides = strides if type(strides) is list else [strides] * len(flat)
    if UNKNOWN in strides or len(strides) != len(flat):
        return result
    for at, (made, stride) in enumerate(zip(flat, strides)):
        if type(made) is XLATensor and made._alias.stride != stride:
            flat[at] = wrap(new_root(value(made._alias), stride))
    return flat[0] if tree is None else compat.tree_unflatten(flat, tree)


def _is_composite(func: OpOverload) -> bool:
    return compat.has_kernel(func.name(), "CompositeImplicitAutograd")


def for_each(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """`_foreach_*`: PyTorch's slow kernel, which calls the op for each tensor."""
    return func._op_dk(compat.composite_explicit, *args, **(kwargs or {}))


def lacking(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """A functional op without a lowering of its own."""
    return _without_lowering(func, args, kwargs, "no lowering")


def composite(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """An op that is a view of its argument or a copy: its parts say which."""
    return func.decompose(*args, **(kwargs or {}))


def view(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """A view op: a new alias on the same root."""
    parent = args[0]._alias
    try:
        node = record(func, (value(parent), *args[1:]), kwargs)
    except Refused as refused:  # a copy of the CPU's would be no view
        raise XlaError("DM609", f"XLA has no {func}", why=str(refused), where=metrics.user_line()) from None
    stride, offset = of_view(func, node.instruction, parent, args, kwargs)
    return wrap_view(Alias(node, parent, func, args[1:], kwargs, stride, offset), args[0])


def in_place(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """`add_`: record `add`, write the result to self."""
    target = args[0]
    if type(target) is not XLATensor:
        _convert(target, args)
    alias, functional = target._alias, functionals[id(func)]
    try:
        node = record(functional, to_nodes(args), _keywords(kwargs, args) if kwargs else None)
    except Refused as refused:
        if find(functional) is None and _is_known(functional):
            node = value(functional_call(functional, args, kwargs)._alias)
        else:
            return fallback.run_on_cpu(func, args, kwargs, str(refused))
    if functional in value_checks:
        check_values(functional, to_nodes(args), _keywords(kwargs, args) if kwargs else None)
    if node.meta is not alias.meta:
        _check_in_place(node, alias)
    write(alias, node)
    check_views(alias, args)
    return target


def functional_call(functional: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    return handler_of(functional)(functional, args, kwargs)


def _is_known(func: OpOverload) -> bool:
    return (
        func in compat.decomposition_table
        or func in decompositions
        or func.overloadpacket in decompositions
        or _is_composite(func)
    )


def _check_in_place(node: Node, alias: Alias) -> None:
    torch._check(
        node.meta.shape == alias.meta.shape,
        lambda: (
            f"output with shape {list(alias.meta.shape)} doesn't match the broadcast shape "
            f"{list(node.meta.shape)}"
        ),
    )
    if not torch.can_cast(node.meta.dtype, alias.meta.dtype):
        names = [str(d.dtype).removeprefix("torch.").capitalize() for d in (node.meta, alias.meta)]
        raise RuntimeError(f"result type {names[0]} can't be cast to the desired output type {names[1]}")


def several_in_place(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """An op that writes several tensors or lists (`_foreach_add_`): its functional twin returns its results,
    then the written values."""
    functional = functionals[id(func)]
    returned = functional_call(functional, args, kwargs)
    flat = compat.tree_leaves(returned)
    targets = compat.tree_leaves(fallback.written(func, args, kwargs or {}))
    own = len(flat) - len(targets)
    for target, result in zip(targets, flat[own:]):
        write(target._alias, value(result._alias))
    returns = func._schema.returns
    if not returns:
        return None
    return flat[0] if own == 1 else args[0] if own == 0 else tuple(flat[:own])


def out_variant(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """`op(..., out=t)`: the functional op, written to `t` (which takes the result's shape, as torch resizes
    it).
    """
    kwargs = dict(kwargs or {})
    names = list(map(str, facts(func).writes))
    outs = [kwargs.pop(name) for name in names]
    functional = functionals[id(func)]
    if functional is None:
        return fallback.run_on_cpu(
            func, args, {**kwargs, **dict(zip(names, outs))}, "no functional variant of this out= op"
        )
    if any(a.name == "device" for a in functional._schema.arguments):
        kwargs.setdefault("dtype", outs[0].dtype)
        made = make(functional, args, kwargs, outs[0]._alias.lane)
    else:
        made = functional(*args, **kwargs)
    flat = compat.tree_leaves(made)
    for out, result in zip(compat.tree_leaves(outs), flat):
        set_out(out, result)
    return outs[0] if len(outs) == 1 else tuple(outs)


def make(func: Any, args: tuple, kwargs: dict[str, Any], lane: Any) -> XLATensor:
    """Run a factory (an op without tensor arguments): recorded on a lane, or made on the CPU and copied."""
    memory_format = kwargs.get("memory_format")
    kwargs = {name: value for name, value in kwargs.items() if name not in _NOT_RECORDED}
    args = tuple([list(a) if isinstance(a, (list, tuple)) else a for a in args])
    try:
        node = record(func, args, kwargs, lane)
        asked = {"memory_format": memory_format} if memory_format else None
        return wrap(new_root(node, of_result(func, node.instruction, args, asked) if asked else None))
    except Refused as refused:
        fallback.count(func, str(refused), lane)
        return wrap(new_root(transfer.from_cpu(func(*args, **kwargs, device=torch.device("cpu")), lane)))


def set_out(out: torch.Tensor, result: XLATensor) -> None:
    """Write a result to an `out=` tensor; another shape replaces the tensor's memory, as resizing does."""
    if type(out) is not XLATensor:
        out.copy_(result)
        return
    torch._check(
        torch.can_cast(result.dtype, out.dtype),
        lambda: f"result type {result.dtype} can't be cast to the desired output type {out.dtype}",
    )
    if out.shape == result.shape:
        write(out._alias, node_of(result))
    else:
        out.data = result.to(out.dtype)


def refuse_mutation(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """An op that writes its inputs in a way without a description: silently losing the write would be
    worse than
    an error.
    """
    return fallback.run_on_cpu(func, args, kwargs, "it writes its inputs and has no functional variant")


functionals: dict[int, Any] = {}  # by id, as tensor.handlers


def _functional_of(func: OpOverload) -> Any:
    """The functional twin of an in-place overload, or None: the one of captured graphs, or of an op that
    writes several arguments.
    """
    with contextlib.suppress(UnsupportedOp):
        return functional_form(func)
    namespace, name = func._schema.name.split("::")
    for twin in (name.removesuffix("_"), f"{name}_functional", name.replace("__i", "__")):
        packet = getattr(getattr(torch.ops, namespace), twin, None)
        found = getattr(packet, func._overloadname, func)
        # An overload may have the name and take its arguments in another order (polygamma).
        if found is not func and types_of(found) == types_of(func):
            return found
    return None


@tensor.classify.define
def classify(func: OpOverload) -> Handler:
    """The handler of an overload."""
    special = specials.get(func) or specials.get(func._schema.name)  # the name of an op of a library
    if special is not None:
        return special
    if func in inverses:
        return view
    schema = func._schema
    if schema.name.startswith("aten::_foreach_") and not func._overloadname.endswith("out"):
        return for_each
    if not schema.is_mutable:
        # In inference mode composites arrive whole; whether `reshape` copies is decided by its parts.
        if _is_composite(func) and any(r.alias_info is not None for r in schema.returns):
            return composite
        return plain if find(func) is not None else lacking
    writes = facts(func).writes
    if all(type(at) is str for at in writes):
        functionals[id(func)] = without_out(func)
        return out_variant
    functionals[id(func)] = _functional_of(func)
    if functionals[id(func)] is None:
        return refuse_mutation
    one = str(schema.arguments[0].type) == "Tensor" and len(functionals[id(func)]._schema.returns) == 1
    return in_place if writes == (0,) and one else several_in_place


def handler_of(func: Callable[..., Any]) -> Handler:
    handler = tensor.handlers.get(id(func))
    if handler is None:
        handler = tensor.handlers[id(func)] = classify(func)
    return handler


def _forget(functions: list[Any]) -> None:
    for func in functions:
        tensor.handlers.pop(id(func), None)


on_registration.append(_forget)
