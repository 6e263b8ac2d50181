"""Models as StableHLO programs: exported through jax, saved in a folder, loaded and run without the model's
code.

>>> program = exported_program_to_stablehlo(torch.export.export(model, (x,)))
>>> program.get_stablehlo_text()
>>> program.save("folder"); StableHLOGraphModule.load("folder")(x)
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.export
import torch

from dynamotor.extension_api import XlaError

from .compat import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from .device import jax_device
from .dtypes import jax_dtype
from .errors import require
from .execute import to_function
from .ir import Meta
from .ir_text import pending
from .recent import Recent
from .subgraph import Subgraph, trace
from .transfer import download, upload
from .utils.checked_load import checked_load, damaged, with_checksums

_DEVICE = torch.device("xla", 0)


@dataclass
class StableHLOExportOptions:
    """How to export. include_human_readable_text: save the text beside the program.
    override_tracing_arguments, override_tracing_kwargs: example inputs in place of those of torch.export.
    save_weights: save parameters and buffers. export_weights: keep them beside the program; a program without
    them can be saved, not called."""

    include_human_readable_text: bool = True
    override_tracing_arguments: tuple[Any, ...] | None = None
    override_tracing_kwargs: Mapping[str, Any] | None = None
    save_weights: bool = True
    export_weights: bool = True


@dataclass
class _Function:
    """One exported function. Its arguments are `places`: ["weight", name], ["constant", index] or ["input",
    index].
    """

    name: str
    places: list[list[Any]]
    outputs: list[str]  # dtypes
    in_spec: str
    out_spec: str
    text: str
    bytecode: bytes
    exported: jax.export.Exported


@dataclass
class StableHLOModelBundle:
    """An exported model: its functions, its parameters and buffers by name, and further tensors that it
    holds.
    """

    functions: list[_Function]
    state_dict: dict[str, torch.Tensor]
    additional_constants: list[torch.Tensor] = field(default_factory=list)


class StableHLOGraphModule:
    """An exported model that can be called like the original."""

    def __init__(self, bundle: StableHLOModelBundle) -> None:
        self._bundle = bundle
        self._functions = {function.name: function for function in bundle.functions}
        self._compiled: dict[str, Any] = {}
        self._sizes: _Sizes | None = None  # of a program with sizes that may change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluate(self._bundle.functions[0].name, args, kwargs)

    def evaluate(self, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a function of the model on CPU or xla tensors; gives CPU tensors. DM672 for a wrong name or
        other inputs.
        """
        if self._sizes is not None and self._sizes.differ(args, kwargs or {}):
            return self._sizes.program(args, kwargs or {}).evaluate(method_name, args, kwargs)
        function = self._find(method_name)
        inputs, spec = tree_flatten((tuple(args), dict(kwargs or {})))
        require(
            spec == treespec_loads(function.in_spec),
            "DM672",
            f"{method_name} got other arguments than it was exported with",
            why=f"{spec}, not {function.in_spec}",
        )
        bundle = self._bundle
        sources: dict[str, Any] = {
            "weight": bundle.state_dict,
            "constant": bundle.additional_constants,
            "input": inputs,
        }
        device = jax_device(_DEVICE)
        arrays = [upload(sources[kind][key].detach().cpu(), device) for kind, key in function.places]
        call = self._compiled.get(method_name)
        if call is None:
            call = self._compiled[method_name] = jax.jit(function.exported.call)
        try:
            results = call(*arrays)
        except ValueError as error:
            what = f"{method_name} got other shapes or dtypes than it was exported with"
            raise XlaError("DM672", what, why=str(error)) from error
        tensors = [download(array, getattr(torch, dtype)) for array, dtype in zip(results, function.outputs)]
        return tree_unflatten(tensors, treespec_loads(function.out_spec))

    def get_stablehlo_text(self, method_name: str | None = None) -> str:
        """A function's program as text."""
        return self._find(method_name).text

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        """A function's program in StableHLO's portable bytecode."""
        return self._find(method_name).bytecode

    def save(self, directory_path: str, options: StableHLOExportOptions | None = None) -> None:
        """Write the model to a folder: functions/NAME.{mlir,bytecode,jax,meta}, data/weights.pt and
        data/constants.pt.

        Sizes that may change become those of the example inputs, which a warning says. DM673 where the
        flatbuffers library, with which jax writes its part, is missing.
        """
        if self._sizes is not None:
            warnings.warn(
                "the saved program has the sizes of the example inputs: the files hold no dynamic sizes",
                stacklevel=2,
            )
        options = options or StableHLOExportOptions()
        for folder in ("functions", "data"):
            os.makedirs(os.path.join(directory_path, folder), exist_ok=True)
        for function in self._bundle.functions:
            kept = ("name", "places", "outputs", "in_spec", "out_spec")
            meta = json.dumps({name: getattr(function, name) for name in kept}).encode()
            parts: dict[str, Any] = {"bytecode": function.bytecode, "meta": meta}
            with _flatbuffers():
                parts["jax"] = function.exported.serialize()
            if options.include_human_readable_text:
                parts["mlir"] = function.text.encode()
            for extension, content in parts.items():
                Path(directory_path, "functions", f"{function.name}.{extension}").write_bytes(content)
        with with_checksums():
            if options.save_weights:
                torch.save(self._bundle.state_dict, os.path.join(directory_path, "data", "weights.pt"))
            torch.save(
                self._bundle.additional_constants, os.path.join(directory_path, "data", "constants.pt")
            )

    @classmethod
    def load(cls, directory_path: str) -> StableHLOGraphModule:
        """Read what `save` wrote. DM654 where a file is damaged; FileNotFoundError."""
        folder = os.path.join(directory_path, "functions")
        functions = []
        for file in sorted(name for name in os.listdir(folder) if name.endswith(".meta")):
            stem = os.path.join(folder, file.removesuffix(".meta"))
            try:
                meta = json.loads(Path(stem + ".meta").read_bytes())
                text = Path(stem + ".mlir").read_text("utf-8") if os.path.exists(stem + ".mlir") else ""
                with _flatbuffers():
                    exported = jax.export.deserialize(bytearray(Path(stem + ".jax").read_bytes()))
                functions.append(
                    _Function(
                        text=text, bytecode=Path(stem + ".bytecode").read_bytes(), exported=exported, **meta
                    )
                )
            except (ValueError, TypeError, struct.error) as error:
                raise damaged(f"the exported function {stem}", str(error)) from error
        weights = os.path.join(directory_path, "data", "weights.pt")
        state = checked_load(weights, "exported weights") if os.path.exists(weights) else {}
        constants = checked_load(os.path.join(directory_path, "data", "constants.pt"), "exported constants")
        return cls(StableHLOModelBundle(functions, state, constants))

    def _find(self, name: str | None) -> _Function:
        found = name or self._bundle.functions[0].name
        require(
            found in self._functions,
            "DM672",
            f"the exported model has no function {name}",
            why=f"it has {', '.join(self._functions)}",
        )
        return self._functions[found]


