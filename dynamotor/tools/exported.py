"""A program captured whole: one functional aten graph, what its inputs are, and guards at its entry.

>>> program = dynamotor.export(model, (tokens,), dynamic_shapes={"tokens": {0: "batch"}})
>>> program.graph_module.print_readable()
>>> program.module()(other_tokens)      # on any backend; UsageError (DM115) where a guard does not hold
>>> program.exported_program()          # the same as torch.export.ExportedProgram
>>> program.package("model.dm")         # the same as a file (tools/package.py)
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..api import compile, dispatcher_of
from ..autograd.aot import aot_compile
from ..backends import static_inputs
from ..base.compat import tree_leaves, tree_map_only
from ..base.errors import UsageError
from ..base.narrowing import checked
from ..capture.dispatch import miss_reason
from ..capture.guards import DictKeys, TensorMatch
from ..capture.source import SizeOf, Source
from ..capture.stance import set_stance
from ..capture.symbolic_inputs import DIM_NAMES, mark_dynamic
from ..graph.tensor_subclass import inner_names
from .entry import ArgumentChecks, name_of, refused
from .from_torch_export import from_torch_export
from .package import ONE, Method, build_package, names_of


@dataclass(frozen=True)
class Placeholder:
    """An input of the graph. kind: "argument", "parameter", "buffer", "constant" (a tensor that the code
    holds) or "size" (of an argument); target: which."""

    name: str
    kind: str
    target: str


@dataclass(frozen=True)
class Signature:
    """outputs: results of the graph; writes: inputs that it writes, in the order of its last nodes, `copy_`;
    result: Python text, makes the program's value from the results, before views are taken out."""

    inputs: tuple[Placeholder, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]
    result: str


