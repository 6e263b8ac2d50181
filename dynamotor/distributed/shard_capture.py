"""FSDP2's hooks in a trace: the hook before a forward becomes one node that gives the whole parameters, which
stand in the place of the shards until the hook behind it.

The trace's assumptions are checked for each sharded module at every call. A module that needs the hooks, or
is
not in the state in which compiled code begins, leaves them to eager PyTorch (DM460).

>>> why_not(state)      # None, or what only the hooks can do
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.events import counters
from ..capture.breaks import Unsupported, unsupported
from ..capture.polyfills.sharded import cast_floats
from ..capture.source import Const
from ..capture.values.base import Trace, Value, named_rule
from ..capture.values.containers import DictValue, SequenceValue, TupleValue
from ..capture.values.nn_module import NNModuleValue
from ..capture.values.tensor import TensorValue, torch_call
from .shard_group import ShardGroup, shard_group_of
from .shard_ops import Gather, Unshard

_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"


def param_groups(state: Any) -> list[Any]:
    """The `FSDPParamGroup`s of a state; one at most before PyTorch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


# One row a case: what to tell, test of a group. First what stays once a module has run, then what may change.
_LASTING: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("parameters are offloaded to the CPU", lambda g: any(p.offload_to_cpu for p in g.fsdp_params)),
    ("parameters are replicated, not sharded", lambda g: not hasattr(g.mesh_info, "shard_process_group")),
    ("one mesh is for data and tensors", lambda g: getattr(g.mesh_info, "is_spmd_mesh", False)),
    (
        "parameters gather themselves (fsdp_pre_all_gather)",
        lambda g: any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in g.fsdp_params),
    ),
    (
        "parameters have several types",
        lambda g: len({p.param_dtype or p.orig_dtype for p in g.fsdp_params}) > 1,
    ),
)
_CHANGING: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("parameters are gathered already", lambda g: not g.is_sharded),
    ("a forward or backward of the module is under way", lambda g: g._training_state.name != "IDLE"),
    ("parameters stay gathered behind a backward", lambda g: not g.reshard_after_backward),
    ("reshard_after_forward is a number of ranks", lambda g: g._use_post_forward_mesh),
    (
        "the way of communication is the program's own",
        lambda g: (
            g._all_reduce_hook is not None
            or type(g._all_gather_comm).__name__ != "DefaultAllGather"
            or type(g._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
        ),
    ),
    (
        "gradients are summed over shards and not over replicas (set_requires_all_reduce)",
        lambda g: g.reduce_grads and not g.all_reduce_grads or g._partial_reduce_output is not None,
    ),
)


def why_not(state: Any) -> str | None:
    """What of this state only FSDP's own hooks can do."""
    return _first(state, _LASTING) or _first(state, _CHANGING)


def _first(state: Any, rows: Sequence[tuple[str, Callable[[Any], bool]]]) -> str | None:
    return next((text for g in param_groups(state) for text, holds in rows if holds(g)), None)


def _facts(state: Any) -> tuple[Any, ...]:
    """The assumptions of a trace that may change; asked at each call."""
    groups = param_groups(state)
    graded = [p.sharded_param.requires_grad for group in groups for p in group.fsdp_params]
    kept = [group.post_forward_mesh_info is None for group in groups]
    return _first(state, _CHANGING), state._training_state.name, kept, graded


@dataclass(frozen=True)
class _Stays:
    """A question about a state: whether these are still its facts."""

    facts: tuple[Any, ...] = field(hash=False)

    def __call__(self, state: Any) -> bool:
        return _facts(state) == self.facts


