"""A package's program as lines of words, which C++ runs without Python (`cpp/dynamotor_package.cpp`).

>>> print(steps_of(built, places, weights, results, checks))
argument 0 0 6 2 4 16 16 1 argument 0
weight 1 0 6 2 32 16 16 1
...
kernel 0 dm_add_mul_erf_76eca01fc40d 3 5 2 6 0
return 1 8

A line is a step: its name, slots (numbers of tensors) and layouts (dtype, dimensions, sizes, strides); those
before `run` happen once. `$3` is a size that differs between calls, computed by the fourth `size` or `number`
line. A program that has no lines is refused when C++ loads the file, with the reason that stands here.
"""

from __future__ import annotations

import ast
import itertools
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..autograd.recipe import OutputPlan
from ..base import compat
from ..base.errors import RaisedWhen
from ..base.narrowing import checked
from ..codegen.call_program import Expected, Listing
from ..codegen.externs import Callee
from ..codegen.folded import as_compiled
from ..graph.plain_data import decode, decode_graph, symbols_by_name
from ..graph.shapes import infer_spec
from ..graph.sizes import Dim, ShapeEnv, Size, hint, maximum, minimum
from ..graph.spec import TensorSpec
from .entry import ArgumentChecks, TensorFacts, name_of
from .package_graph import Built
from .package_weights import Weights

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


@dataclass(frozen=True)
class SizePlace:
    """The place at which C++ keeps a size that differs between calls."""

    place: int


