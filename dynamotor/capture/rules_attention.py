"""`flex_attention` in the graph: `score_mod` and `mask_mod` are interpreted as functions of numbers, and one node
takes them. What PyTorch refuses breaks the graph, so that eager says why.

`sdpa_kernel` is plain Python above the settings that choose attention's kernels: the program's settings are kept
here, goes with each call of attention, and is set for real after the graph.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..base.config import config
from ..base.narrowing import checked
from ..graph.flex import FlexAttention
from ..graph.modes import ATTENTION_SETTINGS, UnderSettings
from ..graph.shape_tensor import ShapeTensor
from ..graph.spec import TensorSpec
from ..graph.subgraphs import Body, Leaf
from .bodies import interpret
from .breaks import unsupported_if
from .rules_jagged import jagged_attention, split_attention, splits_by_lengths
from .source import Const
from .torch_rules import FLEX_ATTENTION
from .values.base import Trace, Value, builtin_rule, named_rule
from .values.constant import Constant, is_none, present
from .values.containers import ListValue, TupleValue
from .values.function import FunctionValue
from .values.tensor import TensorValue, lower, torch_call

_NAMES = [
    "query",
    "key",
    "value",
    "score_mod",
    "block_mask",
    "scale",
    "enable_gqa",
    "return_lse",
    "kernel_options",
    "return_aux",
]


@named_rule(f"{FLEX_ATTENTION}:flex_attention")
def _flex_attention(fn: Any, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    given: dict[str, Value] = dict(zip(_NAMES, args, strict=False)) | kwargs
    tensors = [v for name in _NAMES[:3] if isinstance(v := given[name], TensorValue)]
    auxiliary = present(given.get("return_aux"))
    unsupported_if(
        len(tensors) != 3 or auxiliary is not None and auxiliary.getattr(trace, "max_scores").as_constant(),
        "unsupported-call",
        "flex_attention is called with other arguments",
    )
    query, key, value = tensors
    mask = present(given.get("block_mask"))
    mask_mod = None if mask is None else mask.getattr(trace, "mask_mod")
    gqa = given.get("enable_gqa", Constant(False)).as_constant()
    _check(trace, [v.example for v in tensors], gqa, mask)
    exact = torch.float64 if query.example.dtype == torch.float64 else torch.float32
    bodies: list[Body | None] = []
    free: list[TensorValue] = []
    for fn, first in ((present(given.get("score_mod")), [exact]), (present(mask_mod), [])):
        body, read = (None, []) if fn is None else _pointwise(trace, fn, first, query)
        bodies.append(body)
        free += read
    scale = present(given.get("scale"))
    factor = query.example.size(-1) ** -0.5 if scale is None else scale.as_constant()
    target = FlexAttention(bodies[0], bodies[1], factor)
    target.on_gpu = _is_for_kernels([query, *free])
    blocks = _blocks(trace, target, mask) if target.on_gpu and mask is not None else []
    result = torch_call(trace, target, [query, key, value, *free, *blocks], {})
    if auxiliary is not None:
        output, sums = result.unpack(trace)
        wanted = auxiliary.getattr(trace, "lse").as_constant()
        made = trace.make(importlib.import_module(FLEX_ATTENTION).AuxOutput)
        return TupleValue([output, trace.call(made, [], {"lse": sums} if wanted else {})])
    if given.get("return_lse", Constant(False)).as_constant():
        return TupleValue(result.unpack(trace))
    return result.unpack(trace)[0]


@named_rule("transformers.integrations.flex_attention:compile_friendly_flex_attention")
def _of_transformers(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """transformers gives `flex_attention` to torch.compile unless dynamo traces it; here it is the node itself."""
    given = {name: value for name, value in kwargs.items() if name != "training"}
    flex = trace.make(importlib.import_module(FLEX_ATTENTION).flex_attention)
    return trace.tail_call(flex, [*args[:3]], given)


@named_rule(f"{FLEX_ATTENTION}:create_mask", f"{FLEX_ATTENTION}:create_block_mask")
def _mask_made_inside(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """Masks of blocks that the program makes: our own functions are inlined, for arguments that change tensors."""
    names = inspect.signature(fn).parameters
    given = dict(zip(names, args, strict=False)) | kwargs
    given.pop("_compile", None)
    function = next(iter(given.values()), None)
    if isinstance(function, FunctionValue):
        count = function.code.co_argcount - len(function.defaults)
        unsupported_if(count != 4, "unsupported-call", f"{fn.__name__} of a function of {count} arguments")
    mine = getattr(importlib.import_module(".polyfills.flex_blocks", __package__), fn.__name__)
    unknown = given.keys() - inspect.signature(mine).parameters.keys()
    unsupported_if(
        any(given.pop(name).as_constant() is not names[name].default for name in unknown),
        "unsupported-call",
        f"{fn.__name__} is called with {', '.join(sorted(unknown))}",
    )
    outer, trace.graph.gathers = trace.graph.gathers, True
    try:
        return trace.call(trace.make(mine), [], given)
    finally:
        trace.graph.gathers = outer


def _check(trace: Trace, tensors: list[torch.Tensor], gqa: bool, mask: Value | None) -> None:
    query, key, value = tensors
    fits = (
        all(tensor.dim() == 4 for tensor in tensors)
        and query.device == key.device == value.device
        and key.shape[:3] == value.shape[:3]
        and query.size(-1) == key.size(-1)
        and (query.size(1) % key.size(1) == 0 if gqa else query.size(1) == key.size(1))
        and (query.size(0) == key.size(0) or mask is not None and query.size(0) > 1 and key.size(0) == 1)
        and not torch.is_autocast_enabled(query.device.type)
    )
    if fits and mask is not None:
        block = mask.getattr(trace, "BLOCK_SIZE").as_constant()
        lengths: Any = mask.getattr(trace, "seq_lengths").as_constant()
        module = importlib.import_module(FLEX_ATTENTION)
        whole = block == (module._LARGE_SPARSE_BLOCK_SIZE,) * 2
        rows = checked(TensorValue, mask.getattr(trace, "kv_num_blocks")).example
        fits = whole or lengths == (query.size(2), key.size(2))
        fits = fits and rows.device == query.device
        fits = fits and (query.size(0) == key.size(0) or rows.size(0) == query.size(0))
    unsupported_if(
        not fits,
        "unsupported-call",
        "flex_attention is called with tensors that do not fit, or under autocast",
    )


def _is_for_kernels(tensors: list[TensorValue]) -> bool:
    """Whether a GPU's kernels may compute it: no gradient is asked for of the functions' inputs."""
    query, *free = [value.example for value in tensors]
    on_gpu = query.device.type == "cuda" or config.target == "triton"
    return on_gpu and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in free))


_BLOCKS = ("kv", "full_kv", "q", "full_q")


def _blocks(trace: Trace, target: FlexAttention, mask: Value) -> list[Value]:
    """The tensors of a mask's blocks, where it has such; noted in the target."""
    block = mask.getattr(trace, "BLOCK_SIZE").as_constant()
    if block == (importlib.import_module(FLEX_ATTENTION)._LARGE_SPARSE_BLOCK_SIZE,) * 2:
        return []
    found: list[Value] = []
    target.block = block
    for name in _BLOCKS:
        pair = [mask.getattr(trace, f"{name}_{what}") for what in ("num_blocks", "indices")]
        target.blocks.append(None if is_none(pair[0]) else name)
        found += [] if is_none(pair[0]) else pair
    return found