@named_rule(f"{_STATES}:FSDPState._pre_forward")
def _pre_forward(fn: Callable[..., Any], trace: Trace, state: Value, *args: Value) -> Value:
    """`state._pre_forward(module, args, kwargs)`: the module's parameters are whole from here on."""
    _check_state(state)
    module, *given = args
    real = state.real()
    if real._is_root is None:
        real._lazy_init()
    reason = why_not(real)
    if reason is not None:
        raise _left(module, reason)
    trace.modules.whole.append(real)
    trace.reader.guard_identity(state.source, real)  # the graph names its groups
    trace.reader.ask(state.source, real, "its sharded parameters and settings", _Stays(_facts(real)))
    trace.stack.frames[-1].tail = False  # a break inside of the module moves out of its call
    late = not any(map(_asks_gradient, given))
    if real._mp_policy.cast_forward_inputs:
        given = _cast(trace, real._mp_policy.param_dtype, given)
    for group in param_groups(real):
        for (table, name), weight in _with_weights(trace, module, shard_group_of(group, real), late):
            table.show(name, weight)
    return TupleValue(given)


def _check_state(state: Value) -> None:
    """Break at a function with the name of a state's method: it is the hook of modules that share a state."""
    if not hasattr(state.real(), "_state_ctx"):
        raise _left(state, "several modules are sharded together")


def _left(module: Value, reason: str) -> Unsupported:
    """The break that leaves a hook to PyTorch."""
    counters["fallback"]["fsdp"] += 1
    what = f"the parameters of {module.describe()} are gathered and reduced by FSDP's own hooks"
    return unsupported("sharded", what, reason)


def _asks_gradient(value: Value) -> bool:
    """Whether a tensor among the inputs has a gradient."""
    if isinstance(value, TensorValue):
        return value.example.requires_grad
    if isinstance(value, DictValue):
        return any(_asks_gradient(item) for _, item in value.load().values())
    return isinstance(value, SequenceValue) and any(map(_asks_gradient, value.items))


@named_rule(f"{_STATES}:FSDPState._post_forward")
def _post_forward(fn: Callable[..., Any], trace: Trace, state: Value, *args: Value) -> Value:
    """`state._post_forward(module, inputs, output)`: the module has its shards again."""
    _check_state(state)
    module, _, output = args
    real = state.real()
    if real not in trace.modules.whole:
        raise _left(module, "the hook before the forward has run outside of this graph")
    trace.modules.whole.remove(real)
    for group in param_groups(real):
        for table, name in itertools.chain(*_places(trace, module, group)):
            table.show(name, None)
    return _cast(trace, real._mp_policy.output_dtype, [output])[0]


def _cast(trace: Trace, dtype: torch.dtype | None, values: list[Value]) -> list[Value]:
    """Values with their floating tensors in another type."""
    if dtype is None:
        return values
    return [trace.call_python(cast_floats, [trace.make(dtype), value]) for value in values]


Place = tuple[DictValue, str]


def _with_weights(trace: Trace, module: Value, of: ShardGroup, late: bool) -> Iterator[tuple[Place, Value]]:
    """Each place of a group's parameters, with the whole parameter that is to be seen there."""
    anchor = trace.wrap(Const(of.anchor, "anchor"), of.anchor)
    before, trace.graph.recompute = trace.graph.recompute, of.reshards and trace.calls.graded
    try:
        flat = torch_call(trace, Gather(of), [anchor], {})
        weights = torch_call(trace, Unshard(of, late), [flat, anchor], {}).unpack(trace)
    finally:
        trace.graph.recompute = before
    for places, weight in zip(_places(trace, module, of.parameters), weights, strict=True):
        if isinstance(weight, TensorValue):
            weight.cls = torch.nn.Parameter
        for place in places:
            yield place, weight


def _places(trace: Trace, module: Value, group: Any) -> list[list[Place]]:
    """For each parameter the tables of modules, and the names there, under which it is used."""
    paths: dict[int, str] = {}
    for path, inner in module.real().named_modules(remove_duplicate=False):
        paths.setdefault(id(vars(inner)), path)  # a compiled module shares its module's
    found = []
    for param in group.fsdp_params:
        info = param._module_info
        owners = [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ]
        found.append([(_table(trace, module, paths[id(vars(owner))]), name) for owner, name in owners])
    return found


def _table(trace: Trace, module: Value, path: str) -> DictValue:
    for name in filter(None, path.split(".")):
        module = module.getattr(trace, name)
    assert isinstance(module, NNModuleValue)
    return module.table(trace, "_parameters")
