"""A model for inference as one file, and back as a callable: no capture, no model code, no compiler.

>>> dynamotor.export(model, (tokens,)).package("bert.dm")
>>> bert = dynamotor.load("bert.dm")
>>> bert(tokens)  # tuples, lists and dicts of tensors, as the model gave them

A file may hold several programs, its methods (`dynamotor.package`), which share weights and state. State: the
tensors that a program writes and that are no arguments; each loaded package has its own.

`python -m dynamotor package inspect FILE` lists the contents: the program (JSON), its shared objects,
weights (safetensors).
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import platform
import struct
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..autograd.recipe import Recipe
from ..autograd.runtime import inference_callable
from ..base.errors import BuildError, UsageError
from ..capture.guards import are_apart, memory_range
from ..codegen import stored
from ..graph.plain_data import NotPlain, decode, encode, symbols_by_name
from ..graph.result_strides import is_dense
from ..graph.sizes import ShapeEnv, Size
from ..graph.spec import TensorSpec
from ..runtime import cpp_build
from .entry import ArgumentChecks, flatten, name_of, not_built_for, refused
from .package_graph import Built, build
from .package_program import layout_text, steps_of
from .package_weights import FILE as _WEIGHTS, Weights, laid_out, map_weights, offsets_of, write_weights

FORMAT = "dynamotor-package-4"
_PROGRAM, _STEPS = "program.json", "steps.txt"
ONE = "forward"  # the method of a package that has one


@dataclass(frozen=True)
class Package:
    """Programs that were captured and built for example arguments; `write(path)` makes them a file."""

    program: dict[str, Any]  # all but weights and libraries, as plain data
    libraries: dict[str, bytes]
    weights: list[torch.Tensor]
    steps: str  # the same programs, for C++

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with zipfile.ZipFile(temporary, "w") as archive:
                write_weights(archive, self.weights)
                archive.writestr(_PROGRAM, json.dumps(self.program, allow_nan=False), zipfile.ZIP_DEFLATED)
                archive.writestr(_STEPS, self._for_cpp())
                for key, payload in self.libraries.items():
                    archive.writestr(f"{key}.so", payload)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _for_cpp(self) -> str:
        """Read by C++: the target machine, the offsets of weights, and the steps."""
        environment, offsets = self.program["environment"], " ".join(map(str, offsets_of(self.weights)))
        processor = environment["processor"]
        head = [FORMAT, environment["torch"], str(processor.count("\n") + 1), processor]
        return "\n".join([*head, f"weights {len(self.weights)} {offsets}", self.steps])


@dataclass(frozen=True)
class Method:
    """A program to be packaged: a model (or function), and example arguments."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def build_package(methods: Mapping[str, Method]) -> Package:
    """Capture and build programs for inference on arguments like the examples, on a CPU.

    Their weights and state are those of now; arguments that are no tensors are part of the program. Raises
    UsageError (DM114) for programs that a file cannot hold (written objects, custom ops, results that are
    other objects than tuples, lists, dicts and numbers, arguments that no call can be compared with), and
    CaptureError where the graph breaks.
    """
    weights, programs, texts = Weights(), {}, []
    libraries: dict[str, bytes] = {}
    folded: list[int] = []
    for name, method in methods.items():
        program, text, found = _program(method, weights)
        programs[name], libraries = program, {**libraries, **found}
        texts.append(f"method {name}\n{text}")
        sources = (
            decode(program["entry"]["program"]["folded"][2])
            if "folded" in program["entry"]["program"]
            else ()
        )
        folded += [program["places"][i][1] for i, _ in sources]
    early = [weights.state[k] for k in folded if k in weights.state]
    if early:
        raise refused(
            f"a method computes with {early[0]} ahead of time, which another one writes",
            "constants are computed once",
        )
    stored_weights, environment = weights.stored(), _environment()
    whole = {
        "format": FORMAT,
        "environment": environment,
        "methods": programs,
        "state": {name: [k, encode(TensorSpec.of(weights.tensors[k]))] for k, name in weights.state.items()},
        "sha256": {key: hashlib.sha256(data).hexdigest() for key, data in libraries.items()},
    }
    state = [f"state {k} {layout_text(weights.tensors[k])} {name}\n" for k, name in weights.state.items()]
    return Package(whole, libraries, stored_weights, "".join([*state, *texts]))


