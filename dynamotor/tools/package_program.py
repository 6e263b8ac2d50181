"""A package's program as lines of words, which C++ runs without Python (`cpp/dynamotor_package.cpp`).

>>> print(steps_of(entry, inputs, places, weights, results, checks))
argument 0 0 6 2 4 16 16 1
weight 1 0 6 2 32 16 16 1
...
kernel 0 dm_add_mul_erf_76eca01fc40d 3 5 2 6 0
return 1 8

A line is a step: its name, then slots (numbers of tensors) and how tensors are laid out (dtype, dimensions,
sizes, strides). What stands before the line `run` happens once. What no line can say is refused when C++
loads the file, with the reason that stands here.
"""

from __future__ import annotations

import ast
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..autograd.recipe import Recipe
from ..base import compat
from ..base.errors import RaisedWhen
from ..base.narrowing import checked
from ..codegen.call_program import Expected, Listing
from ..codegen.externs import Callee
from ..codegen.folded import as_compiled
from ..graph.plain_data import decode, decode_graph
from ..graph.sizes import Dim
from .entry import ArgumentChecks, TensorFacts

DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}  # as libtorch numbers them
_CODES: dict[Any, int] = {
    **DTYPES,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
    torch.strided: 0,
}
# What libtorch's dispatcher does not take from C, or only with a leak: Scalars (torch 2.13 refuses them) and
# texts (it loses 70 bytes of each at each call). These ops have functions of their own.
_PRODUCTS = {
    torch.ops.aten.addmm.out: "aoti_torch_cpu_addmm_out",
    torch.ops.aten.baddbmm.out: "aoti_torch_cpu_baddbmm_out",
}
_CONVOLUTIONS = {
    torch.ops.mkldnn._convolution_pointwise.default: "aoti_torch_cpu_mkldnn__convolution_pointwise",
    torch.ops.mkldnn._convolution_pointwise.binary: "aoti_torch_cpu_mkldnn__convolution_pointwise_binary",
}


class NotFlat(RaisedWhen):
    """A program that only Python runs; the message says what in it."""


@dataclass(frozen=True)
class Register:
    """The number under which C++ knows a tensor."""

    number: int


def layout(shape: Sequence[Dim], stride: Sequence[Dim], dtype: torch.dtype) -> list[Any]:
    """The words that describe a tensor's layout."""
    NotFlat.when(dtype not in DTYPES, f"a tensor of {dtype}")
    return [DTYPES[dtype], len(shape), *map(int, shape), *map(int, stride)]


