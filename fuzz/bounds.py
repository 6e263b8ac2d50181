"""How far rounding alone can move a result: eager runs again with each aten result moved about a little.

A compiler that is right gives other roundings than eager, so values that hang on them (a difference of equal
numbers, a comparison of two sums) may differ. Where these agree and the compiled one does not, it is wrong.

>>> with Jiggle(seed=1):
...     f(*inputs)
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dynamotor.graph.op_facts import facts

from .compare import AROUND, PLACES, UNROUNDED, Outcome
from .place import extent

RUNS = range(10)
SUMS_ALONE = 50  # the seed for which sums are exact, rounded once, and all else is eager's
_UNIT = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_HALVES = (torch.bfloat16, torch.float16)
# Reductions that return a NaN made by their kernel where an element is NaN.
_EXTREMES = tuple(getattr(torch.ops.aten, name) for name in ("max", "min", "amax", "amin", "aminmax"))
_SUMS = (torch.ops.aten.sum, torch.ops.aten.mean)
_TOTALS = (
    torch.ops.aten.sum,
    torch.ops.aten.cumsum,
)  # of unrounded halves (aten rounds means again): they may cancel
_PRODUCTS = (torch.ops.aten.prod, torch.ops.aten.cumprod)
# No rounding leads beyond 1, where their results meet.
_AT_MOST_ONE = tuple(
    getattr(torch.ops.aten, name) for name in ("tanh", "sigmoid", "erf", "sin", "cos", "_softmax")
)


def _lerp(x: Any, y: Any, weight: float) -> Any:
    return x + weight * (y - x) if weight < 0.5 else y - (y - x) * (1 - weight)


_STEPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.addcmul.default: lambda x, a, b, value=1: x + value * a * b,
    torch.ops.aten.add.Tensor: lambda x, y, alpha=1: x + y * alpha,
    torch.ops.aten.sub.Tensor: lambda x, y, alpha=1: x - y * alpha,
    torch.ops.aten.lerp.Scalar: _lerp,
}
# Ops whose exact results on simple numbers say nothing: others compute them by another formula.
_ROUGH = (
    "norm",
    "var",
    "std",
    "softmax",
    "logsumexp",
    "logcumsumexp",
    "mean",
    "nll",
    "div",
    "attention",
    "upsample",
    "gelu",  # of an infinity: NaN or infinity depending on the layout in memory
)


class Jiggle(TorchDispatchMode):
    """Moves the float result of each op that rounds, as if its operands had been rounded otherwise.

    Seed 0 also hands each op row-major operands, seed 1 ones with holes between elements (eager's loops take
    those one by one), and seed 2 gives exact results, rounded once: where eager then gives something else
    (the gradients of `hardshrink` at NaN and of `instance_norm` are such), it has no meaning. Seed
    3 computes maps in vectors: the gradient of `hardtanh` at NaN is 0 in a vector and what came in behind the
    last full one; and convolutions over channels-last images, since it depends on the layout whether NaN meets
    the padding. Even seeds from 4 on compute norms and softmax by their formulas, each step of which is rounded, seed 4 with
    no noise: a mean may be one of its numbers. Odd ones from 5 on
    move the results of some ops only: where one op's noise makes what follows less steep (equal numbers in a
    norm), another's is seen; each op has a layout of its own; and where infinities meet in a norm, each element gets a
    sign of its own. Seeds from 10 on add up in another order; seed 50 gives exact sums and leaves all else as it is.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.row_major = seed == 0
        self.relaid = {0: _row_major, 1: _apart, 3: _lanes}.get(seed)
        self.exact = seed == 2
        self.in_steps = seed > 3 and seed % 2 == 0
        self.plain = seed == 4
        self.some = seed > 3 and seed % 2 == 1
        self.made: set[int] = set()  # addresses of results that ops have rounded
        self.in_any_order = seed >= len(RUNS)
        self.sums_alone = seed == SUMS_ALONE
        self.by = 0.5 if seed >= len(RUNS) and seed % 4 < 2 else 4.0  # little noise: two numbers become equal
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if (
            is_view
            or not (_rounds(func) or _narrows(args))
            or any(t.is_meta or t._is_zerotensor() for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        ):
            result = func(*args, **kwargs)  # zeros without memory are calculated with as meta tensors
            if not is_view and self._sees_halves(args):  # their absolutes are rounded as they are
                self._note(result)
            if func.overloadpacket in _EXTREMES:
                for one in tree_leaves(result):
                    self._sign(one)
            return result
        if self.some:  # one op's gradient at NaN may be a vector's, another's a scalar's
            self.relaid = (None, None, _apart, _lanes)[self._drawn(4)]
            if self.relaid is not _lanes and self._drawn(2):
                return self._result(func, args, kwargs)
        if self.relaid is _lanes:
            if "convolution" in func.__name__:
                return _channels_last(func, args, kwargs)
            return _in_vectors(func, args, kwargs) if facts(func).pointwise else func(*args, **kwargs)
        if self.plain and self._formula(func, args, kwargs) is func:
            return func(*args, **kwargs)
        exact = self._wide(func, args, kwargs, 0.0)
        if self.sums_alone:
            result = func(*args, **kwargs)
            return result.copy_(exact[0]) if exact and func.overloadpacket in _SUMS else result
        moved = self._wide(func, args, kwargs, self.by) if exact is not None else None
        result = self._result(func, args, kwargs)
        if self.in_steps and self._formula(func, args, kwargs) is not func:
            with self:
                return self._formula(func, args, kwargs)(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        self._note(results)
        rough = any(name in func.__name__ for name in _ROUGH)
        if exact is None:
            for one in results:
                self._move(one, None)
        else:
            alike = all(_same(r, e) for r, e in zip(results, exact, strict=True))
            alike &= facts(func).pointwise or _sums_exactly(tree_leaves(args))
            if not alike or rough or self._sees_halves(args):
                for one, other in zip(results, exact if self.exact else moved, strict=True):
                    self._move(one, other)
            if func.overloadpacket in _AT_MOST_ONE and result.is_floating_point():
                result.clamp_(-1, 1)
            if func.overloadpacket in _SUMS and self.in_any_order:
                self._add_in_another_order(result, args[0], func(*tree_map(_magnitude, args), **kwargs))
            if func.overloadpacket in _PRODUCTS:  # it depends on the order whether infinity meets a zero
                if self.row_major:  # and on the type of the steps, whether they vanish
                    kept = moved[0].clamp(-65504, 65504) if result.dtype is torch.float16 else moved[0]
                    result.copy_(torch.where(moved[0].isfinite(), kept, moved[0]))
                elif self.exact and _overflows(args[0]):
                    result.fill_(torch.nan)
        if rough and _infinite(args):
            self._meet(results)
        return result

    def _add_in_another_order(
        self, total: torch.Tensor, terms: torch.Tensor, magnitude: torch.Tensor
    ) -> None:
        """The roundings of a sum of n terms add up to some sqrt(n) of the last digit of their absolute values."""
        if total.dtype in (torch.float32, torch.float64) and magnitude.is_floating_point() and total.numel():
            digits = 2 * _UNIT[total.dtype] * math.sqrt(terms.numel() / total.numel())
            total += (digits * self._noise(magnitude.double()) * magnitude.double()).to(total.dtype)

    def _drawn(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator, device="cpu"))

    def _meet(self, results: Any) -> None:
        """Infinities among the operands: which of them meet, and when, is the formula's."""
        for one in (r for r in results if isinstance(r, torch.Tensor)):
            if self.relaid in (_row_major, _apart):
                one.nan_to_num_(torch.inf if self.row_major else -torch.inf, torch.inf, -torch.inf)
            elif self.exact:
                one.masked_fill_(one.isinf(), torch.nan)
            elif self.some:
                signs = torch.full_like(one, torch.inf).copysign(self._noise(one).to(one.dtype))
                one.copy_(torch.where(one.isnan(), signs, one))

    def _formula(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A norm as its formula, where it has one: `x - mean` of equal numbers is zero, or near it of either
        sign when the mean is rounded; kernels that compute `x * scale + shift` give the other. A product that
        is added, in two steps: eager's processor may round once. A softmax, whose sum eager rounds at each term.
        """
        if func in _STEPS:
            halves = any(a.dtype in _HALVES for a in tree_leaves(args) if isinstance(a, torch.Tensor))
            plain = not kwargs and func in (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
            return func if halves or plain else _STEPS[func]
        has_one = "norm" in func.__name__ or "softmax" in func.__name__
        return decomposition_table.get(func, func) if has_one else func

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op's result; where operands are relaid, that of the kernel that they then reach."""
        if func._schema.is_mutable or self.relaid is None:
            return func(*args, **kwargs)
        try:
            return func(*tree_map(self.relaid, args), **tree_map(self.relaid, kwargs))
        except RuntimeError:  # some ops take no tensors of this layout
            return func(*args, **kwargs)

    def _wide(self, func: Any, args: Any, kwargs: Any, by: float) -> list[Any] | None:
        """The results in float64, from operands moved by so many roundings; None when the op will not."""

        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
        digits = 2.0**-23 if torch.float32 in given else 2.0**-52  # operands are rounded to it first

        def widen(value: Any) -> Any:
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value.clone() if isinstance(value, torch.Tensor) else value
            wide = value.double().clone()
            if by:
                unit = by * (2.0**-23 if value.dtype is not torch.float64 else digits)
                if self._sees_halves(value):  # a use may see a half before it was rounded
                    unit = max(unit, _UNIT[value.dtype] / 2)
                wide *= 1 + unit * self._noise(wide)
            return wide if self.relaid is None else self.relaid(wide)

        if any(not v.is_floating_point for v in given):
            return None
        formula = self._formula(func, args, kwargs) if self.exact else func
        try:
            result = formula(*tree_map(widen, args), **tree_map(widen, kwargs))
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return None
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        dusty = formula is not func or "_mean" in func.__name__
        results = [_without_dust(r) for r in results] if dusty else results
        if self.exact and func.overloadpacket in _SUMS:
            results = [_cancelled(results[0], func(*tree_map(_magnitude, args), **kwargs))]
        if self.exact and func.overloadpacket in _TOTALS and self._sees_halves(args):
            unit = max(_UNIT[t.dtype] for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            squares = func(*tree_map(_squared, tree_map(widen, args)), **tree_map(widen, kwargs))
            results = [results[0].masked_fill(results[0].abs() <= 2 * unit * squares.sqrt(), 0)]
        narrow = any(
            r.dtype in _UNIT and r.dtype is not torch.float64 for r in results if isinstance(r, torch.Tensor)
        )
        return None if narrow else results  # of integers: rounded as the result itself is

    def _sees_halves(self, args: Any) -> bool:
        """Whether an operand is a half that an op has rounded: a compiler may go on with what it was
        before.
        """
        return not self.made.isdisjoint(_where_halves_lie(args))

    def _note(self, results: Any) -> None:
        self.made |= _where_halves_lie(results)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(like.shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return (drawn * 2 - 1).to(like.device)

    def _move(self, result: Any, towards: Any) -> None:
        """Write what another rounding might have given into the result."""
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not result.numel():
            return
        wide = result.double() if towards is None or towards.dtype is not torch.float64 else towards
        if not self.exact:
            least = torch.finfo(result.dtype).tiny  # below, digits have a fixed place
            wide = wide + 2 * _UNIT[result.dtype] * self._noise(wide) * wide.abs().clamp(min=least)
        moves = torch.isfinite(result)
        if (
            self.row_major and result.dtype is torch.float16
        ):  # a compiler may keep what overflows or vanishes there
            moves |= torch.isfinite(wide)
            lost = (wide != 0) & (wide.abs() < 2.0**-24)
            wide = torch.where(lost, wide.sign() * 2.0**-24, wide.clamp(-65504, 65504))
        result.copy_(torch.where(moves, wide, result.double()))
        self._sign(result)

    def _sign(self, result: Any) -> None:
        """The sign of a calculated NaN is undefined."""
        if (self.row_major or self.exact) and result.is_floating_point():
            result.masked_fill_(result.isnan(), math.copysign(math.nan, 1 if self.exact else -1))


def _where_halves_lie(values: Any) -> set[int]:
    return {
        value.untyped_storage().data_ptr()
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
        and value.dtype in _HALVES
        and value.layout is torch.strided
        and not value._is_zerotensor()  # it has no memory
    }


def _magnitude(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _squared(value: Any) -> Any:
    """A term's square; the root of their sum is how far the roundings of terms may move it."""
    return value.square() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _cancelled(total: Any, magnitude: torch.Tensor) -> Any:
    """A sum with zeros where its terms cancel so far that another order of additions may give zero."""
    if not total.is_floating_point() or not magnitude.is_floating_point():
        return total
    least = _UNIT[torch.float64 if magnitude.dtype is torch.float64 else torch.float32]
    bound = 2 * least * magnitude.double()
    return total.masked_fill((total.abs() <= bound) & bound.isfinite(), 0)


def _without_dust(exact: Any) -> Any:
    """A norm or a running mean in which what float64 has left of a difference of equal numbers is zero."""
    if not isinstance(exact, torch.Tensor) or not exact.numel():
        return exact
    return exact.masked_fill(exact.abs() < 2.0**-44 * exact.abs().nan_to_num(0, 0, 0).max(), 0)


def _rounds(func: Any) -> bool:
    """Whether an op computes: copies, comparisons and reads of positions give what they are given."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False  # it would draw other numbers the second time
    name = func.__name__.split(".")[0]
    return name != "index" and not name.startswith(
        (
            "copy",
            "clone",
            "detach",
            "index_select",
            "gather",
            "cat",
            "stack",
            "empty",
            "_efficientzerotensor",
            "zeros",
            "ones",
            "full",
            "fill",
            "where",
            "arange",
            "flip",
            "roll",
            "neg",
            "abs",
            "relu",
            "max",
            "min",
            "amax",
            "amin",
        )
    )


def _narrows(args: Any) -> bool:
    """Whether an operand of more digits is rounded to a half first, whatever the op does then."""
    types = {a.dtype for a in tree_leaves(args) if isinstance(a, torch.Tensor) and a.is_floating_point()}
    return len(types) > 1 and not types.isdisjoint(_HALVES)


def _row_major(value: Any) -> Any:
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.clone(memory_format=torch.contiguous_format) if dense else value


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return value
    return torch.stack([value, value], -1)[..., 0]


def _lanes(value: Any) -> Any:
    return (
        value.unsqueeze(-1).expand(*value.shape, 64).contiguous()
        if isinstance(value, torch.Tensor)
        else value
    )


def _in_vectors(func: Any, args: Any, kwargs: Any) -> Any:
    """A map's result as its kernel's vectors compute it, whatever the number of elements."""
    result = func(*tree_map(_lanes, args), **tree_map(_lanes, kwargs))
    first = tree_map(lambda r: r[..., 0].clone() if isinstance(r, torch.Tensor) else r, result)
    return args[0].copy_(first) if facts(func).writes == (0,) else first


def _channels_last(func: Any, args: Any, kwargs: Any) -> Any:
    """A convolution's results, laid out as ever, as the algorithm for images with channels last computes them."""

    def relaid(value: Any) -> Any:
        images = isinstance(value, torch.Tensor) and value.dim() > 2
        return value.movedim(1, -1).contiguous().movedim(-1, 1) if images else value

    results = func(*args, **kwargs)
    others = func(*tree_map(relaid, args), **tree_map(relaid, kwargs))
    for one, other in zip(tree_leaves(results), tree_leaves(others), strict=True):
        if isinstance(one, torch.Tensor):
            one.copy_(other)
    return results


def _infinite(args: Any) -> bool:
    return any(
        isinstance(a, torch.Tensor) and a.is_floating_point() and bool(a.isinf().any())
        for a in tree_leaves(args)
    )


def _overflows(factors: torch.Tensor) -> bool:
    """Whether some of the factors have a product beyond their type, whatever that of all is."""
    return bool(factors.is_floating_point() and factors.detach().abs().clamp(min=1).prod().isinf())


def _same(a: Any, b: Any) -> bool:
    """Whether a result has no more digits than its type holds; one of float64 with no more than float32 holds
    has none lost.
    """
    if not isinstance(a, torch.Tensor):
        return True
    known = a.detach().float() if a.dtype is torch.float64 else a.detach()
    return torch.equal(known.double(), b.detach().double())


def _sums_exactly(operands: list[Any]) -> bool:
    """Whether products of these operands can be added in any order without rounding: all their digits, counted
    from the last that is set, fit a type. Otherwise an exact result is luck.
    """
    floats = [
        v.detach() for v in operands if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel()
    ]
    if not floats:
        return True
    fits = 53 if any(v.dtype is torch.float64 for v in floats) else 24
    return sum(map(_digits, floats)) + math.log2(max(v.numel() for v in floats)) <= fits


def _digits(values: torch.Tensor) -> int:
    """The digits of the largest number, down to the last digit that any of them has."""
    wide = values.double().flatten()
    wide = wide[wide.isfinite() & (wide != 0)]
    if not wide.numel():
        return 0
    parts, powers = wide.frexp()
    whole = parts.ldexp(torch.tensor(53)).long()
    last = powers - 53 + (whole & -whole).double().log2().int()
    return int(powers.max() - last.min())


def spread(run: Callable[[], Outcome], seeds: Iterable[int] = RUNS) -> list[Outcome]:
    """Outcomes of eager runs with other roundings; the first with other layouts, too."""
    outcomes = []
    for seed in seeds:
        with _otherwise(seed):
            outcomes.append(run())
    return [one for one in outcomes if one.error is None]


@contextlib.contextmanager
def _otherwise(seed: int) -> Iterator[None]:
    """Within this, observed code runs with other roundings."""
    wide = seed == UNROUNDED
    stack: list[Any] = PLACES if wide else AROUND
    entry: Any = _wider(PLACES[-1]) if wide else functools.partial(Jiggle, seed)
    stack.append(entry)
    try:
        yield
    finally:
        stack.pop()


def _wider(place: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Inputs in a place, halves as float32 in the same layout."""

    def wider(tensor: torch.Tensor) -> torch.Tensor:
        given = place(tensor)
        if given.dtype not in _HALVES or not given.numel():
            return given
        memory = given.detach().as_strided((extent(given),), (1,)).float()
        return memory.as_strided(given.shape, given.stride()).requires_grad_(given.requires_grad)

    return wider