def export(
    model: Callable[..., Any] | torch.export.ExportedProgram,
    args: Sequence[Any] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> Exported:
    """Capture a model (or function) for inference on arguments like these (one tensor, or a tuple); nothing
    of it runs. Anything but a tensor is part of the program. A `torch.export.ExportedProgram` comes with its
    own example arguments and dynamic dimensions.

    dynamic_shapes: as in `torch.export.export`, for each parameter by its name, or in order, the dimensions
      of its tensors that may differ: `{0: "batch"}`, `{0: torch.export.Dim("batch", min=2, max=64)}`.
    Raises CaptureError where the graph breaks, and UsageError where a program has no graph of tensors, or one
    that must be cut (DM114), or needs the number itself of a dimension that may differ (DM117).
    """
    if isinstance(model, torch.export.ExportedProgram):
        given = from_torch_export(model, None if args is None else (args, kwargs), dynamic_shapes)
        return Exported(*given)
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise UsageError(
            "DM140",
            f"the examples are a {type(args).__name__}, not a tuple",
            cure="export(model, (x, y)), or keywords as export(model, (), {'x': x})",
        )
    return Exported(model, tuple(args), dict(kwargs or {}), dynamic_shapes)


class Exported:
    """See `export`. graph_module: the aten graph; graph_signature; guards: what must hold at a call."""

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
    ) -> None:
        named = _by_parameter(model, args, kwargs)
        if isinstance(dynamic_shapes, Sequence):
            dynamic_shapes = dict(zip(named, dynamic_shapes, strict=True))
        twins = {id(t): (_marked(t, dims), dims) for t, dims in _dimensions(named, dynamic_shapes) if dims}
        self.model = model
        self._dims = {id(twin): dims for twin, dims in twins.values()}
        self.args, self.kwargs = tree_map_only(
            torch.Tensor, lambda t: twins[id(t)][0] if id(t) in twins else t, (args, kwargs)
        )
        self._graphs: list[fx.GraphModule] = []
        entry = dispatcher_of(self._compiled(self._backend)).entries[0]
        if len(self._graphs) != 1:
            calls = entry.info.data.gm is not None and entry.info.data.ops > 0
            whole = (
                "it is cut where data decides a size or a branch"
                if calls
                else "nothing of it runs on tensors"
            )
            raise refused(
                "it is not one graph", "parts of it run in eager PyTorch" if self._graphs else whole
            )
        self._entry, self.graph_module = entry, self._graphs[0]
        self.guards = tuple(map(str, entry.info.guards))
        self._refuse_numbers()
        self.graph_signature = self._signature()

    @property
    def graph(self) -> fx.Graph:
        """The aten graph."""
        return self.graph_module.graph

    def module(self, backend: Any = "native") -> Callable[..., Any]:
        """The program as a callable of the same arguments, on any backend of `compile`. Its parameters are
        the model's. A call for which a guard does not hold raises UsageError (DM115)."""
        compiled = self._compiled(backend)
        (entry,) = dispatcher_of(compiled).entries

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                try:
                    with set_stance("fail_on_recompile"):
                        return compiled(*args, **kwargs)
                except UsageError:
                    flat = (*args, *kwargs.values())
                    if entry.n_positional == len(args) and entry.program.check(flat) is not None:
                        raise
                    why = miss_reason(entry, flat, len(args), tuple(kwargs))
            raise UsageError(
                "DM115",
                "the exported program is not for this call",
                why=why,
                cure="export again with such arguments",
            )

        return call

    def package(self, path: str | os.PathLike[str]) -> None:
        """Write the program, built for this machine's CPU, with its weights and state of now, as a file for
        `dynamotor.load`. Raises UsageError (DM114) for programs that a file cannot hold."""
        package(path, {ONE: self})

    def exported_program(self) -> Any:
        """The program as a `torch.export.ExportedProgram`, with the model's names of its parameters. Its
        graph checks the dtypes and strides of arguments. Raises UsageError (DM114) where it changes Python
        objects, or looks at something of its arguments that an ExportedProgram cannot check, and what
        torch.export raises."""
        if self._entry.info.data.replays:
            raise refused("it changes Python objects", "an ExportedProgram holds tensors alone")
        self._refuse_unchecked()
        root = _Root(self._torch_graph, self._entry, self._places(), self._examples)
        root.forward = _with_signature(root.run, self.model)
        shapes: Any = torch.export.ShapesCollection()
        for tensor in filter(self._dims_of, tree_leaves((self.args, self.kwargs))):
            shapes[tensor] = {
                d: torch.export.Dim.AUTO if type(dim) is str else dim
                for d, dim in self._dims_of(tensor).items()
            }
        with torch.no_grad():
            found = torch.export.export(root, self.args, self.kwargs, dynamic_shapes=shapes, strict=False)
        leaves = tree_leaves((self.args, self.kwargs))
        tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        if "strides" in self._entry.info.data.asked:
            _check_strides(found, [None if t is None or self._dims_of(t) else t for t in tensors])
        _check_dtypes(found, tensors)
        return found

    def _refuse_unchecked(self) -> None:
        """Raise UsageError (DM114) for assumptions about arguments that torch.export checks in no call."""
        info = self._entry.info
        checks = ArgumentChecks.of((self.args, self.kwargs), info.guards, (*self.args, *self.kwargs.values()))
        facts = [fact for _, kind, fact in checks.nodes if kind == "tensor"]
        looked = [name for fact in facts for name in fact.absent if not hasattr(torch.Tensor, name)]
        looked += [name for fact in facts for name, _ in fact.facts]
        looked += ["requires_grad"] if "requires_grad" in info.data.asked else []
        if checks.same:
            raise refused("an argument is given twice", "an ExportedProgram cannot check that", "pass copies")
        if checks.distinct:
            raise refused(
                "it asks whether two arguments are one object", "an ExportedProgram cannot check that"
            )
        if looked:
            raise refused(f"it asks an argument for {looked[0]}", "an ExportedProgram cannot check that")
        nones = [path for path, kind, value in checks.nodes if kind == "value" and value is None]
        if nones:
            raise refused(
                f"{name_of(nones[0])} is None", "an ExportedProgram takes a tensor there, too", "leave it out"
            )
        walked = [row for row in info.guards if isinstance(row, DictKeys) and not row.source.is_held]
        if walked:
            raise refused(
                f"it looks at the keys of {walked[0].source}",
                "an ExportedProgram checks neither their order nor their types",
                "pass a list, or look items up by their keys",
            )
        zeros = [path for path, kind, value in checks.nodes if kind == "value" and _is_signed_zero(value)]
        if zeros:
            raise refused(
                f"{name_of(zeros[0])} is a zero with a sign",
                "an ExportedProgram takes 0.0 and -0.0 for one number",
                "leave it out, or pass a tensor",
            )

    def _dims_of(self, value: Any) -> Mapping[int, Any]:
        return self._dims.get(id(value), {})

    def _compiled(self, backend: Any) -> Any:
        compiled: Any = compile(self.model, backend=backend, fullgraph=True)
        # A program for other dimensions of this function would fit the examples, too.
        dispatcher_of(compiled).miss.__self__.kin = None
        with torch.no_grad():
            compiled.warm_up(*self.args, **self.kwargs)
        return compiled

    def _backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        copy = fx.Graph()
        copy.output(copy.graph_copy(gm.graph, {}))
        self._torch_graph, self._examples = fx.GraphModule(gm, copy), list(inputs)

        def keep(graph: fx.GraphModule, _info: Any) -> Callable[..., Any]:
            self._graphs.append(graph)
            return graph.forward

        return aot_compile(gm, list(inputs), keep, static_inputs=static_inputs(gm))

    _backend.__dict__["takes_symbols"] = True

    def _refuse_numbers(self) -> None:
        flat = (*self.args, *self.kwargs.values())
        for row in self._entry.info.guards:
            if type(row) is TensorMatch and not row.source.is_held:
                for d in self._dims_of(row.source.fetch(flat)):
                    if row.shape[d] is not None:
                        raise UsageError(
                            "DM117",
                            f"the program needs dimension {d} of {row.source} to be {row.shape[d]}",
                            cure="leave it out of dynamic_shapes; explain() says what asks for it",
                        )

    def _places(self) -> list[tuple[str, str]]:
        """Of the captured graph's inputs, kind and target: a tensor of a wrapper subclass is one of them."""
        held, sources = dict(names_of(self.model)), self._entry.info.inputs
        return [held.get(id(x)) or _place(source) for x, source in zip(self._examples, sources)]

    def _signature(self) -> Signature:
        nodes = list(self.graph.nodes)
        places = [
            (kind, target + inner)
            for tensor, (kind, target) in zip(self._examples, self._places())
            for inner in inner_names(tensor)
        ]
        inputs = [Placeholder(node.name, *place) for node, place in zip(nodes, places)]
        writes = [str(node.args[0]) for node in nodes if node.target is torch.ops.aten.copy_.default]
        outputs = map(str, nodes[-1].args[0])
        return Signature(tuple(inputs), tuple(outputs), tuple(writes), self._entry.info.data.code)


