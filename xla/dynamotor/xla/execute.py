"""From a trace to an XLA executable, and calls of it.

>>> graph = Graph.of(lane, outputs)
>>> executable = compile_graph(graph, example_arrays, device)
>>> executable.run(arrays)
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dynamotor.extension_api import DynamotorError, emit, reached

from . import metrics, persistent_cache, replicated, replication, rng
from .dtypes import on_cpu
from .ir import Instruction, Lane, Meta, XlaError, lower_instruction


@dataclass(frozen=True)
class Step:
    """One node: an instruction and the positions of its inputs (negative: leaves), or an item of a
    multi-result step.
    """

    instruction: Instruction
    inputs: tuple[int, ...]
    item: int
    scalar: int  # index of its first lifted scalar
    draw: int  # index of its random number, or -1


@dataclass
class Graph:
    """A trace cut to what its outputs need. Inputs in order: leaves, then one vector of lifted scalars, then
    the keys of its random draws."""

    steps: dict[int, Step]
    leaves: list[Meta]
    outputs: tuple[int, ...]
    scalars: int
    draws: int
    collective: bool
    device: torch.device
    donated: tuple[int, ...] = ()

    @classmethod
    def of(cls, lane: Lane, outputs: Sequence[int], donated: tuple[int, ...] = ()) -> Graph:
        """The graph of a lane's trace for outputs at these positions."""
        steps: dict[int, Step] = {}
        scalar = draw = 0
        for position, node in enumerate(lane.nodes):
            random = node.item < 0 and node.instruction.rule.random
            steps[position] = Step(
                node.instruction,
                tuple(n.position for n in node.inputs),
                node.item,
                scalar,
                draw if random else -1,
            )
            if node.item < 0:
                scalar += node.instruction.scalars
                draw += random
        needed = _needed(steps, outputs)
        steps = {position: step for position, step in steps.items() if position in needed}
        return cls(
            steps,
            [leaf.meta for leaf in lane.leaves],
            tuple(outputs),
            len(lane.scalars),
            len(lane.draws),
            lane.collective,
            lane.device,
            donated,
        )

    def __str__(self) -> str:
        """The graph as a Python program."""
        name = lambda p: f"v{p}" if p >= 0 else f"a{-p - 1}"  # noqa: E731
        lines = [f"def graph({', '.join(f'a{i}: {meta!r}' for i, meta in enumerate(self.leaves))}):"]
        for position, step in self.steps.items():
            if step.item >= 0:
                lines.append(f"    v{position} = {name(step.inputs[0])}[{step.item}]")
            else:
                lines.append(f"    v{position} = {step.instruction.show([name(p) for p in step.inputs])}")
        return "\n".join([*lines, f"    return {', '.join(map(name, self.outputs))}"])


def _needed(steps: dict[int, Step], outputs: Sequence[int]) -> set[int]:
    """Positions that the outputs need; a collective is always needed: the other replicas wait for it."""
    start = [p for p in outputs if p >= 0]
    start += [p for p, step in steps.items() if step.instruction.rule.collective]
    return reached(start, lambda position: [p for p in steps[position].inputs if p >= 0])


def to_function(graph: Graph) -> Callable[..., list[jax.Array]]:
    """The jax function of a graph: (leaves..., [scalars], [keys]) -> outputs."""
    n_leaves = len(graph.leaves)

    def program(*inputs: Any) -> list[jax.Array]:
        scalars = inputs[n_leaves] if graph.scalars else ()
        keys = inputs[-1] if graph.draws else ()
        env: dict[int, Any] = {-i - 1: array for i, array in enumerate(inputs[:n_leaves])}
        for position, step in graph.steps.items():
            values = [env[p] for p in step.inputs]
            if step.item >= 0:
                env[position] = values[0][step.item]
                continue
            numbers = [scalars[step.scalar + i] for i in range(step.instruction.scalars)]
            if not step.instruction.double:
                numbers = [number.astype(jnp.float32) for number in numbers]
            key = rng.key(keys[step.draw]) if step.draw >= 0 else None
            env[position] = lower_instruction(step.instruction, values, numbers, key)
        return [env[p] for p in graph.outputs]

    return program


@dataclass(slots=True)
class Executable:
    """A compiled graph. `start` takes jax arrays in the graph's input order and checks nothing: the trace's
    key proved that they fit."""

    graph: Graph
    compiled: Any
    start: Callable[[list[jax.Array]], list[jax.Array]]
    timing: str = "ExecuteTime"  # the name of its times

    def run(self, inputs: list[jax.Array], kind: str = "") -> list[jax.Array]:
        """Run (asynchronously, as jax does) and count it as `kind`. Errors of the device become coded
        errors."""
        start = time.perf_counter()
        try:
            results = self.start(inputs)
        except Exception as error:
            raise_coded(error)
        metrics.timings[f"{kind}ExecuteTime" if kind else self.timing].since(start)
        return results