@dataclass
class Steps:
    """The lines, as they are written. weights: the file's tensors, to which constants are added."""

    weights: list[torch.Tensor]
    lines: list[list[Any]] = field(default_factory=list)
    slots: dict[str, Register] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)

    def step(self, name: str, *words: Any) -> None:
        """Add a line."""
        self.lines.append([name, *words])

    def slot(self, name: str | None = None) -> Register:
        """A new slot, of this name."""
        slot = Register(next(self._numbers))
        if name is not None:
            self.slots[name] = slot
        return slot

    def weight(self, k: int, stride: Sequence[Dim]) -> Register:
        """The slot of a tensor of the file, with these strides."""
        tensor, slot = self.weights[k], self.slot()
        dense = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        self.step("weight", slot, k, *layout(tensor.shape, dense, tensor.dtype))
        return slot if tuple(stride) == dense else self.copied(slot, stride)

    def copied(self, source: Register, stride: Sequence[Dim]) -> Register:
        """The slot of a copy with these strides."""
        slot = self.slot()
        self.step("copied", slot, source, len(stride), *stride)
        return slot

    def view(
        self, base: Register, dtype: Any, shape: Sequence[Dim], stride: Sequence[Dim], offset: Dim
    ) -> Register:
        """The slot of a view. dtype: None for that of the base."""
        slot = self.slot()
        code = -1 if dtype is None else layout((), (), dtype)[0]
        self.step("view", slot, base, int(offset), code, len(shape), *map(int, shape), *map(int, stride))
        return slot

    # -- aten ------------------------------------------------------------------------------------------------
    def aten(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Register | None]
    ) -> None:
        """A call of an op. NotFlat where C++ has no such op, or cannot hand it an argument."""
        NotFlat.when(
            not isinstance(op, compat.OpOverload) or op.namespace not in ("aten", "mkldnn"),
            f"a call of {op}, which is written in Python",
        )
        schema = op._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        values = [given.get(argument.name, argument.default_value) for argument in schema.arguments]
        if op in _PRODUCTS:
            *tensors, out = [value.number for value in values if isinstance(value, Register)]
            scalars = [_bits(float(value)) for value in values if isinstance(value, (int, float))]
            self.step("product", _PRODUCTS[op], out, *tensors, *scalars)
            return
        if op in _CONVOLUTIONS:
            self.step("convolution", _CONVOLUTIONS[op], results[0], *_of_convolution(schema, values))
            return
        NotFlat.when(
            any(str(returned.type) != "Tensor" for returned in schema.returns),
            f"results of {op} that are no tensors",
        )
        words: list[Any] = []
        for argument, value in zip(schema.arguments, values, strict=True):
            words += _argument(argument.type, getattr(argument, "N", None), value, str(op))
        kept = [*results, *[None] * (len(schema.returns) - len(results))]
        numbers = [-1 if slot is None else slot for slot in kept]
        overload = schema.overload_name or "-"
        self.step("call", schema.name, overload, len(values), *words, len(numbers), *numbers)

    def fold(self, folded: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Register]:
        """The slots of values computed once: as numbers where they can be written down. What oneDNN packs in
        its own way is packed by C++.
        """
        graph, sources, specs = decode_graph(folded[0]), decode(folded[1]), decode(folded[2])
        values: dict[Any, Any] = {}
        given = iter([inputs[i] for i, _ in sources])

        def slot(node: Any) -> Any:
            if not isinstance(node, torch.fx.Node):
                return node
            value = values[node]
            if not value.is_mkldnn:
                self.weights.append(value.detach())
                return self.weight(len(self.weights) - 1, value.stride())
            made = self.slot()
            self.aten(node.target, [slot(arg) for arg in node.args], node.kwargs, [made])
            return made

        with torch.no_grad():
            for node in graph.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(given)
                elif node.op == "call_function":
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)
        results = node.args[0]
        for result, spec in zip(results, specs, strict=True):
            values[result] = as_compiled(values[result], spec)
        return [slot(result) for result in results]


def _of_convolution(schema: Any, values: Sequence[Any]) -> list[Any]:
    """The words of a convolution's arguments: lists stand behind their length, texts behind an s; n is
    absent.
    """
    words: list[Any] = []
    for argument, value in zip(schema.arguments, values, strict=True):
        number = _bits if "number" in str(argument.type) else int
        match value:
            case None:
                words.append("n")
            case Register():
                words.append(value)
            case str():
                words.append(_word(value))
            case list() | tuple() if None not in value:
                words += [len(value), *map(number, value)]
            case int() | float():
                words.append(number(value))
            case _:
                raise NotFlat(f"an argument of a convolution: {value!r}")
    return words


def _word(value: str) -> str:
    """A text as a word."""
    if any(map(str.isspace, value)):
        raise NotFlat(f"the text {value!r}")
    return f"s{value}"


def _bits(number: float) -> int:
    """A double as the whole number that has its bits."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _argument(kind: Any, count: int | None, value: Any, op: str) -> list[Any]:
    """The words of an argument: `?` before what may be absent, `L` before a list's length."""
    name = kind.kind()
    if name == "OptionalType":
        return ["n"] if value is None else ["?", *_argument(kind.getElementType(), count, value, op)]
    if name == "ListType" and isinstance(value, (int, float)) and count:
        value = [value] * count
    if name == "ListType" and isinstance(value, (list, tuple)):
        element = kind.getElementType()
        return [f"L{len(value)}", *[word for one in value for word in _argument(element, None, one, op)]]
    if name == "TensorType" and isinstance(value, Register):
        return [f"t{value.number}"]
    if name == "FloatType" and isinstance(value, (int, float)):
        return [f"i{_bits(value)}"]
    if name in ("IntType", "BoolType") and isinstance(value, int):
        return [f"i{int(value)}"]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)) and value in _CODES:
        return [f"i{_CODES[value]}"]
    if name == "StringType" and isinstance(value, str):
        return [_word(value)]
    raise NotFlat(f"an argument of {op}: {value!r} for a {name}")


