"""One definition per op: the rules that graphs need before an op is lowered, written in `ops/<family>.py`.

An `OpDefinition` holds one rule per facet. A rule takes the op's arguments with a `TensorSpec` in the place
of each tensor. Sizes are ints or `Size`s: rules add, compare and divide them in the same way, and a
comparison of `Size`s becomes a guard. So a shape is written once for static and for dynamic shapes.

>>> @shape(aten.mv.default, layout=row_major)
... def _matrix_vector_shape(a, b):
...     require(a.shape[1] == b.shape[0])
...     return a.shape[:1]
>>> define(aten.addr.default, shape=lambda x, a, b: broadcast([x.shape, (*a.shape, *b.shape)]))
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.compat import OpOverload
from ..base.registry import Registry
from .sizes import Size
from .spec import TensorSpec

Rule = Callable[..., Any]
Shape = tuple[Any, ...]
PASS = object()  # a layout rule returns it to leave a case to the meta kernel


class Unknown(Exception):
    """The rule has no answer for these arguments."""


@dataclass(slots=True)
class OpDefinition:
    """The rules of an op; None where the op needs none.

    shape: the shape of each result (one shape, or a list of them), or whole specs for views. Without it,
        dynamic sizes go through PyTorch's meta kernel, or are specialised.
    requires: conditions on sizes that the kernel checks and the result's shape does not show.
    layout: the results as eager's kernels give them for plain sizes: shape, strides and dtype. Without it
        PyTorch's meta kernel answers, or TensorIterator's rule for pointwise ops. `PASS` asks the meta
        kernel.
    contiguous: as `layout`, asked before it where all tensors are row-major on one device and have elements.
        PyTorch's meta kernels are Python: their first call imports sympy and torch._dynamo, which takes
        seconds.
    sizes_from_data: the results of an op whose sizes depend on data, with new unbacked symbols.
    padding: how the op treats padded dimensions: the new node and the axes of its results
        (`bucket_padding.py`).
    """

    shape: Rule | None = None
    requires: Rule | None = None
    layout: Rule | None = None
    contiguous: Rule | None = None
    sizes_from_data: Rule | None = None
    padding: Rule | None = None


_UNDEFINED = OpDefinition()
definitions: dict[Any, OpDefinition] = {}


def definition(op: Any) -> OpDefinition:
    """The definition of an op; one without rules where no family file names the op."""
    return definitions.get(op, _UNDEFINED)


@dataclass(frozen=True, slots=True)
class TakesOp:
    """A rule of several ops that takes the op before the op's arguments."""

    rule: Rule


def define(*ops: Any, **rules: Rule | TakesOp) -> None:
    """Add rules, named by facet, to the definition of each op. Two rules for one facet raise KeyError."""
    for op in ops:
        known = definitions.setdefault(op, OpDefinition())
        for facet, rule in rules.items():
            if getattr(known, facet) is not None:
                raise KeyError(f"{op} has two rules of {facet!r}")
            setattr(known, facet, functools.partial(rule.rule, op) if type(rule) is TakesOp else rule)


def _facet(name: str) -> Callable[..., Callable[[Any], Any]]:
    """A decorator `@name(*ops, **rules)` that makes a function the rule of these ops, beside other rules."""

    def for_ops(*ops: Any, **rules: Any) -> Callable[[Any], Any]:
        def add(rule: Any) -> Any:
            define(*ops, **{name: rule}, **rules)
            return rule

        return add

    return for_ops


shape = _facet("shape")
requires = _facet("requires")
layout = _facet("layout")
contiguous = _facet("contiguous")
sizes_from_data = _facet("sizes_from_data")
padding = _facet("padding")

# Checks of arguments that eager's kernels make and shapes do not show (`kernel_checks.py`), by the name that
# all overloads of an op share, the writing ones too. `question`: the way in which the kernel is asked, None
# where it is not.
checks: Registry[str, Rule] = Registry("check")
questions: Registry[str, Rule | None] = Registry("question to a kernel")
check = checks.register
question = questions.register


# Words of rules ---------------------------------------------------------------------------------------------
def shapes_of(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """The answer of the op's `shape` rule."""
    rule = definitions[op].shape
    assert rule is not None
    return rule(*args, **kwargs)


def shape_of_argument(position: int) -> Rule:
    """The rule of results that have an argument's shape."""
    return lambda *args, **kwargs: args[position].shape


def operands(args: Any) -> list[Shape]:
    """The shapes of the tensors among the arguments."""
    return [arg.shape for arg in args if type(arg) is TensorSpec]


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that these shapes are expanded to."""
    result = []
    for sizes in itertools.zip_longest(*[reversed(shape) for shape in shapes], fillvalue=1):
        found: Any = 1
        for size in sizes:
            if type(found) is int and found == 1:
                found = size
            elif not (type(size) is int and size == 1):
                require(size == found)
                found = found if type(found) is int else size
        result.append(found)
    return tuple(reversed(result))


def require(condition: bool) -> None:
    """Raise Unknown unless the condition holds. Computing a condition on `Size`s made it a guard."""
    if not condition:
        raise Unknown


def require_equal(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Require that two shapes are equal."""
    require(len(a) == len(b) and all(m == n for m, n in zip(a, b)))


def require_fits(shape: Shape, into: Shape) -> None:
    """Require that `shape` can be expanded to `into`."""
    require_equal(broadcast([shape, into]), into)


def require_channels(n: Any, *parameters: Any) -> None:
    """Require that weights, biases and statistics have one number per channel."""
    for one in parameters:
        if type(one) is TensorSpec:
            require_equal(one.shape, (n,))


def require_numbers(*args: Any, **kwargs: Any) -> None:
    """Make the sizes of the arguments numbers: each is guarded to be equal to its hint."""
    for one in args:
        for n in (*one.shape, *one.stride) if type(one) is TensorSpec else [one] if type(one) is Size else ():
            int(n)
