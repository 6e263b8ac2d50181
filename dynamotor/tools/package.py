"""A model for inference as one file, and back as a callable: no capture, no model code, no compiler.

>>> dynamotor.export(model, (tokens,)).package("bert.dm")
>>> bert = dynamotor.load("bert.dm")
>>> bert(tokens)  # tuples, lists and dicts of tensors, as the model gave them

`python -m dynamotor package inspect FILE` lists the contents: the program (JSON), its shared objects,
weights (safetensors).
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import itertools
import json
import math
import mmap
import os
import platform
import struct
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..api import compile, dispatcher_of
from ..autograd import program_cache
from ..autograd.plain_inputs import as_aten_graph, with_plain_inputs
from ..autograd.recipe import Recipe
from ..autograd.runtime import inference_callable
from ..backends import native, static_inputs
from ..base import cache
from ..base.compat import OpOverloadPacket
from ..base.config import Settings, config
from ..base.errors import BuildError, UsageError
from ..base.events import Event, collect
from ..codegen import stored
from ..graph.plain_data import NotPlain, decode, encode
from ..graph.spec import TensorSpec, copy_as
from ..graph.tensor_subclass import is_wrapper
from ..runtime import cpp_build
from .entry import ArgumentChecks, flatten, refused
from .package_program import steps_of

FORMAT = "dynamotor-package-3"
_WEIGHTS, _PROGRAM, _STEPS = "weights.safetensors", "program.json", "steps.txt"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Package:
    """A program that was captured and built for example arguments; `write(path)` makes it a file."""

    program: dict[str, Any]  # all but weights and libraries, as plain data
    libraries: dict[str, bytes]
    weights: list[torch.Tensor]
    steps: str  # the same program, for C++

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with zipfile.ZipFile(temporary, "w") as archive:
                _write_weights(archive, self.weights)
                archive.writestr(_PROGRAM, json.dumps(self.program, allow_nan=False), zipfile.ZIP_DEFLATED)
                archive.writestr(_STEPS, self._for_cpp())
                for key, payload in self.libraries.items():
                    archive.writestr(f"{key}.so", payload)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _for_cpp(self) -> str:
        """Read by C++: the target machine, the offsets of weights, and the steps."""
        environment, offsets = self.program["environment"], " ".join(map(str, _offsets(self.weights)))
        processor = environment["processor"]
        head = [FORMAT, environment["torch"], str(processor.count("\n") + 1), processor]
        return "\n".join([*head, f"weights {len(self.weights)} {offsets}", self.steps])


def build_package(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Package:
    """Capture and build a model (or function) for inference on arguments like these, on a CPU.

    Its weights are those of now; arguments that are no tensors are part of the program. Raises UsageError
    (DM114) for programs that a file cannot hold (written inputs and objects, custom ops, results that are
    other
    objects than tuples, lists, dicts and numbers, arguments that no call can be compared with), and
    CaptureError where the graph breaks.
    """
    ordered = _sees_order_of_names(model)
    kwargs = _by_name(kwargs or {}, ordered)
    with torch.no_grad(), collect("not kept") as events, config.patch(**_SETTINGS):
        built, result = _built(model, args, kwargs)
        entry = _entry(built, events)
        libraries = {key: cache.load("build", key) for key in stored.library_keys(entry["program"])}
        environment = _environment()
    present = {key: data for key, data in libraries.items() if data}
    if len(present) < len(libraries):
        raise refused("its libraries are not in the disk cache", f"{config.cache_dir} cannot be written")
    given = (tuple(args), kwargs)
    checks = ArgumentChecks.of(given, built.guards, (*args, *kwargs.values()))
    nodes = [value for _, value in flatten(given)]
    arguments = {k: nodes[k] for k in checks.tensor_nodes()}
    weights: list[torch.Tensor] = []
    places = [_place(tensor, i in built.static, arguments, weights) for i, tensor in enumerate(built.inputs)]
    program = {
        "format": FORMAT,
        "environment": environment,
        "entry": entry,
        "places": places,
        "specs": [encode(TensorSpec.of(tensor)) for tensor in built.inputs],
        "arguments": encode(checks),
        "ordered": ordered,
        "result": _structure(result, built.outs),
        "sha256": {key: hashlib.sha256(data).hexdigest() for key, data in present.items()},
    }
    results = [(k, built.outs[k]) for k in _outs_in(program["result"])]
    steps = steps_of(entry, built.inputs, places, weights, results, checks)
    return Package(program, present, weights, steps)


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


@dataclass
class _Built:
    """A graph that was compiled and called. place: its program in the disk cache. static: inputs that are
    weights."""

    place: Any
    inputs: list[torch.Tensor]
    static: Collection[int]
    outs: tuple[Any, ...]
    guards: Sequence[Any] = ()


def _built(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Built, Any]:
    """The one graph of the model, and the result of its call."""
    found: list[_Built] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        keeper = program_cache.Keeper(stored.environment, stored.describe, stored.restore)
        gm, flat = _plainly(gm, inputs)
        inputs, static = flat(inputs), static_inputs(gm)
        place = program_cache.kept(keeper, gm, inputs, [tensor.requires_grad for tensor in inputs], static)
        run, given = native(gm, inputs), list(inputs)

        def call(*tensors: torch.Tensor) -> Any:
            outs = tuple(run(*flat(tensors)))
            found[:] = [_Built(place, given, static, outs)]
            return outs

        return call

    compiled = compile(model, backend=backend, fullgraph=True, dynamic=False)
    result = compiled(*args, **kwargs)
    if not found:
        raise refused("it has no graph of tensors", "nothing of it runs on tensors")
    info = dispatcher_of(compiled).entries[0].info
    if info.data.replays:
        raise refused("it changes Python objects", "a file holds computations alone", "return the new value")
    return replace(found[0], guards=info.guards), result


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
    found = as_aten_graph(plain, flat(inputs))
    if found is None:
        raise refused("it writes inputs, or gives other things than tensors", "a file holds plain data")
    return found, flat


def _is_packet(target: Any) -> bool:
    """Whether a call is of a library's op by its name alone: it may consist of PyTorch's own."""
    return isinstance(target, OpOverloadPacket)


def _entry(built: _Built, events: Sequence[Event]) -> dict[str, Any]:
    """The program's entry in the disk cache, if a file can hold it."""
    payload = cache.load("program", built.place._name("forward")) if built.place is not None else None
    if payload is None:
        reason = events[0].data["reason"] if events else "the disk cache refuses it"
        raise refused(reason, "a file holds plain data")
    entry: dict[str, Any] = json.loads(payload)
    if {"gpu", "graphed"} & entry["program"].keys():
        raise refused("it runs on a GPU", "a file holds programs of a CPU")
    recipe: Recipe = decode(entry["recipe"])
    if recipe.mutated:
        raise refused(
            "it writes its inputs or buffers",
            "the file's weights are shared by all calls",
            "clone the written tensor",
        )
    return entry