class _Text:
    """The text of a call program, line by line."""

    last: ast.stmt

    def __init__(
        self, steps: Steps, listing: Listing, constants: dict[str, Any], libraries: dict[str, int]
    ) -> None:
        self.steps, self.listing, self.constants, self.libraries = steps, listing, constants, libraries

    def value(self, node: ast.expr) -> Any:
        """The meaning of an expression; views and copies are steps of their own."""
        match node:
            case ast.Name(name):
                return self.steps.slots[name]
            case ast.Attribute(ast.Name("torch"), name):
                return getattr(torch, name)
            case ast.List(items) | ast.Tuple(items):
                return [self.value(item) for item in items]
            case ast.Call(ast.Name("view"), [base, *rest]):
                return self.steps.view(self.value(base), None, *map(self.value, rest))
            case ast.Call(ast.Name("view_dtype"), [base, *rest]):
                return self.steps.view(self.value(base), *map(self.value, rest))
            case ast.Call(ast.Name("copied"), [base, stride]):
                return self.steps.copied(self.value(base), self.value(stride))
            case ast.Call(ast.Name("float"), [ast.Constant(text)]):
                return float(str(text))
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise NotFlat(f"the expression {ast.unparse(node)}") from None

    def line(self, node: ast.stmt) -> None:
        """A statement's steps."""
        match node:
            case ast.Expr(ast.Call() as call):
                self.call(call, [])
            case ast.Assign([ast.Name(name)], ast.Call() as call):
                self.call(call, [name])
            case ast.Assign([ast.Tuple(names)], ast.Call() as call):
                self.call(call, [name.id for name in names if isinstance(name, ast.Name)])
            case ast.Delete(names):
                for gone in names:
                    self.steps.step("free", self.value(gone))
            case _:
                raise NotFlat(f"the line {ast.unparse(node)}")

    def call(self, call: ast.Call, names: Sequence[str]) -> None:
        """A call of a kernel, of aten, of a check, or for memory."""
        assert isinstance(call.func, ast.Name)
        name, stands_for = call.func.id, self.constants.get(call.func.id)
        if name in self.listing.kernels:
            c_name, n, ints = self.listing.kernels[name]
            NotFlat.when(n != len(call.args), "a kernel of sizes that differ between calls")
            slots = [self.value(arg) for arg in call.args]
            self.steps.step("kernel", self.libraries[c_name], c_name, n, *slots, len(ints), *ints)
        elif name in ("new", "take"):
            shape, stride = map(self.value, call.args[:2] if name == "new" else call.args[1:])
            kind = call.args[2] if name == "new" else checked(ast.Tuple, call.args[0]).elts[1]
            self.steps.step("new", self.steps.slot(names[0]), *layout(shape, stride, self.value(kind)))
        elif type(stands_for) is Expected:
            if isinstance(call.args[0], ast.Call):
                self.call(call.args[0], names)
            if not stands_for.planned:
                spec, slot = stands_for.spec, names[0] if names else checked(ast.Name, call.args[0]).id
                self.steps.step(
                    "expect", self.steps.slots[slot], *layout(spec.shape, spec.stride, spec.dtype)
                )
        elif type(stands_for) is Callee and not stands_for.row_major:
            args = [self.value(arg) for arg in call.args]
            kwargs = {str(keyword.arg): self.value(keyword.value) for keyword in call.keywords}
            results = [None if one == "_" else self.steps.slot(one) for one in names]
            self.steps.aten(stands_for.target, args, kwargs, results)
        else:
            raise NotFlat(f"a call of {name}")


def steps_of(
    entry: dict[str, Any],
    inputs: Sequence[torch.Tensor],
    places: Sequence[Sequence[Any]],
    weights: list[torch.Tensor],
    results: Sequence[tuple[int, torch.Tensor]],
    checks: ArgumentChecks,
) -> str:
    """The lines of a program whose entry in the disk cache is this, or one that says why there are none;
    constants that it folds go to `weights`.

    places: which argument or weight each of the graph's inputs is. results: the tensors of the model's
    result, each behind the number of the graph's output that it is. checks: how arguments must be.
    """
    before = len(weights)
    try:
        steps = _steps_of(entry, inputs, places, weights, results, checks)
    except NotFlat as why:
        del weights[before:]
        return f"refused {why}\n"
    words = [[word.number if type(word) is Register else word for word in line] for line in steps.lines]
    return "".join(" ".join(map(str, line)) + "\n" for line in words)