def _pointwise(
    trace: Trace, fn: Value, first: list[torch.dtype], query: TensorValue
) -> tuple[Body, list[TensorValue]]:
    """The body of a function of numbers: 0-d tensors, which index other tensors without being read."""
    dtypes = [*first, *[torch.int64] * 4]
    specs = [TensorSpec.dense((), dtype, query.example.device) for dtype in dtypes]
    examples = [
        ShapeTensor.make(spec, spec.dtype.is_floating_point and query.example.requires_grad) for spec in specs
    ]
    outer, trace.graph.gathers = trace.graph.gathers, True
    try:
        arguments = tuple([Leaf(i) for i in range(len(examples))])
        body, free = interpret(trace, fn, (arguments, {}), examples, name="flex_attention")
    finally:
        trace.graph.gathers = outer
    unsupported_if(
        type(body.result) is not Leaf,
        "transform",
        "a function given to flex_attention does not return a tensor",
    )
    return body, free


# Settings of attention's kernels ----------------------------------------------------------------------------
def _setting(setter: Any, getter: Any) -> None:
    def outside(trace: Trace) -> Value:
        found = trace.reader.ask(Const(getter, getter.__name__), getter, "the setting", lambda ask: ask())
        return trace.fresh(found)

    @builtin_rule(getter)
    def read(trace: Trace) -> Value:
        return trace.effects.settings.get(setter) or outside(trace)

    @builtin_rule(setter)
    def write(trace: Trace, value: Value, *more: Value) -> Value:
        settings = trace.effects.settings
        settings[setter] = ListValue(value.unpack(trace)) if isinstance(value, ListValue) else value
        if lower(value, False) == lower(outside(trace), False):
            del settings[setter]
        return Constant(None)


def _attention(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    written = {s: lower(v, False) for s, v in trace.effects.settings.items() if s in ATTENTION_SETTINGS}
    by_lengths = splits_by_lengths([*args, *kwargs.values()])
    fn = jagged_attention if by_lengths else fn
    fn = UnderSettings(fn, written) if written else fn
    return (split_attention if by_lengths else torch_call)(trace, fn, [*args], kwargs)


for _setter, _getter in ATTENTION_SETTINGS.items():
    _setting(_setter, _getter)
for _fn in (
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.multi_head_attention_forward,
):
    builtin_rule(_fn)(functools.partial(_attention, _fn))