def exported_program_to_stablehlo(
    exported_model: Any, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """The StableHLO program of a `torch.export.ExportedProgram`.

    Sizes that torch.export marks as dynamic may change between calls: the program is exported for each set of
    sizes that comes, within the bounds that were given. Buffers that the model changes in place keep their
    values: export it in eval mode. DM669 where an op has no lowering.
    """
    options = options or StableHLOExportOptions()
    program = (
        exported_model.run_decompositions({})
        if exported_model.graph_signature.buffers_to_mutate
        else exported_model
    )
    args, kwargs = program.example_inputs
    if options.override_tracing_arguments is not None:
        args, kwargs = options.override_tracing_arguments, dict(options.override_tracing_kwargs or {})
    inputs, in_spec = tree_flatten((tuple(args), dict(kwargs)))
    places, tensors, constants = _arguments(program, inputs)
    mutated = len(program.graph_signature.output_specs) - len(program.graph_signature.user_outputs)
    results: list[Any] = []

    def body(given: list[Any]) -> list[Any]:
        values = iter(given)
        full = [next(values) if isinstance(t, torch.Tensor) else t for t in tensors]
        found = _Interpreter(program.graph_module).run(*full, enable_io_processing=False)
        results[:] = found[mutated:]
        return [r for r in results if isinstance(r, torch.Tensor)]

    metas = [Meta.of(t.shape, t.dtype) for t in tensors if isinstance(t, torch.Tensor)]
    with torch.no_grad():
        sub = trace(body, metas, _DEVICE, "the exported model", writable=len(metas))
    exported = _export(sub, metas)
    places = [place for place, tensor in zip(places, tensors) if isinstance(tensor, torch.Tensor)]
    dtypes = [str(meta.dtype).removeprefix("torch.") for meta in sub.outputs]
    out_spec = program.call_spec.out_spec or tree_flatten(tuple(results))[1]
    specs = treespec_dumps(in_spec), treespec_dumps(out_spec)
    text, bytecode = str(exported.mlir_module()), exported.mlir_module_serialized
    function = _Function("forward", places, dtypes, *specs, text, bytecode, exported)
    kept = program.state_dict if options.export_weights else {}
    state = {key: value.detach().cpu() for key, value in kept.items()}
    made = StableHLOGraphModule(StableHLOModelBundle([function], state, constants))
    if exported_model.range_constraints:
        made._sizes = _Sizes(exported_model, [t for t in inputs if isinstance(t, torch.Tensor)])
    return made


class _Sizes:
    """The programs of an exported model by the sizes of its inputs."""

    def __init__(self, exported_model: Any, example: list[torch.Tensor]) -> None:
        self._model, self._example = exported_model, [t.shape for t in example]
        self._programs = Recent(64)
        nodes = {node.name: node for node in exported_model.graph.nodes if node.op == "placeholder"}
        self._declared = [
            nodes[spec.arg.name].meta["val"].shape
            for spec in exported_model.graph_signature.input_specs
            if spec.kind.name == "USER_INPUT"
            and isinstance(nodes[spec.arg.name].meta.get("val"), torch.Tensor)
        ]

    def differ(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether arguments have other sizes than the example."""
        return self._shapes(args, kwargs) != self._example

    def program(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StableHLOGraphModule:
        """The program for the sizes of these arguments. DM672 for sizes that the export does not allow."""
        shapes = self._shapes(args, kwargs)
        found = self._programs.get(tuple(shapes))
        if found is None:
            self._check(shapes)
            options = StableHLOExportOptions(
                override_tracing_arguments=tuple(args), override_tracing_kwargs=dict(kwargs)
            )
            found = self._programs[tuple(shapes)] = exported_program_to_stablehlo(self._model, options)
        return found

    def _shapes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Size]:
        leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
        return [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _check(self, shapes: list[torch.Size]) -> None:
        bounds = {str(symbol): known for symbol, known in self._model.range_constraints.items()}
        sizes: dict[str, int] = {}
        fits = len(shapes) == len(self._declared)
        for shape, declared in zip(shapes, self._declared):
            fits = fits and len(shape) == len(declared)
            for size, allowed in zip(shape, declared):
                name = str(allowed)
                if name not in bounds:  # a number, or an expression of symbols
                    fits = fits and (isinstance(allowed, torch.SymInt) or size == allowed)
                    continue
                known = bounds[name]
                fits = fits and known.lower <= size <= known.upper and sizes.setdefault(name, size) == size
        require(
            fits,
            "DM672",
            "forward got other shapes or dtypes than it was exported with",
            why=f"{[tuple(s) for s in shapes]} for {[tuple(map(str, d)) for d in self._declared]}",
        )


def save_as_stablehlo(
    exported_model: Any, stablehlo_dir: str, options: StableHLOExportOptions | None = None
) -> None:
    """Export a `torch.export.ExportedProgram` and write it to a folder."""
    exported_program_to_stablehlo(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel: torch.nn.Module,
    args: tuple[Any, ...],
    path: str,
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export a module, as it runs on `args`, and write it to a folder."""
    save_as_stablehlo(torch.export.export(torchmodel, args), path, options)


def pending_program(tensors: Sequence[torch.Tensor] = ()) -> jax.export.Exported:
    """The program that the next barrier would run for these tensors (for all that wait, where none are
    given), exported by jax. DM672 where there is none.
    """
    graph, _ = pending(tensors)
    avals = [jax.ShapeDtypeStruct(meta.shape, jax_dtype(meta.dtype)) for meta in graph.leaves]
    avals += [jax.ShapeDtypeStruct((graph.scalars,), jax.numpy.float64)] if graph.scalars else []
    avals += [jax.ShapeDtypeStruct((graph.draws, 2), jax.numpy.uint32)] if graph.draws else []
    return jax.export.export(jax.jit(to_function(graph), keep_unused=True))(*avals)


class _Interpreter(torch.fx.Interpreter):
    """Runs an exported graph on the device: ops that make tensors make them there."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None  # holds for the examples; calls with arguments of other types are refused (DM672)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _DEVICE}
        return super().call_function(target, args, kwargs)


def _arguments(program: Any, inputs: list[Any]) -> tuple[list[list[Any]], list[Any], list[torch.Tensor]]:
    """(where each argument of the graph comes from, example values, tensors that are neither weights nor
    inputs).
    """
    places: list[list[Any]] = []
    values: list[Any] = []
    constants: list[torch.Tensor] = []
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        if kind == "USER_INPUT":
            places.append(["input", sum(place[0] == "input" for place in places)])
            values.append(inputs[places[-1][1]])
        elif spec.target in program.state_dict:
            places.append(["weight", spec.target])
            values.append(program.state_dict[spec.target])
        else:
            places.append(["constant", len(constants)])
            constants.append(program.constants[spec.target].detach().cpu())
            values.append(constants[-1])
    return places, values, constants


def _export(sub: Subgraph, metas: list[Meta]) -> Any:
    """jax's exported program of a traced function. DM672 where it draws random numbers."""
    require(
        not sub.graph.draws,
        "DM672",
        "the exported model draws random numbers",
        why="a program has no random state",
        cure="export it in eval mode",
    )
    require(
        not sub.captured,
        "DM672",
        "the exported model uses tensors that it does not own",
        cure="register them as buffers",
    )
    avals = [jax.ShapeDtypeStruct(meta.shape, jax_dtype(meta.dtype)) for meta in metas]
    # Programs are for every platform: the same folder serves a CPU and an accelerator.
    return jax.export.export(jax.jit(sub.call), platforms=("cpu", "cuda", "tpu"))(*avals)


@contextlib.contextmanager
def _flatbuffers() -> Iterator[None]:
    """Within this, jax writes or reads exported programs, for which it needs a library."""
    try:
        yield
    except ImportError as error:
        cure = "pip install dynamotor[stablehlo]"
        raise XlaError(
            "DM673", "the flatbuffers library is not installed", why=str(error), cure=cure
        ) from error
