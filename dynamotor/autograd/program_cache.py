"""Whole compiled programs on disk: found by the captured graph and all that its compilation reads, kept as
plain data.

The key holds the torch graph's text with its lines, the inputs' metadata, PyTorch's settings and the
backend's `environment` (versions, settings, machine). What has no exact text (a user's function, a custom op,
a generator, a size that data decides) is not kept: an event "not kept" says why. Capture and its guards are
live in every process. Where sizes differ between calls, the key holds the known facts of the symbols and not
their values; the entry holds what compilation assumed of them, and serves calls of which that is true.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import operator
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..base import cache, compat
from ..base.config import config
from ..base.errors import BuildError
from ..base.events import collect, counters, emit, listening, timed
from ..graph.kernel_checks import kernel_settings, tf32
from ..graph.modes import autocast_state
from ..graph.plain_data import NotPlain, decode, encode, symbols_by_name
from ..graph.save_policy import SavePolicy
from ..graph.sizes import Guard, ShapeEnv, Size
from ..graph.spec import Compiled, TensorSpec, is_lazy, memory_groups
from ..graph.tensor_subclass import WrapperSpec, any_spec
from .lazy_compile import Narrow
from .reach import is_always_leaf

WAIT_SECONDS = 60.0  # for another process that compiles the same program
MOST = 4  # entries of one graph, for sizes of which different things are assumed
_STAGES = (
    "aten_graph",
    "build",
    "code",
    "kernel",
    "partition",
    "pass",
    "refuse",
)  # events of a compilation that was not there
MISSING = object()  # beside None, which stands for a program that has to be called in another way
# An entry that was written by the same version and is whole decodes; these say that it does not, whatever the
# reason.
_UNREADABLE = (NotPlain, KeyError, ValueError, TypeError, AttributeError, IndexError, SyntaxError)


@dataclass(frozen=True)
class Keeper:
    """How a backend's compiled graphs become plain data and come back. `prepare` is called where there is
    none, before the graph is differentiated.
    """

    environment: Callable[[], tuple[str, ...]]
    describe: Callable[[Compiled | None], Any]
    restore: Callable[[Any, str], Compiled | None]
    prepare: Callable[[], None] = lambda: None


class Notes:
    """What compiling a graph told users (ops left to aten), to be told again where the program comes from the
    disk.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note the messages within."""
        before = counters["fallback"].copy()
        with collect("fallback") as events:
            yield
        self.events += [event.data for event in events]
        self.counts += counters["fallback"] - before

    def plain(self) -> Any:
        return [encode(self.events), encode(dict(self.counts))]

    @staticmethod
    def tell(data: Any) -> None:
        """Say it again."""
        events, counts = decode(data[0]), decode(data[1])
        counters["fallback"].update(counts)
        for event in events:
            emit("fallback", **event)


@dataclass
class Kept:
    """A program's place on disk. Parts: "forward" (or the whole of inference), and backwards by number and
    absent tangents.

    env: the symbols, of which `assumed` guards came with the graph. backwards: the hash of what the forward's
    entry says of them, since another process may have cut the graph elsewhere. numbers: of the entry in use,
    by part.
    """

    key: str
    keeper: Keeper
    env: ShapeEnv | None
    assumed: int
    backwards: str = ""
    numbers: dict[str, int] = field(default_factory=dict)

    def backward(
        self,
        part: str,
        name: str,
        make: Callable[[], Compiled | None],
        graph: Callable[[], fx.GraphModule | None],
    ) -> Compiled | None:
        """A compiled backward, from the disk or made and kept; `graph` gives its source."""
        if not self.backwards:
            return make()
        # Known facts of sizes are assumed without being asked, those of the forward's entry, too.
        part = f"{part} of {self.backwards} where {_sizes_text(self.env)}"

        def restored(data: Any, call: Compiled | None, guards: list[Guard]) -> Compiled | None:
            return Narrow(call, guards, graph, name) if call is not None and guards else call

        with self.alone(part, lambda: self.find(part, name, restored)) as found:
            if found is not MISSING:
                return found
            notes = Notes()
            with notes.taken():
                made = make()
            call, guards = (made.call, made.guards) if type(made) is Narrow else (made, ())
            self.keep(part, call, notes, guards)
        return made

    @contextlib.contextmanager
    def alone(self, part: str, look: Callable[[], Any]) -> Iterator[Any]:
        """What `look` finds; where it is MISSING, one process at a time goes on to make it."""
        found = look()
        if found is not MISSING:
            yield found
            return
        self.keeper.prepare()
        with cache.exclusive("program", self._name(part), WAIT_SECONDS) as waited:
            yield look() if waited else MISSING

    def _name(self, part: str) -> str:
        return cache.digest(self.key, part, str(self.numbers.get(part, 0)))

    def find(
        self, part: str, name: str, build: Callable[[dict[str, Any], Compiled | None, list[Guard]], Any]
    ) -> Any:
        """The result of `build(entry, its compiled graph, its assumptions)`; MISSING when there is no entry
        for
        these sizes or a library is gone.
        """
        for number in range(MOST if self.env is not None else 1):
            self.numbers[part] = number
            payload = cache.load("program", self._name(part))
            if payload is None:
                return MISSING
            try:
                with timed("restore"):
                    data = json.loads(payload)
                    guards: list[Guard] = decode(data["guards"], symbols_by_name(self.env))
                    if self.env is not None and not all(g.holds(self.env.hints) for g in guards):
                        continue
                    program = data["program"] and self.keeper.restore(data["program"], name)
                    if data["program"] and program is None:
                        counters["cache"]["program.incomplete"] += 1
                        return MISSING
                    found = build(data, program, guards)
                    Notes.tell(data["notes"])
            except _UNREADABLE as error:
                counters["cache"]["program.unreadable"] += 1
                emit("not kept", reason=f"an entry cannot be read: {type(error).__name__}: {error}")
                return MISSING
            return found
        return MISSING

    def keep(
        self,
        part: str,
        program: Compiled | None,
        notes: Notes,
        guards: Sequence[Guard],
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Write an entry, unless something in it is not plain."""
        try:
            with timed("keep"):
                data = {
                    "program": self.keeper.describe(program),
                    "notes": notes.plain(),
                    "guards": encode(list(guards)),
                    **more(),
                }
                cache.store("program", self._name(part), _text(data).encode())
        except (NotPlain, BuildError) as why:  # without a C++ compiler its kernels have no keys
            _not_kept(str(why))


