"""Backends that are not ours get graphs with symbols as `torch.compile` gives them: `torch.SymInt`
placeholders of a PyTorch ShapeEnv, a tracing context that knows a fake tensor for each example, and the line
of each node.

>>> compiled = call_backend(backend, gm, examples)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .autograd.eager_check import check_traced
from .base import compat
from .base.config import config
from .base.errors import BackendError, InternalError
from .graph.control_flow import with_operators
from .graph.module import copy_of
from .graph.size_nodes import is_size
from .graph.sizes import Size, Symbol
from .graph.spec import TensorSpec
from .torch_compile_adapter import source_of

_TABLE = re.compile(r"\._modules\['([^']+)'\]")  # an item of what holds a module's children


def call_backend(
    backend: Callable[..., Any], gm: fx.GraphModule, examples: Sequence[Any]
) -> Callable[..., Any]:
    """What `backend` makes of the graph. Where it assumes something of a size, so does the captured program.

    Raises BackendError: DM406 for an assumption that cannot be told in our terms, DM411 in the check mode for
    what computes something else than the graph.
    """
    gm = with_operators(gm)
    for node in gm.graph.nodes:  # as torch.fx's own tools show and hand it on
        if (where := node.meta.get("where")) is not None:
            node.stack_trace = where.entry()
            paths = [(_TABLE.sub(r".\1", path), cls) for path, cls in node.meta.get("modules", ())]
            node.meta["nn_module_stack"] = {path: (path, cls) for path, cls in paths}
            node.meta["source_fn_stack"] = [(node.name, node.target)]
    before = copy_of(gm) if config.check else None  # the backend may rewrite it
    compiled = _called(backend, gm, examples)
    if before is None:
        return compiled
    try:
        graded = [isinstance(x, torch.Tensor) and x.requires_grad for x in examples]
        check_traced(before, examples, graded, lambda _: compiled)
    except InternalError as error:
        cause = f"{error.what}: {error.why}"
        raise BackendError(
            "DM411", "a backend made another program of a graph", why=cause, cure="mend the backend"
        ) from None
    return compiled


def _called(backend: Callable[..., Any], gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if not any(map(is_size, placeholders)):
        return backend(gm, list(examples))
    sizes = _TorchSizes()
    inputs = []
    for node, example in zip(placeholders, examples, strict=True):
        value = node.meta["val"]
        if isinstance(value, Size):
            example = node.meta["example_value"] = sizes.of(value)
        elif isinstance(value, TensorSpec) and isinstance(example, torch.Tensor):
            node.meta["example_value"] = sizes.fake(value, example)
        inputs.append(example)
    with compat.tracing()(compat.TracingContext()(sizes.mode)):
        compiled = backend(gm, inputs)
    sizes.tell_assumptions()
    return compiled


class _TorchSizes:
    """Our symbols in a ShapeEnv of PyTorch's."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv(duck_shape=False)  # equal sizes of one call need not be equal at the next
        self.mode = compat.FakeTensorMode()(shape_env=self.env, allow_non_fake_inputs=True)
        self.ours: dict[Any, Size] = {}  # by PyTorch's symbol
        self._theirs: dict[Symbol, Any] = {}

    def of(self, value: Any) -> Any:
        """An expression of ours as a SymInt of theirs; numbers as they are."""
        if not isinstance(value, Size):
            return value
        for symbol in value.symbols:
            if symbol not in self._theirs:
                self._theirs[symbol] = self._symbol(symbol)
        return value.value(self._theirs)

    def _symbol(self, symbol: Symbol) -> Any:
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = source_of(symbol.name)
        made = self.env.create_symbol(
            symbol.hint, source, DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=symbol.lo < 2
        )
        self.ours[made] = Size({(symbol,): 1}, symbol.env)
        return self.env.create_symintnode(made, hint=symbol.hint, source=source)

    def fake(self, spec: TensorSpec, example: torch.Tensor) -> torch.Tensor:
        """The fake tensor of an example, which the mode knows for it from now on."""
        with self.mode:
            made: Any = torch.empty_strided(
                [self.of(n) for n in spec.shape],
                [self.of(n) for n in spec.stride],
                dtype=spec.dtype,
                device=spec.device,
                requires_grad=example.requires_grad,
            )
        self.mode.fake_tensor_converter.set_tensor_memo(example, made)
        return made

    def tell_assumptions(self) -> None:
        """Ask our symbols what theirs were asked, so that the program is guarded by it."""
        interpret, analysis = compat.sympy_interp(), compat.PythonReferenceAnalysis()
        for guard in self.env.guards:
            try:
                holds = bool(interpret(analysis, self.ours, guard.expr))
            except (KeyError, TypeError, NotImplementedError, AttributeError) as error:
                raise _untold(guard.expr) from error
            if not holds:
                raise _untold(guard.expr)


def _untold(assumption: Any) -> BackendError:
    return BackendError(
        "DM406",
        "the backend assumes something of sizes that cannot be guarded",
        why=f"it asked for {assumption}",
        cure="nothing: sizes stay numbers for this function; dynamic=False does the same at once",
    )
