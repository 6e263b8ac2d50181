"""An element of a tensor as a formula of its indices: the graph is read from the element backwards.

Masks are made of aranges, comparisons and logic; views only move indices. What no rule knows stays a read of
that tensor, if its values are integers or conditions; else there is no formula.

>>> Formulas().value(mask, (b, h, q, k))
q - k >= 0
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.registry import Registry, register_all
from .index_formulas import (
    CONDITIONS,
    Affine,
    Condition,
    Magnitude,
    NoFormula,
    Position,
    Read,
    affine,
    at_least,
    atoms,
    both,
    either,
    is_zero,
    negated,
    replaced,
)
from .sizes import Size, equal, known
from .spec import TensorSpec

Node = torch.fx.Node
At = tuple[Affine, ...]
_WHOLE = (torch.int64, torch.int32)  # narrower ones wrap around


@dataclass(frozen=True)
class Choice:
    """One of two values."""

    condition: Condition
    yes: Any
    no: Any


# One row an op, by the name that torch, its tensors and `operator` call it: (formulas, node, index) -> value.
formula_rules: Registry[str, Callable[[Formulas, Node, At], Any]] = Registry("formula")
rule = formula_rules.register
_VIEWS = frozenset(
    [
        "expand",
        "broadcast_to",
        "unsqueeze",
        "transpose",
        "permute",
        "view",
        "reshape",
        "flatten",
        "getitem",
        "repeat_interleave",
    ]
)
_CONVERSIONS = frozenset(
    [
        "to",
        "bool",
        "int",
        "long",
        "float",
        "half",
        "bfloat16",
        "double",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "cuda",
        "cpu",
    ]
)
_LIBRARIES = (torch, operator, torch.nn.functional)


class Formulas:
    """The formulas of a graph's tensors. views: only the ways of views are followed, to elements of any type.
    `visited`: the nodes that rules looked into since it was emptied.
    """

    def __init__(self, views: bool = False) -> None:
        self.views = views
        self._known: dict[Any, tuple[Any, frozenset[Node]]] = {}
        self.visited: set[Node] = set()

    def value(self, node: Node, at: Sequence[Affine]) -> Any:
        """The element there: an Affine sum, a condition, a float or a Choice. Raises NoFormula."""
        spec = node.meta.get("val")
        if type(spec) is not TensorSpec:
            raise NoFormula
        place = tuple(
            [affine(0) if type(n) is int and n == 1 else i for i, n in zip(at, spec.shape, strict=True)]
        )
        if (node, place) not in self._known:
            outer, self.visited = self.visited, {node}
            try:
                found = self._by_rule(node, spec, place)
            except NoFormula:
                if spec.dtype not in (torch.bool, *_WHOLE) and not self.views:
                    raise
                self.visited = set()
                found = Read(node, place) if self.views else _read(node, spec, place)
            finally:
                seen, self.visited = self.visited, outer
            self._known[node, place] = found, frozenset(seen)
        found, seen_before = self._known[node, place]
        self.visited |= seen_before
        return found

    def _by_rule(self, node: Node, spec: TensorSpec, at: At) -> Any:
        name = name_of(node)
        found = formula_rules.get(name)
        if (
            found is None
            or self.views
            and name not in _VIEWS
            or any(key in node.kwargs for key in ("out", "generator"))
        ):
            raise NoFormula
        try:
            value = found(self, node, at)
            return value if self.views else _as_type(value, spec.dtype)
        except (TypeError, ValueError, IndexError, AssertionError, RecursionError):
            raise NoFormula from None  # arguments of a kind that no rule expects

    def operand(self, item: Any, at: At) -> Any:
        """An operand of a pointwise op, of which the result's element is wanted."""
        if isinstance(item, Node) and type(item.meta.get("val")) is TensorSpec:
            rank = len(item.meta["val"].shape)
            return self.value(item, at[len(at) - rank :])
        return _number(item)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument, given by place or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def source(node: Node) -> tuple[Node, TensorSpec]:
    """The tensor that a view or conversion takes first, and its spec."""
    first = node.args[0]
    assert isinstance(first, Node) and type(first.meta.get("val")) is TensorSpec
    return first, first.meta["val"]


def name_of(node: Node) -> str:
    """What torch, its tensors or `operator` call the function of a node; "" for others."""
    if node.op == "call_method":
        name = str(node.target)
        return name[2:-2] if name.startswith("__") else name
    name = getattr(node.target, "__name__", "")
    known_as = [getattr(library, name, None) for library in _LIBRARIES] if node.op == "call_function" else []
    return name if node.target in known_as else ""