def _place(
    tensor: torch.Tensor, static: bool, arguments: Mapping[int, torch.Tensor], weights: list[torch.Tensor]
) -> list[Any]:
    """Where a graph's input comes from: an argument, or a weight (which is noted)."""
    if not static:
        for k, argument in arguments.items():
            if argument is tensor:
                return ["argument", k]
    if tensor.dtype not in _NAMES:
        raise refused(f"a weight of type {tensor.dtype}", "safetensors has no such type")
    weights.append(tensor.detach())
    return ["weight", len(weights) - 1]


def _structure(value: Any, outs: tuple[Any, ...]) -> Any:
    """A result in terms of the graph's outputs."""
    if isinstance(value, torch.Tensor):
        for k, out in enumerate(outs):
            if out is value:
                return {"out": k}
        raise refused(
            "a result that its graph does not give",
            "it is an input, or was made beside the graph",
            "return a clone",
        )
    if value is None or type(value) in (bool, int, float, str):
        return {"value": encode(value)}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_structure(item, outs) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key), _structure(item, outs)] for key, item in value.items()]}
    raise refused(
        f"a result that is a {type(value).__qualname__}",
        "another process may not have its class",
        "return a tuple or dict",
    )


def _key(key: Any) -> Any:
    """The key of a dict, with its type."""
    try:
        return encode(key)
    except NotPlain as why:
        raise refused(f"a key of a result is {why}", "another process may not have its class") from None