def _steps_of(
    entry: dict[str, Any],
    inputs: Sequence[torch.Tensor],
    places: Sequence[Sequence[Any]],
    weights: list[torch.Tensor],
    results: Sequence[tuple[int, torch.Tensor]],
    checks: ArgumentChecks,
) -> Steps:
    steps = Steps(weights)
    slots, given = [], _arguments(steps, checks)
    for tensor, (kind, k) in zip(inputs, places, strict=True):
        slots.append(steps.weight(k, tensor.stride()) if kind == "weight" else given[k])
    program = entry["program"]
    if "folded" in program:
        program, *folded = program["folded"]
        slots += steps.fold(folded, inputs)
    listing, constants, units = program["program"]
    listing = decode(listing)
    libraries: dict[str, int] = {}
    for number, (key, names) in enumerate(units):
        steps.step("library", key)
        libraries |= dict.fromkeys(names, number)
    text = _Text(steps, listing, {name: decode(value) for name, value in constants.items()}, libraries)
    _write(steps, text, slots)
    made = _results(steps, text, decode(entry["recipe"]), results)
    steps.step("return", len(made), *made)
    return steps


def _arguments(steps: Steps, checks: ArgumentChecks) -> dict[int, Register]:
    """The slots of the tensors among the arguments, by their nodes; and which must be one tensor, or two."""
    numbers = {k: number for number, k in enumerate(checks.tensor_nodes())}
    slots = {k: steps.slot() for k in numbers}
    steps.step("arguments", len(slots))
    for k, number in numbers.items():
        facts: TensorFacts = checks.nodes[k][2]
        NotFlat.when(facts.requires_grad, "an argument that requires a gradient")
        NotFlat.when(
            "storage_offset" in dict(facts.facts), "a program that asks where an argument begins in memory"
        )
        spec = facts.spec
        steps.step("argument", slots[k], number, *layout(spec.shape, spec.stride, spec.dtype))
    for name, pairs in (("same", checks.same), ("distinct", checks.distinct)):
        for a, b in pairs:
            if a in numbers and b in numbers:
                steps.step(name, numbers[a], numbers[b])
    return slots


def _write(steps: Steps, text: _Text, slots: Sequence[Register]) -> None:
    """Offsets in memory, once; and the program's statements but the last."""
    listing = text.listing
    (function,) = ast.parse(listing.source).body
    assert isinstance(function, ast.FunctionDef)
    steps.slots |= dict(zip((arg.arg for arg in function.args.args), slots, strict=True))
    steps.step("block", listing.scratch_size)
    for name, (_, start, inside, _, ref) in listing.scratch.items():
        steps.step("scratch", steps.slot(name), start + inside, *layout(ref.shape, ref.stride, ref.dtype))
    for name, (position, ref, spec) in listing.bound.items():
        dtype = None if ref.dtype is spec.dtype else ref.dtype
        steps.slots[name] = steps.view(slots[position], dtype, ref.shape, ref.stride, int(ref.offset))
    steps.step("run")
    *statements, text.last = function.body
    for statement in statements:
        text.line(statement)


def _results(steps: Steps, text: _Text, recipe: Recipe, results: Sequence[tuple[int, Any]]) -> list[Register]:
    """The slots of results, each with its own layout: they may be views of other results."""
    assert isinstance(text.last, ast.Return) and isinstance(text.last.value, ast.Tuple)
    found: list[Register] = []
    for k, out in results:
        plan = recipe.plans[k]
        NotFlat.when(plan.kind != "value", "a result that its graph does not compute")
        expression = text.last.value.elts[plan.index]
        slot = text.value(expression)
        if type(slot) is not Register or plan.steps and isinstance(expression, ast.Call):
            raise NotFlat(f"the result {ast.unparse(expression)}")
        if plan.steps:
            slot = steps.view(slot, out.dtype, out.shape, out.stride(), out.storage_offset())
        found.append(slot)
    return found
