"""A model's one graph, compiled and called for example arguments: the contents of a packaged program.

>>> built, result = build(model, (x,), {})
>>> built.inputs, built.outs  # of its graph; result: the model's
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..api import compile, dispatcher_of
from ..autograd import program_cache
from ..autograd.plain_inputs import as_aten_graph, with_plain_inputs
from ..backends import native, static_inputs
from ..base import cache
from ..base.compat import OpOverloadPacket
from ..base.config import Settings, config
from ..base.events import Event, collect
from ..capture.symbolic_inputs import SizesHold
from ..codegen import stored
from ..codegen.captured import rewrite_captured
from ..graph.plain_data import decode, symbols_by_name
from ..graph.sizes import Guard, ShapeEnv
from ..graph.tensor_subclass import is_wrapper
from .entry import refused

# All that the file needs is in the disk cache, and nothing but the program.
_SETTINGS: Settings = {
    "program_cache": True,
    "disk_cache": True,
    "verify": False,
    "check": False,
    "sanitize": False,
    "debug": 0,
    "log": "",
}


def build(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Built, Any]:
    """The one graph of the model, and the result of its call. Raises UsageError (DM114) for a graph that a
    file cannot hold.
    """
    with torch.no_grad(), collect("not kept") as events, config.patch(**_SETTINGS):
        built, result = _built(model, args, kwargs)
        entry = _entry(built, events)
        libraries = {key: cache.load("build", key) for key in stored.library_keys(entry["program"])}
    present = {key: data for key, data in libraries.items() if data}
    if len(present) < len(libraries):
        raise refused("its libraries are not in the disk cache", f"{config.cache_dir} cannot be written")
    return replace(built, entry=entry, libraries=present), result


@dataclass
class Built:
    """A graph that was compiled and called. place: its program in the disk cache. static: inputs that are
    weights. specs: of the inputs, sizes among them. asked: the facts of arguments that the program looks at.
    entry: the program's in the disk cache, libraries: of its kernels."""

    place: Any
    inputs: list[Any]
    specs: list[Any]
    static: Collection[int]
    env: ShapeEnv
    outs: tuple[Any, ...]
    guards: Sequence[Any] = ()
    asked: Collection[str] = ()
    entry: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, bytes] = field(default_factory=dict)


def _built(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Built, Any]:
    """The one graph of the model, and the result of its call."""
    found: list[Built] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        keeper = program_cache.Keeper(stored.environment, stored.describe, stored.restore)
        gm, flat = _plainly(gm, inputs)
        inputs, static, env = flat(inputs), static_inputs(gm), gm.meta.get("shape_env")
        rewrite_captured(gm, inputs)  # as native() does, before the graph has a name on disk
        graded = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
        place = program_cache.kept(keeper, gm, inputs, graded, static)
        specs, run, given = program_cache.specs_of(gm, inputs), native(gm, inputs), list(inputs)

        def call(*tensors: torch.Tensor) -> Any:
            with _as_before(flat(tensors), _written(_kept(place, env), env, len(given))):
                outs = tuple(run(*flat(tensors)))
            found[:] = [Built(place, given, specs, static, env or ShapeEnv(), outs)]
            return outs

        return call

    backend.__dict__["takes_symbols"] = True
    compiled = compile(model, backend=backend, fullgraph=True, dynamic=False)
    result = compiled(*args, **kwargs)
    if not found:
        raise refused("it has no graph of tensors", "nothing of it runs on tensors")
    info = dispatcher_of(compiled).entries[0].info
    if info.data.replays:
        raise refused("it changes Python objects", "a file holds computations alone", "return the new value")
    _refuse_numbers(info.data.code)
    env = _env_of(info.guards, found[0].env)
    return replace(found[0], guards=info.guards, asked=info.data.asked, env=env), result


def _env_of(guards: Sequence[Any], given: ShapeEnv) -> ShapeEnv:
    """The symbols that the checks of arguments use: the graph has none where it reads no size."""
    return next((symbol.env for row in guards if type(row) is SizesHold for symbol, _ in row.symbols), given)


def _refuse_numbers(code: str) -> None:
    """Refuse a result with numbers that differ between calls: a file holds those of the example. code: makes
    the result from the graph's outputs and the arguments.
    """
    tree = ast.parse(code)
    tensors = {"outs", "args"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            tensors.update(name.id for name in node.targets if isinstance(name, ast.Name))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if tensors & {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}:
            raise refused(
                f"a number in its result comes from {ast.unparse(node)}()",
                "a file holds the numbers of a result as they were for the examples",
                "return the tensor",
            )


@contextlib.contextmanager
def _as_before(inputs: Sequence[Any], written: Collection[int]) -> Iterator[None]:
    """Give the inputs that a program writes their contents back: an export leaves the model's state alone."""
    before = {i: inputs[i].clone() for i in written if isinstance(inputs[i], torch.Tensor)}
    try:
        yield
    finally:
        for i, contents in before.items():
            inputs[i].copy_(contents)


def _plainly(
    gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, Callable[[Sequence[Any]], list[Any]]]:
    """The graph over plain tensors, and how to take its inputs apart: of weights of wrapper subclasses a file
    holds the tensors inside.
    """
    for i, x in enumerate(inputs):
        if is_wrapper(x) and i not in static_inputs(gm):
            raise refused(f"an argument that is a {type(x).__qualname__}", "a file holds plain data")
    plain, flat = with_plain_inputs(gm, inputs)
    if flat is None and not any(_is_packet(node.target) for node in gm.graph.nodes):
        return gm, list
    flat = flat or list
    if "shape_env" in gm.meta:
        raise refused("sizes of it may differ", "it has weights of subclasses, or calls of libraries")
    found = as_aten_graph(plain, flat(inputs))
    if found is None:
        raise refused("it writes inputs, or gives other things than tensors", "a file holds plain data")
    return found, flat


def _is_packet(target: Any) -> bool:
    """Whether a call is of a library's op by its name alone: it may consist of PyTorch's own."""
    return isinstance(target, OpOverloadPacket)


def _kept(place: Any, env: ShapeEnv | None) -> dict[str, Any] | None:
    """The program's entry in the disk cache, of which the assumptions are true at this call."""
    numbers = range(program_cache.MOST if env is not None else 1) if place is not None else ()
    for number in numbers:
        place.numbers["forward"] = number
        payload = cache.load("program", place._name("forward"))
        if payload is None:
            break
        entry: dict[str, Any] = json.loads(payload)
        guards: tuple[Guard, ...] = tuple(decode(entry["guards"], symbols_by_name(env)))
        if env is None or all(guard.holds(env.hints) for guard in guards):
            return entry
    return None


def _written(entry: dict[str, Any] | None, env: ShapeEnv | None, count: int) -> Collection[int]:
    """The inputs that a program writes; all where that is unknown."""
    recipe = None if entry is None else decode(entry["recipe"], symbols_by_name(env))
    return range(count) if recipe is None else recipe.mutated.keys()


def _entry(built: Built, events: Sequence[Event]) -> dict[str, Any]:
    """The program's entry in the disk cache, if a file can hold it."""
    entry = _kept(built.place, built.env)
    if entry is None:
        reason = events[0].data["reason"] if events else "the disk cache refuses it"
        raise refused(reason, "a file holds plain data")
    if {"gpu", "graphed"} & entry["program"].keys():
        raise refused("it runs on a GPU", "a file holds programs of a CPU")
    return entry