def _program(method: Method, weights: Weights) -> tuple[dict[str, Any], str, Mapping[str, bytes]]:
    """A method as plain data, as steps for C++, and its libraries."""
    ordered = _sees_order_of_names(method.model)
    args, kwargs = method.args, _by_name(method.kwargs, ordered)
    built, result = build(method.model, args, kwargs)
    given, env, entry = (args, kwargs), built.env, built.entry
    checks = ArgumentChecks.of(given, built.guards, (*args, *kwargs.values()), env)
    nodes = [value for _, value in flatten(given)]
    arguments = {k: nodes[k] for k in checks.tensor_nodes()}
    places = [_place(i, built, arguments, weights) for i in range(len(built.inputs))]
    known = symbols_by_name(env)
    recipe: Recipe = decode(entry["recipe"], known)
    mutated = recipe.mutated
    _refuse_places(recipe, built, places)
    written = tuple(places[i][1] for i in mutated if places[i][0] == "argument")
    checks = replace(checks, written=written, asks="strides" in built.asked)
    for a, b in checks.apart():
        if not are_apart([arguments[a], arguments[b]], 1):
            raise refused(
                "an argument that it writes shares memory with another one",
                "calls are checked for that",
                "pass copies",
            )
    names = _attributes_of(method.model) | {key: name for key, (_, name) in names_of(method.model)}
    for i in mutated:
        if places[i][0] == "weight":
            weights.write(places[i][1], names.get(id(built.inputs[i])))
    program = {
        "entry": entry,
        "places": places,
        "specs": [encode(spec) for spec in built.specs],
        "arguments": encode(checks),
        "ordered": ordered,
        "symbols": [[s.name, s.hint, s.lo, s.hi] for s in env.symbols],
        "result": _structure(result, built, arguments),
    }
    text = steps_of(built, places, weights, _tensors_in(program["result"]), checks)
    return program, text, built.libraries


def _refuse_places(recipe: Recipe, built: Built, places: Sequence[Sequence[Any]]) -> None:
    """Refuse results that name a place in the storage of a weight which is not all of that storage."""
    for plan in recipe.plans:
        spec = built.specs[plan.index] if plan.kind == "input" and places[plan.index][0] == "weight" else None
        if spec is None or not spec.offset and is_dense(spec):
            continue
        if any("as_strided" in str(function) for function, *_ in plan.steps):
            raise refused(
                "a result that is as_strided() of a tensor that it holds, which is a part of another one",
                "a file holds that part alone",
                "index or slice it, or return a clone",
            )


def _attributes_of(model: Any) -> dict[int, str]:
    """The names of tensors that modules hold as plain attributes, by their ids."""
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    return {
        id(value): f"{path}.{name}".lstrip(".")
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def names_of(model: Any) -> Iterator[tuple[int, tuple[str, str]]]:
    """The ids of a model's parameters and buffers, with their kind and name."""
    if isinstance(model, torch.nn.Module):
        for name, buffer in model.named_buffers():
            yield id(buffer), ("buffer", name)
        for name, parameter in model.named_parameters():
            yield id(parameter), ("parameter", name)


def _place(i: int, built: Built, arguments: Mapping[int, torch.Tensor], weights: Weights) -> list[Any]:
    """Where a graph's input comes from: an argument, a size, or a weight (which is noted)."""
    tensor, spec = built.inputs[i], built.specs[i]
    if type(spec) is Size:
        (symbol,) = spec.symbols
        return ["size", symbol.name]
    if i not in built.static:
        for k, argument in arguments.items():
            if argument is tensor:
                return ["argument", k]
    return ["weight", weights.add(tensor)]


def _structure(value: Any, built: Built, arguments: Mapping[int, torch.Tensor]) -> Any:
    """A result in terms of the graph's outputs, its inputs that are weights, and the arguments."""
    if isinstance(value, torch.Tensor):
        static = {i: built.inputs[i] for i in built.static}
        places = ("out", dict(enumerate(built.outs))), ("argument", arguments), ("input", static)
        for word, tensors in places:
            for k, tensor in tensors.items():
                if tensor is value:
                    return {word: k}
        raise refused(
            "a result that its graph does not give",
            "it was made beside the graph",
            "return a clone",
        )
    if value is None or type(value) in (bool, int, float, str):
        return {"value": encode(value)}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_structure(item, built, arguments) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key), _structure(item, built, arguments)] for key, item in value.items()]}
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


def _tensors_in(structure: Any) -> list[tuple[str, int]]:
    """The tensors of a result, in its order: outputs of the graph, inputs of it, or arguments."""
    ((kind, data),) = structure.items()
    if kind in ("out", "input", "argument"):
        return [(kind, data)]
    items = () if kind == "value" else data
    return [found for item in items for found in _tensors_in(item[1] if kind == "dict" else item)]


def _rebuilt(structure: Any, of: Mapping[str, Any]) -> Any:
    """The result; of: outputs and inputs of the graph, and arguments, under these words."""
    ((kind, data),) = structure.items()
    if kind in of:
        return of[kind][data]
    if kind == "value":
        return decode(data)
    if kind == "dict":
        return {decode(key): _rebuilt(item, of) for key, item in data}
    items = [_rebuilt(item, of) for item in data]
    return items if kind == "list" else tuple(items)