def _read(node: Node, spec: TensorSpec, at: At) -> Any:
    condition = spec.dtype is torch.bool
    found = affine(Read(node, at, condition))
    return at_least(found - 1) if condition else found


def _number(item: Any) -> Any:
    value = item.meta.get("val") if isinstance(item, Node) else item
    if type(value) in (bool, float):
        return value
    if type(value) in (int, Size):
        return affine(value)
    raise NoFormula


def _leafwise(function: Callable[..., Any], *values: Any) -> Any:
    """A function of values, inside of choices."""
    for place, value in enumerate(values):
        if type(value) is Choice:
            yes, no = [
                _leafwise(function, *values[:place], side, *values[place + 1 :])
                for side in (value.yes, value.no)
            ]
            return _choice(value.condition, yes, no)
    return function(*values)


def _choice(condition: Condition, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    if isinstance(yes, CONDITIONS) and isinstance(no, CONDITIONS):
        return either(both(condition, yes), both(negated(condition), no))
    return yes if type(yes) is type(no) and yes == no else Choice(condition, yes, no)


def _as_number(value: Any) -> Any:
    """Conditions as 0 and 1."""
    return _choice(value, affine(1), affine(0)) if isinstance(value, CONDITIONS) else value


def _as_float(value: Any) -> float:
    if type(value) is Affine:
        if value.terms:
            raise NoFormula
        return float(value.constant)
    return value


def _as_type(value: Any, dtype: torch.dtype) -> Any:
    """A value converted to the type of its tensor's elements."""
    if dtype is torch.bool:
        return _leafwise(_truth, value)
    if dtype in _WHOLE:
        return _leafwise(_whole, _as_number(value))
    if not dtype.is_floating_point:
        raise NoFormula
    return _leafwise(lambda v: torch.tensor(_as_float(v), dtype=dtype).item(), _as_number(value))


def _truth(value: Any) -> Condition:
    if isinstance(value, CONDITIONS):
        return value
    return negated(is_zero(value)) if type(value) is Affine else value != 0.0


def _whole(value: Any) -> Affine:
    if type(value) is not Affine:
        raise NoFormula
    return value


# Arithmetic and comparisons ---------------------------------------------------------------------------------
def _pointwise(function: Callable[..., Any], count: int = 2) -> Callable[[Formulas, Node, At], Any]:
    def apply(f: Formulas, node: Node, at: At) -> Any:
        if len(node.args) != count or node.kwargs:
            raise NoFormula  # alpha, rounding_mode
        operands = [_as_number(f.operand(arg, at)) for arg in _rounded(node.args)]
        if node.meta["val"].dtype.is_floating_point and any(_narrower(node, arg) for arg in node.args):
            raise NoFormula
        return _leafwise(function, *operands)

    return apply


def _rounded(args: Sequence[Any]) -> list[Any]:
    """The operands; a float beside a tensor of floats is rounded to its type."""
    specs = [arg.meta.get("val") if isinstance(arg, Node) else None for arg in args]
    dtypes = {s.dtype for s in specs if type(s) is TensorSpec and s.dtype.is_floating_point}
    if len(dtypes) != 1:
        return list(args)
    (dtype,) = dtypes
    return [torch.tensor(arg, dtype=dtype).item() if type(arg) is float else arg for arg in args]


def _narrower(node: Node, arg: Any) -> bool:
    """Whether an operand of a float op is of another float type, whose rounding would count."""
    spec = arg.meta.get("val") if isinstance(arg, Node) else None
    return type(spec) is TensorSpec and spec.dtype.is_floating_point and spec.dtype != node.meta["val"].dtype


def _arithmetic(of_sums: Callable[..., Any], of_floats: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        if all(type(v) is Affine for v in values):
            return of_sums(*values)
        return of_floats(*map(_as_float, values))

    return apply


def _product(a: Affine, b: Affine) -> Affine:
    if a.terms and b.terms:
        raise NoFormula
    return a.times(b.constant) if not b.terms else b.times(a.constant)


def _divided(place: int) -> Callable[[Affine, Affine], Affine]:
    def apply(a: Affine, b: Affine) -> Affine:
        if b.terms or b.constant <= 0:
            raise NoFormula
        return a.divided(b.constant)[place]

    return apply


def _magnitude(a: Affine) -> Affine:
    low, high = a.ends()
    if low is not None and known(">=", low):
        return a
    return -a if high is not None and known(">=", -high) else affine(Magnitude(a))


def _no_floats(*_: float) -> float:
    raise NoFormula


def _whole_only(function: Callable[..., Any]) -> Callable[[Formulas, Node, At], Any]:
    return _pointwise(_arithmetic(function, _no_floats))


def _logic(function: Callable[..., Any], count: int = 2) -> Callable[[Formulas, Node, At], Any]:
    def apply(f: Formulas, node: Node, at: At) -> Any:
        specs = [arg.meta.get("val") if isinstance(arg, Node) else arg for arg in node.args]
        if len(specs) != count or any(
            getattr(spec, "dtype", torch.bool if type(spec) is bool else None) is not torch.bool
            for spec in specs
        ):
            raise NoFormula  # bitwise ops on numbers
        return _leafwise(function, *[f.operand(arg, at) for arg in node.args])

    return apply


def _negative(f: Formulas, node: Node, at: At) -> Any:
    return _pointwise(_arithmetic(operator.neg, operator.neg), 1)(f, node, at)


register_all(
    rule,
    [
        (("add", "radd"), _pointwise(_arithmetic(operator.add, operator.add))),
        (("sub", "subtract"), _pointwise(_arithmetic(operator.sub, operator.sub))),
        (("rsub",), _pointwise(_arithmetic(lambda a, b: b - a, lambda a, b: b - a))),
        (("mul", "multiply", "rmul"), _pointwise(_arithmetic(_product, operator.mul))),
        (("floordiv", "floor_divide"), _whole_only(_divided(0))),
        (("mod", "remainder"), _whole_only(_divided(1))),
        (("neg", "negative"), _negative),
        (("abs", "absolute"), _pointwise(_arithmetic(_magnitude, abs), 1)),
        (("ge", "greater_equal"), _pointwise(_arithmetic(lambda a, b: at_least(a - b), operator.ge))),
        (("gt", "greater"), _pointwise(_arithmetic(lambda a, b: at_least(a - b - 1), operator.gt))),
        (("le", "less_equal"), _pointwise(_arithmetic(lambda a, b: at_least(b - a), operator.le))),
        (("lt", "less"), _pointwise(_arithmetic(lambda a, b: at_least(b - a - 1), operator.lt))),
        (("eq",), _pointwise(_arithmetic(lambda a, b: is_zero(a - b), operator.eq))),
        (("ne", "not_equal"), _pointwise(_arithmetic(lambda a, b: negated(is_zero(a - b)), operator.ne))),
        (("and_", "and", "bitwise_and", "logical_and"), _logic(both)),
        (("or_", "or", "bitwise_or", "logical_or"), _logic(either)),
        (("invert", "bitwise_not", "logical_not"), _logic(negated, 1)),
    ],
)


@rule("where")
def _where(f: Formulas, node: Node, at: At) -> Any:
    condition, yes, no = [f.operand(arg, at) for arg in node.args]
    return _choice(condition, yes, no)


@rule("masked_fill")
def _masked_fill(f: Formulas, node: Node, at: At) -> Any:
    kept, condition, filled = [f.operand(arg, at) for arg in node.args]
    return _choice(condition, filled, kept)


def _triangle(sign: int) -> Callable[[Formulas, Node, At], Any]:
    def apply(f: Formulas, node: Node, at: At) -> Any:
        inside = affine(_number(argument(node, 1, "diagonal", 0))) + at[-2] - at[-1]
        kept = f.value(source(node)[0], at)
        zero = False if isinstance(kept, CONDITIONS) else _as_type(affine(0), node.meta["val"].dtype)
        return _choice(at_least(inside.times(sign)), kept, zero)

    return apply


register_all(rule, [(("tril",), _triangle(1)), (("triu",), _triangle(-1))])


# Made of nothing --------------------------------------------------------------------------------------------
@rule("arange")
def _arange(f: Formulas, node: Node, at: At) -> Any:
    given = [_number(arg) for arg in node.args]
    if any(type(v) is not Affine for v in given) or {"start", "end", "step"} & node.kwargs.keys():
        raise NoFormula
    start, step = given[0] if len(given) > 1 else affine(0), given[2] if len(given) > 2 else affine(1)
    return start + _product(step, at[0])


register_all(
    rule,
    [
        (("ones", "ones_like", "new_ones"), lambda f, node, at: affine(1)),
        (("zeros", "zeros_like", "new_zeros"), lambda f, node, at: affine(0)),
        (("full", "full_like", "new_full"), lambda f, node, at: _number(_filling(node))),
        (("scalar_tensor", "tensor"), lambda f, node, at: _number(node.args[0])),
    ],
)


def _filling(node: Node) -> Any:
    return argument(node, 2 if node.target == "new_full" else 1, "fill_value")


# Conversions and views --------------------------------------------------------------------------------------
@rule(*_CONVERSIONS)
def _same(f: Formulas, node: Node, at: At) -> Any:
    return f.value(source(node)[0], at)


@rule("expand", "expand_as", "broadcast_to")
def _expand(f: Formulas, node: Node, at: At) -> Any:
    first, spec = source(node)
    return f.value(first, at[len(at) - len(spec.shape) :])


@rule("unsqueeze")
def _unsqueeze(f: Formulas, node: Node, at: At) -> Any:
    dim = argument(node, 1, "dim") % len(at)
    return f.value(source(node)[0], at[:dim] + at[dim + 1 :])


@rule("transpose", "swapaxes", "t")
def _transpose(f: Formulas, node: Node, at: At) -> Any:
    first, second = (argument(node, 1, "dim0", 0), argument(node, 2, "dim1", 1)) if len(at) > 1 else (0, 0)
    moved = list(at)
    moved[first], moved[second] = at[second], at[first]
    return f.value(source(node)[0], moved)


@rule("permute")
def _permute(f: Formulas, node: Node, at: At) -> Any:
    dims: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    moved = dict(zip([dim % len(at) for dim in dims], at, strict=True))
    return f.value(source(node)[0], [moved[d] for d in range(len(at))])


@rule("view", "reshape", "flatten", "unflatten", "squeeze")
def _reshape(f: Formulas, node: Node, at: At) -> Any:
    first, spec = source(node)
    if node.target == "view" and any(isinstance(arg, torch.dtype) for arg in node.args):
        raise NoFormula
    have, want = spec.shape, node.meta["val"].shape
    found: list[Affine] = []
    i = j = 0
    while i < len(have) or j < len(want):
        if i < len(have) and j < len(want) and equal(have[i], want[j]):
            found.append(at[j])
            i, j = i + 1, j + 1
            continue
        i, j, places = _regrouped(have, want, at, i, j)
        found += places
    return f.value(first, found)


def _regrouped(have: Any, want: Any, at: At, i: int, j: int) -> tuple[int, int, list[Affine]]:
    """The indices of dimensions of plain numbers from i on that others from j on are made of."""
    first, product_have, product_want = i, 1, 1
    linear = affine(0)
    while i == first or product_have != product_want:
        grow_have = i < len(have) and (product_have <= product_want or j >= len(want))
        n = have[i] if grow_have else want[j]
        if type(n) is not int or n == 0:
            raise NoFormula
        if grow_have:
            i, product_have = i + 1, product_have * n
        else:
            linear = linear.times(n) + at[j]
            j, product_want = j + 1, product_want * n
        if i == len(have) and j == len(want):
            break
    places: list[Affine] = []
    for n in reversed(have[first:i]):
        linear, place = linear.divided(n)
        places.append(place)
    return i, j, places[::-1]


@rule("getitem")
def _getitem(f: Formulas, node: Node, at: At) -> Any:
    first, spec = source(node)
    items: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    used = sum(item is not None and item is not Ellipsis for item in items)
    rest = (slice(None),) * (len(spec.shape) - used)
    spread = [k for k, item in enumerate(items) if item is Ellipsis] or [len(items)]
    items = (*items[: spread[0]], *rest, *items[spread[0] + 1 :])
    tensors = [k for k, item in enumerate(items) if _is_tensor(item)]
    ranks = [len(items[k].meta["val"].shape) for k in tensors]
    rank = max(ranks, default=0)
    apart = bool(tensors) and tensors[-1] - tensors[0] >= len(tensors)
    numbers = any(type(item) in (int, Size) for item in items)
    if tensors and (numbers or any(items[k].meta["val"].dtype not in _WHOLE for k in tensors)):
        raise NoFormula
    given = list(at)
    gathered = tuple(given[:rank]) if apart else ()
    given = given[rank:] if apart else given
    found: list[Affine] = []
    for item in items:
        size = spec.shape[len(found)] if item is not None else 1
        if item is None:
            given.pop(0)
        elif _is_tensor(item):
            if not apart and item is items[tensors[0]] and not gathered:
                gathered, given = tuple(given[:rank]), given[rank:]
            found.append(_within(f.operand(item, gathered), size))
        elif isinstance(item, slice):
            found.append(_sliced(item, size, given.pop(0)))
        else:
            found.append(_within(_from_end(_number(item), size), size))
    return f.value(first, found)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, Node) and type(item.meta.get("val")) is TensorSpec


def _sliced(item: slice, size: Any, index: Affine) -> Affine:
    step = 1 if item.step is None else item.step
    if type(step) is not int or step < 1:
        raise NoFormula
    start = affine(0) if item.start is None else _from_end(_number(item.start), size)
    return start + index.times(step)


def _from_end(index: Affine, size: Any) -> Affine:
    """A start or place that may count from the end; starts beyond an end are clamped, and have no formula."""
    if not index.terms and index.constant < 0:
        index = affine(size) + index
    low, high = index.ends()
    if low is None or high is None or not known(">=", low) or not known(">=", size - high):
        raise NoFormula
    return index


def _within(index: Any, size: Any) -> Affine:
    """An index that is provably one of the dimension, counted from its start."""
    if type(index) is not Affine:
        raise NoFormula
    low, high = index.ends()
    if low is None or high is None or not known(">=", low) or not known(">=", size - 1 - high):
        raise NoFormula
    return index


@rule("repeat_interleave")
def _repeat_interleave(f: Formulas, node: Node, at: At) -> Any:
    count, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
    if type(count) is not int or count < 1 or dim is None and len(source(node)[1].shape) != 1:
        raise NoFormula
    dim = 0 if dim is None else dim % len(at)
    return f.value(source(node)[0], [i.divided(count)[0] if d == dim else i for d, i in enumerate(at)])


@rule("repeat")
def _repeat(f: Formulas, node: Node, at: At) -> Any:
    first, spec = source(node)
    below = at[len(at) - len(spec.shape) :]
    return f.value(
        first, [_modulo(i, n, m) for i, n, m in zip(below, spec.shape, _sizes(node, below), strict=True)]
    )


def _sizes(node: Node, at: At) -> Any:
    shape = node.meta["val"].shape
    return shape[len(shape) - len(at) :]


def _modulo(index: Affine, size: Any, of: Any) -> Affine:
    if equal(size, of):
        return index
    if type(size) is not int or size < 1:
        raise NoFormula
    return index.divided(size)[1]


# Along a dimension ------------------------------------------------------------------------------------------
@rule("cumsum")
def _cumsum(f: Formulas, node: Node, at: At) -> Any:
    """Of elements that are all the same number."""
    first, spec = source(node)
    dim = argument(node, 1, "dim") % len(at)
    one = _one_of(spec.shape[dim])
    each = _as_number(f.value(first, [affine(one) if d == dim else i for d, i in enumerate(at)]))
    if type(each) is not Affine or each.terms:
        raise NoFormula
    return (at[dim] + 1).times(each.constant)


@rule("diff")
def _diff(f: Formulas, node: Node, at: At) -> Any:
    """Of a tensor with one element before it that is what its formula gives for the index -1."""
    first, spec = source(node)
    dim = argument(node, 2, "dim", -1) % len(at)
    before: Any = node.kwargs.get("prepend")
    if (
        argument(node, 1, "n", 1) != 1
        or not _is_tensor(before)
        or "append" in node.kwargs
        or len(node.args) > 3
    ):
        raise NoFormula
    one = _one_of(spec.shape[dim])

    def along(tensor: Any, index: Affine) -> Any:
        return f.value(tensor, [index if d == dim else i for d, i in enumerate(at)])

    here, previous, start = (
        along(first, affine(one)),
        along(first, affine(one) - 1),
        along(before, affine(0)),
    )
    reads = [atom for atom in atoms(previous) if type(atom) is Read]
    if (
        not all(type(v) is Affine for v in (here, previous, start))
        or type(before.meta["val"].shape[dim]) is not int
        or before.meta["val"].shape[dim] != 1
        or any(one in atoms(i) for read in reads for i in read.at)
        or replaced(previous, {one: affine(0)}) != start
    ):
        raise NoFormula
    return replaced(here - previous, {one: at[dim]})


def _one_of(size: Any) -> Position:
    return Position("one", size)