def package(path: str | os.PathLike[str], programs: Mapping[str, Exported]) -> None:
    """Write several programs as one file for `dynamotor.load`: its methods, by name, which share weights and
    state (tensors that are one object are one in the file).

    >>> dynamotor.package("llama.dm", {"prefill": export(model, prompt), "decode": export(model, token)})
    >>> dynamotor.load("llama.dm").prefill(prompt)
    """
    UsageError.when(
        not programs, "DM147", "a package of no programs", cure='package(path, {"decode": export(...)})'
    )
    for name in programs:
        if not name.isidentifier() or name in ("methods", "state"):
            raise UsageError(
                "DM147",
                f"{name!r} is no name of a method",
                cure="pass an identifier, but not 'methods' or 'state'",
            )
    build_package({name: Method(p.model, p.args, p.kwargs) for name, p in programs.items()}).write(path)


class _Root(torch.nn.Module):
    """The captured graph between a call's arguments and its results, with the tensors that it holds."""

    def __init__(
        self,
        gm: fx.GraphModule,
        entry: Any,
        places: Sequence[tuple[str, str]],
        tensors: Sequence[Any],
    ) -> None:
        super().__init__()
        self.captured, self.entry = gm, entry
        self.held: list[str | None] = []
        for k, ((kind, target), tensor) in enumerate(zip(places, tensors, strict=True)):
            name = f"constant_{k}" if kind == "constant" else target
            self.held.append(None if kind in ("argument", "size") else name)
            if self.held[-1]:
                _put(self, name, tensor)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        flat = (*args, *kwargs.values())
        places = zip(self.held, self.entry.info.inputs, strict=True)
        values = [operator.attrgetter(name)(self) if name else source.fetch(flat) for name, source in places]
        outs = self.captured(*values)
        return outs if self.entry.finish is None else self.entry.finish(outs, flat)