# -- loading -------------------------------------------------------------------------------------------------
def _env_of(program: Mapping[str, Any]) -> ShapeEnv:
    """The symbols of a method."""
    env = ShapeEnv()
    for name, hint, lo, hi in program["symbols"]:
        env.symbol(hint, lo, hi, name)
    return env


class LoadedMethod:
    """A packaged program: called like the model, with arguments like the examples."""

    def __init__(
        self,
        program: dict[str, Any],
        libraries: Mapping[str, cpp_build.Library],
        weights: Sequence[torch.Tensor],
        state: Collection[int],
    ) -> None:
        known = symbols_by_name(_env_of(program))
        call = stored.restore(program["entry"]["program"], "package", libraries.get, fixed=True)
        if call is None:
            raise ValueError("a library is missing")
        with torch.no_grad():
            self._run = inference_callable(call, decode(program["entry"]["recipe"], known))
        self._places, self._result, self._known = program["places"], program["result"], known
        self._arguments: ArgumentChecks = decode(program["arguments"], known)
        self._ordered: bool = program["ordered"]
        self._returns_arguments = any(kind == "argument" for kind, _ in _tensors_in(self._result))
        specs = [decode(spec, known) for spec in program["specs"]]
        self._weights = [
            laid_out(weights[k], spec, k in state) if kind == "weight" else None
            for (kind, k), spec in zip(self._places, specs, strict=True)
        ]
        self._state = [memory_range(weights[k]) for k in state]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. UsageError (DM115) for arguments that the program was not built for."""
        by_name = _by_name(kwargs, self._ordered)
        given, sizes = self._arguments.tensors((args, by_name))
        for first, end in map(memory_range, given.values()) if self._state else ():
            if any(start < end and first < stop for start, stop in self._state):
                raise not_built_for("an argument that shares memory with the package's state", "clone() it")
        inputs: list[Any] = [
            weight if weight is not None else given.get(k)
            for weight, (_, k) in zip(self._weights, self._places, strict=True)
        ]
        for i, (kind, name) in enumerate(self._places if sizes else ()):
            if kind == "size":
                inputs[i] = sizes[self._known[f"%{name}"]]
        with torch.no_grad():
            outs = self._run(*inputs)
        if self._returns_arguments:
            given = {k: value for k, (_, value) in enumerate(flatten((args, by_name)))}
        return _rebuilt(self._result, {"out": outs, "input": inputs, "argument": given})


class LoadedPackage:
    """The programs of a package by their names: `loaded.decode(token)`; a package of one is called itself.

    state: the tensors that they write, by the model's names, as they are now: copy one to keep it, or write
    into it (`loaded.state["cache"].zero_()`).
    """

    def __init__(
        self,
        whole: dict[str, Any],
        libraries: Mapping[str, cpp_build.Library],
        weights: Sequence[torch.Tensor],
    ) -> None:
        rows = {name: (k, decode(spec)) for name, (k, spec) in whole["state"].items()}
        numbers = [k for k, _ in rows.values()]
        self.state = {name: laid_out(weights[k], spec, True) for name, (k, spec) in rows.items()}
        self.methods = {
            name: LoadedMethod(program, libraries, weights, numbers)
            for name, program in whole["methods"].items()
        }

    def __getattr__(self, name: str) -> LoadedMethod:
        methods = self.__dict__.get("methods", {})
        if name not in methods:
            raise AttributeError(f"the package has no method {name!r}, but {', '.join(methods)}")
        found: LoadedMethod = methods[name]
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, where the package has one program. UsageError (DM115) for arguments that the
        program was not built for.
        """
        if ONE not in self.methods:
            raise not_built_for(
                f"a call without a method: it has {', '.join(self.methods)}", "call one of its methods"
            )
        return self.methods[ONE](*args, **kwargs)


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
            return LoadedPackage(program, libraries, map_weights(Path(path), archive.getinfo(_WEIGHTS)))
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
    print(f"{args.file}: {program['format']}, torch {program['environment']['torch']}")
    for name, nbytes in sizes.items():
        print(f"  {name}: {nbytes / 2**20:.1f} MB")
    for name, (_, spec) in program["state"].items():
        print(f"  state {name}: {decode(spec)}")
    for name, method in program["methods"].items():
        kinds = [kind for kind, _ in method["places"]]
        print(f"  {name}: {kinds.count('weight')} weights; arguments:")
        checks: ArgumentChecks = decode(method["arguments"], symbols_by_name(_env_of(method)))
        for k in checks.tensor_nodes():
            path, _, facts = checks.nodes[k]
            print(f"    {name_of(path)}: {facts.spec}")
    return 0