def _outs_in(structure: Any) -> list[int]:
    """Which of the graph's outputs stand in a result, in its order."""
    ((kind, data),) = structure.items()
    if kind in ("out", "value"):
        return [data] if kind == "out" else []
    return [k for item in data for k in _outs_in(item[1] if kind == "dict" else item)]


def _rebuilt(structure: Any, outs: Sequence[Any]) -> Any:
    ((kind, data),) = structure.items()
    if kind == "out":
        return outs[data]
    if kind == "value":
        return decode(data)
    if kind == "dict":
        return {decode(key): _rebuilt(item, outs) for key, item in data}
    items = [_rebuilt(item, outs) for item in data]
    return items if kind == "list" else tuple(items)


# -- weights: safetensors, at a place in the file that a page can be mapped from -----------------------------
def _offsets(weights: Sequence[torch.Tensor]) -> list[int]:
    """Where each begins. Large elements come first, so that each starts at a multiple of its elements'
    size.
    """
    order = sorted(range(len(weights)), key=lambda k: -weights[k].itemsize)
    starts = itertools.accumulate((weights[k].nbytes for k in order), initial=0)
    found = dict(zip(order, starts, strict=False))
    return [found[k] for k in range(len(weights))]


def _write_weights(archive: zipfile.ZipFile, weights: Sequence[torch.Tensor]) -> None:
    offsets = _offsets(weights)
    order = sorted(range(len(weights)), key=offsets.__getitem__)
    header = {
        str(k): {
            "dtype": _NAMES[weights[k].dtype],
            "shape": list(weights[k].shape),
            "data_offsets": [offsets[k], offsets[k] + weights[k].nbytes],
        }
        for k in order
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    info = zipfile.ZipInfo(_WEIGHTS)
    pad = (
        -(30 + len(_WEIGHTS) + 20 + 4) % 64
    )  # the member begins behind its name, zip64's numbers (20) and this
    info.extra = struct.pack("<HH", 0xD935, pad) + bytes(pad)
    with archive.open(info, "w", force_zip64=True) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for k in order:
            file.write(weights[k].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _map_weights(path: Path, info: zipfile.ZipInfo) -> list[torch.Tensor]:
    """The weights, in memory that the system reads from the file as it is touched; writes stay in this
    process.
    """
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        name, extra = struct.unpack("<HH", file.read(30)[26:30])
        start = info.header_offset + 30 + name + extra
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack_from("<Q", mapped, start)
    header = json.loads(mapped[start + 8 : start + 8 + length])
    tensors = []
    for k in range(len(header)):
        row = header[str(k)]
        dtype, shape = _DTYPES[row["dtype"]], row["shape"]
        first, last = row["data_offsets"]
        count = math.prod(shape)
        if last - first != count * dtype.itemsize or 8 + length + last > info.file_size or info.compress_type:
            raise ValueError(f"the weight {k} is not whole")
        at = start + 8 + length + first
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=at)
            if count
            else torch.empty(0, dtype=dtype)
        )
        tensors.append(flat.view(shape))
    return tensors