_OPERATIONS: dict[type[ast.AST], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
_FUNCTIONS = ("floordiv", "mod", "min", "max")  # of two numbers, in texts of sizes


def layout(shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The words that describe a tensor's layout, whose sizes are ints or Numbers."""
    NotFlat.when(dtype not in DTYPES, f"a tensor of {dtype}")
    return [DTYPES[dtype], len(shape), *shape, *stride]


def layout_text(tensor: torch.Tensor) -> str:
    """The same of a tensor; none of a dtype that C++ does not know, where no program is flat either."""
    if tensor.dtype not in DTYPES:
        return "-1 0"
    return " ".join(map(str, layout(tensor.shape, tensor.stride(), tensor.dtype)))


@dataclass
class Steps:
    """The lines, as they are written. weights: the file's tensors, to which constants are added. numbers: the
    sizes that differ between calls, by their texts.
    """

    weights: Weights
    lines: list[list[Any]] = field(default_factory=list)
    slots: dict[str, Register] = field(default_factory=dict)
    numbers: dict[str, SizePlace] = field(default_factory=dict)
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

    # -- sizes that differ between calls ---------------------------------------------------------------------
    def size(self, value: Any) -> Any:
        """A size of a spec: an int, or its SizePlace."""
        return self.number(ast.parse(str(value), mode="eval").body) if type(value) is Size else int(value)

    def sizes(self, values: Sequence[Any]) -> list[Any]:
        """Sizes of a spec."""
        return [self.size(value) for value in values]

    def number(self, node: ast.expr) -> Any:
        """The meaning of a size's text."""
        text = ast.unparse(node)
        if text not in self.numbers:
            words = list(self._postfix(node))
            if len(words) == 1:
                return words[0]
            self.step("number", self.new_number(text), *words)
        return self.numbers[text]

    def new_number(self, text: str) -> SizePlace:
        """The place of a size of this text."""
        found = self.numbers[text] = SizePlace(len(self.numbers))
        return found

    def _postfix(self, node: ast.expr) -> Iterator[Any]:
        """Operands before their operation."""
        match node:
            case ast.Constant(int() as value):
                yield value
            case ast.Name(name) if name in self.numbers:
                yield self.numbers[name]
            case ast.UnaryOp(ast.USub(), operand):
                yield from (0, *self._postfix(operand), "sub")
            case ast.BinOp(a, operation, b) if type(operation) in _OPERATIONS:
                yield from (*self._postfix(a), *self._postfix(b), _OPERATIONS[type(operation)])
            case ast.Call(ast.Name(name), [a, b]) if name in _FUNCTIONS:
                yield from (*self._postfix(a), *self._postfix(b), name)
            case _:
                raise NotFlat(f"the size {ast.unparse(node)}")

    # -- tensors ---------------------------------------------------------------------------------------------
    def weight(self, k: int, stride: Sequence[Dim]) -> Register:
        """The slot of a tensor of the file, with these strides; state has its own in the file."""
        tensor, slot = self.weights.tensors[k], self.slot()
        if k in self.weights.state:
            self.step("weight", slot, k, *layout(tensor.shape, tensor.stride(), tensor.dtype))
            return slot
        dense = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        self.step("weight", slot, k, *layout(tensor.shape, dense, tensor.dtype))
        return slot if tuple(stride) == dense else self.copied(slot, stride)

    def copied(self, source: Register, stride: Sequence[Dim]) -> Register:
        """The slot of a copy with these strides."""
        slot = self.slot()
        self.step("copied", slot, source, len(stride), *stride)
        return slot

    def view(
        self, base: Register, dtype: Any, shape: Sequence[Any], stride: Sequence[Any], offset: Any
    ) -> Register:
        """The slot of a view. dtype: None for that of the base."""
        slot = self.slot()
        code = -1 if dtype is None else layout((), (), dtype)[0]
        self.step("view", slot, base, offset, code, len(shape), *shape, *stride)
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
                self.weights.tensors.append(value.detach())
                return self.weight(len(self.weights.tensors) - 1, value.stride())
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
    NotFlat.when(
        any(isinstance(v, (list, tuple)) and _has_numbers(v) for v in values), "a convolution of such sizes"
    )
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


def _has_numbers(values: Sequence[Any]) -> bool:
    return any(type(value) is SizePlace for value in values)


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
    if name == "IntType" and type(value) is SizePlace:
        return [f"v${value.place}"]
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
    sized: dict[str, Any]  # of results whose sizes differ between calls, shape and strides
    made: dict[str, tuple[ast.expr, ast.expr, torch.dtype] | TensorSpec]  # the layouts of new tensors

    def __init__(
        self, steps: Steps, listing: Listing, constants: dict[str, Any], libraries: dict[str, int]
    ) -> None:
        self.steps, self.listing, self.constants, self.libraries = steps, listing, constants, libraries
        self.sized, self.made = {}, {}

    def spec_of(self, name: str, env: ShapeEnv) -> TensorSpec:
        """The layout of a new tensor, its sizes as sizes."""
        found = self.made.get(name)
        if found is None:
            raise NotFlat(f"a view of {name}, whose layout its program does not say")
        if isinstance(found, TensorSpec):
            return found
        known: dict[str, Any] = {symbol.name: Size({(symbol,): 1}, env) for symbol in env.symbols}
        known |= {"floordiv": operator.floordiv, "mod": operator.mod}
        known |= {"min": partial(minimum, env), "max": partial(maximum, env)}
        *sizes, dtype = found
        shape, stride = (eval(ast.unparse(node), {"__builtins__": {}}, known) for node in sizes)
        return TensorSpec(shape, stride, dtype)

    def value(self, node: ast.expr) -> Any:
        """The meaning of an expression; views and copies are steps of their own."""
        match node:
            case ast.Name(name):
                return self.steps.numbers[name] if name in self.steps.numbers else self.steps.slots[name]
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
            return self.steps.number(node)

    def line(self, node: ast.stmt) -> None:
        """A statement's steps."""
        match node:
            case ast.Expr(ast.Call(ast.Name("written"))):
                pass  # moves what Python's autograd counts
            case ast.Expr(ast.Call() as call):
                self.call(call, [])
            case ast.Expr(ast.IfExp(ast.Compare(_, _, [size, most]), ast.Call() as few, ast.Call() as more)):
                self.choice(few, more, size, most)
            case ast.Assign([ast.Name(name)], ast.Call() as call):
                self.call(call, [name])
            case ast.Assign([ast.Tuple(names)], ast.Call() as call):
                self.call(call, [name.id for name in names if isinstance(name, ast.Name)])
            case ast.Delete(names):
                for gone in names:
                    self.steps.step("free", self.value(gone))
            case _:
                raise NotFlat(f"the line {ast.unparse(node)}")

    def choice(self, few: ast.Call, more: ast.Call, size: ast.expr, most: ast.expr) -> None:
        """A call of a kernel up to a number of rows, and of a library for others; of the kernel for all where
        only Python has the other.
        """
        callee = checked(Callee, self.constants[checked(ast.Name, more.func).id])
        if getattr(callee.target, "namespace", "") == "dynamotor":
            self.call(few, [])
            return
        self.call(more, [])  # its last step is the call, those before make its views
        library = self.steps.lines.pop()
        self.steps.step("either", self.value(size), self.value(most))
        self.call(few, [])
        self.steps.lines.append(library)

    def call(self, call: ast.Call, names: Sequence[str]) -> None:
        """A call of a kernel, of aten, of a check, or for memory."""
        assert isinstance(call.func, ast.Name)
        name = call.func.id
        stands_for = self.constants.get(name, self.listing.checks.get(name))
        if name in self.listing.kernels:
            c_name, n, fixed = self.listing.kernels[name]
            given = [self.value(arg) for arg in call.args]
            ints = [*fixed, *given[n:]]
            self.steps.step("kernel", self.libraries[c_name], c_name, n, *given[:n], len(ints), *ints)
        elif name in ("new", "take"):
            shape, stride = map(self.value, call.args[:2] if name == "new" else call.args[1:])
            kind = call.args[2] if name == "new" else checked(ast.Tuple, call.args[0]).elts[1]
            self.made[names[0]] = (*call.args[name == "take" :][:2], self.value(kind))
            self.steps.step("new", self.steps.slot(names[0]), *layout(shape, stride, self.value(kind)))
        elif type(stands_for) is Expected:
            if isinstance(call.args[0], ast.Call):
                self.call(call.args[0], names)
            if not stands_for.planned:
                spec, slot = stands_for.spec, names[0] if names else checked(ast.Name, call.args[0]).id
                self.made[slot] = spec
                shape, stride = self.sized.get(name, (spec.shape, spec.stride))
                self.steps.step("expect", self.steps.slots[slot], *layout(shape, stride, spec.dtype))
        elif type(stands_for) is Callee and not stands_for.row_major:
            args = [self.value(arg) for arg in call.args]
            kwargs = {str(keyword.arg): self.value(keyword.value) for keyword in call.keywords}
            results = [None if one == "_" else self.steps.slot(one) for one in names]
            self.steps.aten(stands_for.target, args, kwargs, results)
        else:
            raise NotFlat(f"a call of {name}")


def steps_of(
    built: Built,
    places: Sequence[Sequence[Any]],
    weights: Weights,
    results: Sequence[tuple[str, int]],
    checks: ArgumentChecks,
) -> str:
    """The lines of a program, or one that says why there are none;
    constants that it folds go to `weights`.

    places: which argument, size or weight each of the graph's inputs is. results: the tensors of the model's
    result: which output or input of the graph, or argument, each is. checks: how arguments must be.
    """
    before = len(weights.tensors)
    try:
        steps = _steps_of(built, places, weights, results, checks)
    except NotFlat as why:
        del weights.tensors[before:]
        return f"refused {why}\n"
    return "".join(" ".join(map(_shown, line)) + "\n" for line in steps.lines)


def _shown(word: Any) -> str:
    """A word as it is written."""
    if type(word) is Register:
        return str(word.number)
    return f"${word.place}" if type(word) is SizePlace else str(word)


def _steps_of(
    built: Built,
    places: Sequence[Sequence[Any]],
    weights: Weights,
    results: Sequence[tuple[str, int]],
    checks: ArgumentChecks,
) -> Steps:
    steps = Steps(weights)
    slots: list[Any] = []
    known, given = symbols_by_name(built.env), _arguments(steps, checks)
    for tensor, (kind, k) in zip(built.inputs, places, strict=True):
        if kind == "weight":
            slots.append(steps.weight(k, tensor.stride()))
        else:
            slots.append(steps.numbers[k] if kind == "size" else given[k])
    program = built.entry["program"]
    if "folded" in program:
        program, *folded = program["folded"]
        slots += steps.fold(folded, built.inputs)
    listing, constants, units = program["program"]
    listing = decode(listing, known)
    libraries: dict[str, int] = {}
    for number, (key, names) in enumerate(units):
        steps.step("library", key)
        libraries |= dict.fromkeys(names, number)
    constants = {name: decode(value, known) for name, value in constants.items()}
    text = _Text(steps, listing, constants, libraries)
    _write(steps, text, slots)
    recipe, made = decode(built.entry["recipe"], known), []
    for kind, k in results:
        if kind == "out":
            made.append(_result(steps, text, recipe.plans[k], built, slots, built.outs[k]))
        else:
            made.append(given[k] if kind == "argument" else slots[k])
    steps.step("return", len(made), *made)
    return steps


def _arguments(steps: Steps, checks: ArgumentChecks) -> dict[int, Register]:
    """The slots of the tensors among the arguments, by their nodes; their sizes, and which must be one
    tensor, two, or apart in memory.
    """
    numbers = {k: number for number, k in enumerate(checks.tensor_nodes())}
    slots = {k: steps.slot() for k in numbers}
    steps.step("arguments", len(slots))
    for k, number in numbers.items():
        steps.step("named", number, name_of(checks.nodes[k][0]))
    for row in checks.sizes:
        place = steps.new_number(row.symbol.name)
        kind = "stride" if row.is_stride else "size"
        steps.step(kind, place, numbers[row.node], row.dim, row.lo, row.hi)
    for guard in checks.assumed:
        words = guard.kind, steps.size(guard.expr), guard, "does not hold:", checks.told(guard)
        steps.step("holds", *words)
    for k, number in numbers.items():
        facts: TensorFacts = checks.nodes[k][2]
        NotFlat.when(facts.requires_grad, "an argument that requires a gradient")
        NotFlat.when(
            "storage_offset" in dict(facts.facts), "a program that asks where an argument begins in memory"
        )
        spec = facts.spec
        steps.step(
            "argument",
            slots[k],
            number,
            *layout(steps.sizes(spec.shape), steps.sizes(spec.stride), spec.dtype),
        )
    pairs = ("same", checks.same), ("distinct", checks.distinct), ("apart", tuple(checks.apart()))
    for name, rows in pairs:
        for a, b in rows:
            if a in numbers and b in numbers:
                steps.step(name, numbers[a], numbers[b])
    for k in checks.written:
        steps.step("written", numbers[k])
    if checks.asks:
        steps.step("asks", "strides")
    return slots


def _write(steps: Steps, text: _Text, slots: Sequence[Any]) -> None:
    """Places in memory, once for each value of the sizes; and the program's statements but the last."""
    listing = text.listing
    (function,) = ast.parse(listing.source).body
    assert isinstance(function, ast.FunctionDef)
    for arg, slot in zip(function.args.args, slots, strict=True):
        (steps.numbers if type(slot) is SizePlace else steps.slots)[arg.arg] = slot
    if listing.layout:
        _lay_out(steps, text)
    else:
        steps.step("block", listing.scratch_size)
    for name, (_, start, inside, _, ref) in listing.scratch.items():
        sizes = steps.sizes(ref.shape), steps.sizes(ref.stride)
        steps.step("scratch", steps.slot(name), start + inside, *layout(*sizes, ref.dtype))
    for name, (position, ref, spec) in listing.bound.items():
        dtype = None if ref.dtype is spec.dtype else ref.dtype
        sizes = steps.sizes(ref.shape), steps.sizes(ref.stride)
        steps.slots[name] = steps.view(slots[position], dtype, *sizes, int(ref.offset))
    steps.step("run")
    *statements, text.last = function.body
    for statement in statements:
        text.line(statement)


def _lay_out(steps: Steps, text: _Text) -> None:
    """The steps of `Writer.layout`: places that depend on sizes."""
    (function,) = ast.parse(text.listing.layout).body
    returned = checked(ast.Return, checked(ast.FunctionDef, function).body[-1])
    nbytes, places, results = checked(ast.Tuple, returned.value).elts
    steps.step("block", text.value(nbytes))
    for key, place in _items(places):
        slot = steps.slot(key)
        if isinstance(place, ast.Tuple):
            offset, shape, stride, dtype = map(text.value, place.elts)
            steps.step("scratch", slot, offset, *layout(shape, stride, dtype))
        else:  # kernels take its address alone
            steps.step("scratch", slot, text.value(place), *layout((), (), torch.uint8))
    text.sized = {key: text.value(sizes) for key, sizes in _items(results)}


def _items(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The items of a dict's text."""
    table = checked(ast.Dict, node)
    for key, value in zip(table.keys, table.values, strict=True):
        yield str(checked(ast.Constant, key).value), value


def _result(
    steps: Steps, text: _Text, plan: OutputPlan, built: Built, slots: Sequence[Any], out: Any
) -> Register:
    """The slot of an output of the graph, with its own layout: it may be a view of an input, or of another
    result.
    """
    assert isinstance(text.last, ast.Return) and isinstance(text.last.value, ast.Tuple)
    NotFlat.when(plan.kind == "constant", "a result that its graph does not compute")
    if plan.kind == "input":
        if not plan.steps:
            return checked(Register, slots[plan.index])
        base = built.inputs[plan.index]
        NotFlat.when(base.dtype is not out.dtype, "a result that is a view of another dtype")
        if steps.numbers:
            return _view(steps, slots[plan.index], built.specs[plan.index], plan, built, out)
        offset = out.storage_offset() - base.storage_offset()
        return steps.view(slots[plan.index], None, out.shape, out.stride(), offset)
    expression = text.last.value.elts[plan.index]
    slot = text.value(expression)
    if type(slot) is not Register or plan.steps and isinstance(expression, ast.Call):
        raise NotFlat(f"the result {ast.unparse(expression)}")
    if plan.steps and steps.numbers:
        spec = text.spec_of(checked(ast.Name, expression).id, built.env)
        return _view(steps, slot, spec, plan, built, out)
    if plan.steps:
        slot = steps.view(slot, out.dtype, out.shape, out.stride(), out.storage_offset())
    return slot


def _view(
    steps: Steps, base: Register, spec: TensorSpec, plan: OutputPlan, built: Built, out: torch.Tensor
) -> Register:
    """The slot of a view whose sizes differ between calls: its ops' rules give them, as at the capture."""
    start, asked = spec.offset, len(built.env.guards)
    found: Any = spec  # or several, of which a step takes one
    for op, args, kwargs, _ in plan.steps:
        found = (
            infer_spec(op, (found, *args), kwargs) if isinstance(op, compat.OpOverload) else op(found, *args)
        )
    spec = checked(TensorSpec, found)
    for guard in built.env.guards[asked:]:
        steps.step("holds", guard.kind, steps.size(guard.expr), guard, "does not hold")
    offset = spec.offset - start
    NotFlat.when(
        [*map(hint, (*spec.shape, *spec.stride))] != [*out.shape, *out.stride()]
        or spec.dtype is not out.dtype,
        "a result that is a view of another layout",
    )
    sizes = steps.sizes(spec.shape), steps.sizes(spec.stride)
    return steps.view(base, spec.dtype, *sizes, steps.size(offset))