def _not_kept(reason: str) -> None:
    counters["cache"]["program.not_kept"] += 1
    emit("not kept", reason=reason)


def kept(
    keeper: Keeper | None,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    graded: Sequence[bool],
    static_inputs: frozenset[int],
) -> Kept | None:
    """Where the program of this graph is kept; None where it is not."""
    if keeper is None or _whole_compilation_is_wanted():
        return None
    try:
        with timed("key"):
            key = program_key(gm, inputs, graded, static_inputs, keeper.environment())
    except NotPlain as why:
        _not_kept(str(why))
        return None
    env = gm.meta.get("shape_env")
    return Kept(key, keeper, env, len(env.guards) if env is not None else 0)


def _whole_compilation_is_wanted() -> bool:
    """Whether the cache is off, or listeners check, time or read the stages of the compilation."""
    off = not (config.disk_cache and config.program_cache) or config.verify or config.check or config.sanitize
    return off or bool(config.log or config.debug) or any(map(listening, _STAGES))


# -- the key -------------------------------------------------------------------------------------------------
def program_key(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    graded: Sequence[bool],
    static_inputs: frozenset[int],
    environment: Sequence[str],
) -> str:
    """A hash of all that decides a graph's code. NotPlain for objects without an exact text."""
    NotPlain.when("on_backward" in gm.meta, "a graph with on backward")
    specs = specs_of(gm, inputs)
    given = [_input_text(*row, i in static_inputs) for i, row in enumerate(zip(inputs, specs, strict=True))]
    facts = [
        given,
        list(map(bool, graded)),
        memory_groups(inputs),
        sorted(static_inputs),
        _graph_text(gm),
        _sizes_text(gm.meta.get("shape_env")),
    ]
    return cache.digest("program-2", *environment, repr(torch_settings()), _text(facts))