# -- loading -------------------------------------------------------------------------------------------------
class LoadedPackage:
    """A packaged program: called like the model, with arguments like the examples."""

    def __init__(
        self,
        program: dict[str, Any],
        libraries: Mapping[str, cpp_build.Library],
        weights: Sequence[torch.Tensor],
    ) -> None:
        call = stored.restore(program["entry"]["program"], "package", libraries.get, fixed=True)
        if call is None:
            raise ValueError("a library is missing")
        with torch.no_grad():
            self._run = inference_callable(call, decode(program["entry"]["recipe"]))
        self._specs: list[TensorSpec] = [decode(spec) for spec in program["specs"]]
        self._places, self._result = program["places"], program["result"]
        self._arguments: ArgumentChecks = decode(program["arguments"])
        self._ordered: bool = program["ordered"]
        self._weights = [
            _laid_out(weights[k], spec) if kind == "weight" else None
            for (kind, k), spec in zip(self._places, self._specs, strict=True)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. UsageError (DM115) for arguments that the program was not built for."""
        given = self._arguments.tensors((args, _by_name(kwargs, self._ordered)))
        inputs = [
            weight if weight is not None else given[k]
            for weight, (_, k) in zip(self._weights, self._places, strict=True)
        ]
        with torch.no_grad():
            return _rebuilt(self._result, self._run(*inputs))


def _by_name(kwargs: Mapping[str, Any], ordered: bool) -> dict[str, Any]:
    """Arguments by name in the order in which a package takes them."""
    return dict(kwargs if ordered else sorted(kwargs.items()))


def _sees_order_of_names(model: Callable[..., Any]) -> bool:
    """Whether a function takes any names, and so sees the order in which they are given."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise ValueError(f"a weight of shape {list(tensor.shape)} in the place of {spec}")
    return tensor if tensor.stride() == spec.stride else copy_as(tensor, [*map(int, spec.stride)])


def load(path: str | os.PathLike[str]) -> LoadedPackage:
    """The callable that a package holds. A package is code: load only what comes from where your programs
    come from.

    Raises UsageError (DM116) when the file is not whole, BuildError (DM308) when it was built for another
    machine or versions.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            program = json.loads(archive.read(_PROGRAM))
            if program["format"] != FORMAT:
                raise ValueError(f"its format is {program['format']!r}, not {FORMAT!r}")
            _check_environment(program["environment"])
            libraries = {}
            for key, digest in program["sha256"].items():
                payload = archive.read(f"{key}.so")
                if hashlib.sha256(payload).hexdigest() != digest:
                    raise ValueError(f"the library {key} is damaged")
                libraries[key] = cpp_build.library_of(payload, key)
            return LoadedPackage(program, libraries, _map_weights(Path(path), archive.getinfo(_WEIGHTS)))
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, struct.error) as error:
        raise UsageError(
            "DM116",
            f"{os.fspath(path)} is no package of dynamotor, or not all of one",
            why=f"{type(error).__name__}: {error}",
            cure="export it again",
        ) from error


def _environment() -> dict[str, str]:
    """The target of a package's kernels and calls: the processor and the versions that built it."""
    return {
        "Python": sys.version,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "torch's revision": str(torch.version.git_version),
        "dynamotor": stored.hash_of_package(),
        "processor": cpp_build.cpu_model(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def _check_environment(built: Mapping[str, str]) -> None:
    for name, here in _environment().items():
        if built[name] != here:
            raise BuildError(
                "DM308",
                f"the package was built for another {name}",
                cure="export it again here",
                why=f"built for {built[name][:300]!r}; here is {here[:300]!r}",
            )


# -- the command ---------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the package command."""
    parser.add_argument("action", choices=("inspect",))
    parser.add_argument("file")


def main(args: argparse.Namespace) -> int:
    """List a package's contents."""
    try:
        with zipfile.ZipFile(args.file) as archive:
            program = json.loads(archive.read(_PROGRAM))
            sizes = {info.filename: info.file_size for info in archive.infolist()}
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise UsageError("DM116", f"{args.file} is no package of dynamotor", why=str(error)) from error
    kinds = [kind for kind, _ in program["places"]]
    print(f"{args.file}: {program['format']}, torch {program['environment']['torch']}")
    for name, nbytes in sizes.items():
        print(f"  {name}: {nbytes / 2**20:.1f} MB")
    print(f"  {kinds.count('weight')} weights; arguments:")
    for (kind, k), spec in zip(program["places"], program["specs"], strict=True):
        if kind == "argument":
            print(f"    {k}: {decode(spec)}")
    return 0