def compile_graph(graph: Graph, inputs: list[Any], kind: str = "") -> Executable:
    """Compile for inputs like these (jax arrays, or jax.ShapeDtypeStruct with a sharding); counts and times
    it as `kind`.

    XlaError DM604 when XLA refuses the program, DM603 when it runs out of memory.
    """
    start = time.perf_counter()
    function = to_function(graph)
    try:
        if graph.collective and replication.size() > 1:
            executable = Executable(graph, None, replicated.compile_replicated(function, inputs))
        else:
            compiled = _compile(function, graph, inputs)
            executable = Executable(graph, compiled, _runner(compiled, inputs))
            if len(compiled.runtime_executable().local_devices()) > 1:
                executable.timing = "ExecuteReplicatedTime"
    except (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise failure(error, "DM604", "XLA could not compile this graph") from error
    metrics.timings[f"{kind}CompileTime"].since(start)
    metrics.counter("UncachedCompile")
    emit("xla.compiled", seconds=time.perf_counter() - start, nodes=len(graph.steps), graph=graph)
    return executable


_custom_options: dict[str, Any] = {}


def set_custom_compile_options(options: dict[str, str | bool | int | float]) -> None:
    """Options of XLA's compiler for programs compiled from now on; they take the place of those set before.

    >>> torch_xla.set_custom_compile_options({"xla_cpu_enable_fast_math": False})
    """
    _custom_options.clear()
    _custom_options.update(options)


def _compile(function: Callable, graph: Graph, inputs: list[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        persistent_cache.watch()
        lowered = jax.jit(function, donate_argnums=graph.donated, keep_unused=True).lower(*inputs)
        if not on_cpu() or any(name in os.environ.get("XLA_FLAGS", "") for name in _cpu_options):
            return lowered.compile(compiler_options=_custom_options or None)
        try:
            return lowered.compile(compiler_options={**_cpu_options, **_custom_options})
        except jax.errors.JaxRuntimeError as error:
            if not any(name in str(error) for name in _cpu_options):
                raise
            _cpu_options.clear()  # this jaxlib does not know them
            return lowered.compile(compiler_options=_custom_options or None)


# XLA:CPU may hand products and sums to a kernel library. Products gain from it; a sum is slower there, and
# rounded differently according to what comes before it in the same program, so that a forward pass alone
# would differ from one with its backward.
_cpu_options: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def _runner(compiled: Any, inputs: list[Any]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Calls on one device go straight to the runtime's executable: `Compiled.__call__` spends 0.3 us an
    argument on checks that the key makes needless. Graphs over several devices take jax's own way."""
    executable = compiled.runtime_executable()
    if len(executable.local_devices()) > 1:
        return lambda arrays: compiled(*arrays)
    execute = getattr(executable, "execute_sharded", None)
    if execute is None:  # a jaxlib without the plain interface
        return lambda arrays: compiled(*arrays)
    # jax's own makers of results know the shardings; without them each call makes one a result.
    results = getattr(
        getattr(getattr(compiled, "_executable", None), "unsafe_call", None), "out_handler", None
    )
    if results is not None:
        handlers = results.handlers
        return lambda arrays: execute(arrays).consume_with_handlers(handlers)
    return lambda arrays: [parts[0] for parts in execute(arrays).disassemble_into_single_device_arrays()]


def raise_coded(error: Exception) -> NoReturn:
    """Raise the coded error for a run's error."""
    if isinstance(error, DynamotorError):
        raise error
    raise failure(error, "DM605", "an XLA program failed while it ran") from error


def failure(error: BaseException, code: str, what: str) -> XlaError:
    """The coded error for what jax raised, with the user's line."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return XlaError(
            "DM603",
            "out of memory on the XLA device",
            why=text.splitlines()[0][:300],
            where=metrics.user_line(),
            cure="use a smaller batch, call xm.mark_step() more often, or free tensors",
        )
    return XlaError(
        code,
        what,
        why=text[:500],
        where=metrics.user_line(),
        cure="set a smaller program around this line; report it if it should work",
    )


def scalar_vector(values: list[float]) -> np.ndarray:
    """The lifted scalars as one input."""
    return np.array(values, dtype=np.float64)