def _text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def specs_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[TensorSpec | WrapperSpec | Size]:
    """The inputs' specs; where sizes differ between calls, what capture says of the placeholders."""
    if "shape_env" in gm.meta:
        return [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [any_spec(t) for t in inputs]


def _input_text(tensor: Any, spec: TensorSpec | WrapperSpec | Size, static: bool) -> Any:
    if type(spec) is Size:
        return encode(spec)
    NotPlain.when(
        type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided,
        f"an input that is a {type(tensor).__qualname__}",
    )
    NotPlain.when(tensor.device.type not in ("cpu", "cuda"), f"tensors on {tensor.device.type}")
    return [
        encode(spec),
        tensor.requires_grad,
        is_always_leaf(tensor, static),
        is_lazy(tensor),
        tensor.is_inference(),
    ]


def _sizes_text(env: ShapeEnv | None) -> Any:
    """The known facts of the symbols, of which only numbers that arrive have names in every process."""
    if env is None:
        return None
    NotPlain.when(any(symbol.unbacked for symbol in env.symbols), "a size that data decides")
    guards = [f"{guard.kind} {guard.expr}" for guard in env.guards]
    return [[(symbol.name, symbol.lo, symbol.hi) for symbol in env.symbols], guards, env.told]


def torch_settings() -> tuple[Any, ...]:
    """PyTorch's settings that a compilation reads."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_state(),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        kernel_settings(),
        torch.backends.mkldnn.is_available(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # the stub has no properties of modules
        _matmul_precision(),
        tf32(),
        torch.is_anomaly_enabled(),
    )


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it and the setting of one library (`allow_tf32`) were set otherwise
        return None


def _graph_text(gm: fx.GraphModule) -> list[Any]:
    policies = any(isinstance(node.meta.get("recompute"), SavePolicy) for node in gm.graph.nodes)
    NotPlain.when(policies, "a checkpoint with a policy")
    return [
        [
            node.name,
            node.op,
            _target_text(node),
            encode(node.args),
            encode(node.kwargs),
            encode(node.meta.get("where")),
            "recompute" in node.meta,
        ]
        for node in gm.graph.nodes
    ]


def _target_text(node: fx.Node) -> str:
    if node.op == "call_function":
        return function_name(node.target)
    if node.op == "call_method":
        _check_code(getattr(torch.Tensor, str(node.target), None), f"Tensor.{node.target}")
    return str(node.target)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SPACES = (
    torch,
    compat.variable_functions,
    compat.nn_functions,
    operator,
    math,
    builtins,
    compat.fft_functions,
    compat.linalg_functions,
    compat.special_functions,
)
_ROOTS = ("torch", "_operator", "math", "builtins", "dynamotor")
_names: dict[Any, str] = {}


def function_name(function: Any) -> str:
    """The name under which a library's function is found in every process; NotPlain for any other
    callable.
    """
    if isinstance(function, compat.OpOverload):
        return encode(function)["op"]
    NotPlain.when(
        type(function) not in (types.FunctionType, types.BuiltinFunctionType),
        f"a call of a {type(function).__qualname__}",
    )
    if function not in _names:
        _names[function] = _found_name(function)
    return _names[function]


def _found_name(function: Callable[..., Any]) -> str:
    name = function.__name__
    _check_code(function, name)
    module = sys.modules.get(function.__module__ or "")
    for space in (module, *_SPACES):
        if (
            getattr(space, name, None) is function
            and (function.__module__ or "torch").partition(".")[0] in _ROOTS
        ):
            return f"{getattr(space, '__name__', space)}.{name}"
    raise NotPlain(f"the function {name}, which has no name of its own")


def _check_code(function: Any, name: str) -> None:
    """A function written in Python must be PyTorch's or ours: the key holds their versions, and no other
    code.
    """
    if function is None:
        raise NotPlain(f"{name}, which is unknown")
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_filename.startswith((_TORCH, _OURS)):
        raise NotPlain(f"{name}, whose code is in {code.co_filename}")