def _check_dtypes(program: Any, examples: Sequence[torch.Tensor | None]) -> None:
    """Put checks of dtypes in the graph of an ExportedProgram, which torch.export leaves out."""
    nodes, first = _inputs_of(program)
    check = torch.ops.aten._assert_tensor_metadata.default
    with program.graph.inserting_before(first):
        for node, example in zip(nodes, examples, strict=True):
            if example is not None:
                call = program.graph.call_function(check, (node, None, None, example.dtype))
                call.meta["val"] = None
    program.graph_module.recompile()


def _inputs_of(program: Any) -> tuple[list[fx.Node], fx.Node]:
    """The nodes of an ExportedProgram's arguments, and the first node behind its placeholders."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    arguments = [spec.arg for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    return [nodes[arg.name] for arg in arguments], first


def _check_strides(program: Any, examples: Sequence[torch.Tensor | None]) -> None:
    """Put checks of strides in the graph of an ExportedProgram. `run_decompositions` drops them."""
    nodes, first = _inputs_of(program)

    def call(target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
        node: fx.Node = program.graph.call_function(target, args)
        node.meta["val"] = val
        return node

    with program.graph.inserting_before(first):
        for node, example in zip(nodes, examples, strict=True):
            for d, stride in enumerate(() if example is None else example.stride()):
                found = call(torch.ops.aten.sym_stride.int, (node, d), stride)
                holds = call(operator.eq, (found, stride), True)
                words = f"[DM115] the exported program is not for this call: {node} has another stride({d})"
                call(torch.ops.aten._assert_scalar.default, (holds, words), None)
    program.graph_module.recompile()


def _is_signed_zero(value: Any) -> bool:
    return isinstance(value, float | complex) and value == 0


def _with_signature(run: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """The function with the parameters of the model, by which torch.export names the inputs."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__dict__["__signature__"] = _signature_of(model)
    return forward


def _put(root: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = checked(torch.nn.Module, root._modules[part])
    if isinstance(tensor, torch.nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor)


def _place(source: Source) -> tuple[str, str]:
    kind = "constant" if source.is_held else "size" if type(source) is SizeOf else "argument"
    return kind, str(source)


def _by_parameter(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of the parameters that take them."""
    return dict(_signature_of(model).bind(*args, **kwargs).arguments)


def _signature_of(model: Any) -> inspect.Signature:
    return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)


def _dimensions(value: Any, asked: Any) -> Iterator[tuple[torch.Tensor, dict[int, Any]]]:
    """Each tensor with the requests for its dynamic dimensions."""
    if asked is None or not asked:
        return
    pairs = asked.items() if isinstance(asked, Mapping) else enumerate(asked)
    if isinstance(value, torch.Tensor):
        yield value, {d: dim for d, dim in pairs if not _is_fixed(dim)}
        return
    for key, part in pairs:
        yield from _dimensions(value[key], part)


def _is_fixed(dim: Any) -> bool:
    hint = getattr(getattr(dim, "type", None), "name", "")  # of Dim.STATIC
    return dim is None or type(dim) is int or hint == "STATIC"


def _marked(tensor: torch.Tensor, dims: Mapping[int, Any]) -> torch.Tensor:
    """An example to capture with, so that the marks do not stay on the user's tensor."""
    twin = tensor.detach()
    for d, dim in dims.items():
        least, most = getattr(dim, "min", None), getattr(dim, "max", None)
        # The end of a Dim without one is PyTorch's infinity, which is no size.
        mark_dynamic(twin, d, min=least, max=most if isinstance(most, int) else None)
    names = {d: dim if type(dim) is str else getattr(dim, "__name__", None) for d, dim in dims.items()}
    twin.__dict__[DIM_NAMES] = {d: name for d, name in names.items() if name}
    return twin
