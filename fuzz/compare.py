"""Effects of a call, in eager and compiled, and the differences: results, shared memory, gradients, errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# First look: as close as this is right. For other elements `bounds` says how far rounding can move it.
CLOSE = {
    torch.float32: (4e-6, 1e-6),
    torch.float64: (1e-12, 1e-13),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
    torch.complex64: (4e-6, 1e-6),
    torch.complex128: (1e-12, 1e-13),
}
# Seeds where elements are still outside: of thousands, one may be moved little by ten runs; and where a zero
# is looked for, one operand must be moved and what follows left as it is (odd seeds); the steps of formulas are moved
# alone by even ones.
UNROUNDED = -1  # the seed for which halves are float32: differences that no op rounds may cancel
MORE_RUNS = ((UNROUNDED,), range(10, 50), range(51, 151, 2), range(50, 150, 2))
# Contexts around a call, the innermost last; inputs are made outside of it.
AROUND: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
# Where it finds its inputs.
PLACES: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda tensor: tensor]


@dataclass
class Outcome:
    """What one call of a program did. links: which results and inputs share memory, and where in it."""

    outputs: list[Any] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)  # the inputs afterwards
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    error: BaseException | None = None

    def tensors(self) -> dict[str, Any]:
        """Every value by a name for messages."""
        named = {f"output {n}": value for n, value in enumerate(self.outputs)}
        named |= {f"input {n} afterwards": value for n, value in enumerate(self.written)}
        return named | {f"gradient of input {n}": value for n, value in enumerate(self.gradients)}


def links(inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> list[str]:
    """Names of pairs that are one object or share memory; with an input's memory, where in it."""
    named = [(f"input {n}", t) for n, t in enumerate(inputs)]
    named += [(f"output {n}", t) for n, t in enumerate(outputs) if isinstance(t, torch.Tensor)]
    found = []
    for n, (name, tensor) in enumerate(named):
        for other_name, other in named[:n]:
            if tensor is other:
                found.append(f"{name} is {other_name}")
            elif tensor.numel() and other.numel() and _storage(tensor) == _storage(other):
                distance = _first(tensor) - _first(other)
                found.append(f"{name} shares the memory of {other_name} ({distance} bytes on)")
    return found


def _storage(tensor: torch.Tensor) -> int:
    alias = getattr(tensor, "_alias", None)  # of xla tensors, whose storages hold nothing
    return tensor.untyped_storage().data_ptr() if alias is None else id(alias.root or alias)


def _first(tensor: torch.Tensor) -> int:
    return tensor.storage_offset() * tensor.itemsize if tensor.device.type == "xla" else tensor.data_ptr()


def observe(
    function: Callable[..., Any],
    inputs: list[torch.Tensor],
    cotangents: Sequence[int] | None = (),
    seed: int = 0,
) -> Outcome:
    """Call the function, and its backward from the outputs in `cotangents` (None: all). Errors are kept, but
    for those after which a GPU does nothing more.
    """
    seen, inputs = Outcome(), [PLACES[-1](tensor) for tensor in inputs]
    with contextlib.ExitStack() as around:
        for enter in AROUND:
            around.enter_context(enter())
        _run(seen, function, inputs, cotangents, seed)
    seen.written = [t.detach().clone() for t in inputs]
    return seen


def _run(seen: Outcome, function: Any, inputs: Any, cotangents: Any, seed: int) -> None:
    try:
        outputs = function(*inputs)
        seen.outputs = tree_leaves(outputs)
        seen.links = links(inputs, seen.outputs)
        chosen = range(len(seen.outputs)) if cotangents is None else cotangents
        roots = [seen.outputs[n] for n in chosen if _asks_gradient(seen.outputs[n])]
        if roots:
            generator = torch.Generator("cpu").manual_seed(seed)
            torch.autograd.backward(roots, [_cotangent(root, generator) for root in roots])
            seen.gradients = [t.grad if t.is_leaf else None for t in inputs]
    except torch.AcceleratorError:
        raise
    except Exception as error:
        seen.error = error


def _cotangent(root: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers, the same on all devices; on the CPU some have the layouts of autograd's: lazily negative or
    conjugate, column-major, expanded.
    """
    given = torch.randn(root.shape, generator=generator, device="cpu").to(root.dtype)
    way = int(torch.randint(8, (), generator=generator, device="cpu"))
    if way == 3 and given.numel():
        given = given.flatten()[:1].view([1] * given.dim()).expand(given.shape)
    if root.device.type != "cpu":
        return given.contiguous().to(root.device)
    if way == 1:
        return torch._neg_view(given.neg())
    if way == 2:
        return given.conj_physical().conj()
    return given.mT.contiguous().mT if way == 4 and given.dim() > 1 else given


def _asks_gradient(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and (value.is_floating_point() or value.is_complex())
    )


def differences(
    want: Outcome, got: Outcome, spread: Callable[..., list[Outcome]] | None = None, settled: bool = True
) -> list[str]:
    """Differences of a compiled call from eager, most telling first; empty when it is right.

    spread: eager again and again with all roundings moved about, by default and for more seeds
    (`bounds.spread`); asked only where numbers differ. settled: numbers are compared too (random ones are
    not).
    """
    if (want.error is None) != (got.error is None):
        return [f"eager raised {_said(want.error)}, compiled raised {_said(got.error)}"]
    if want.error is not None:
        same = type(want.error) is type(got.error)
        return [] if same else [f"eager raised {_said(want.error)}, compiled raised {_said(got.error)}"]
    found: list[str] = []
    if len(want.outputs) != len(got.outputs):
        return [f"{len(want.outputs)} outputs in eager, {len(got.outputs)} compiled"]
    wants, gots, moved = want.tensors(), got.tensors(), _Moved(spread)
    for name, a in wants.items():
        b = gots.get(name)
        problem = facts_differ(a, b)
        if problem is None and settled and isinstance(a, torch.Tensor) and not is_close(a, b):
            problem = moved.beyond(name, a, b)
        if problem:
            found.append(f"{name}: {problem}")
    if want.links != got.links:
        found.append(f"shared memory: eager {want.links}, compiled {got.links}")
    return found


class _Moved:
    """Runs of eager with other roundings, made when they are asked for, and more of them before something is
    called wrong.
    """

    def __init__(self, spread: Callable[..., list[Outcome]] | None) -> None:
        self.ways = (
            [] if spread is None else [spread, *[functools.partial(spread, more) for more in MORE_RUNS]]
        )
        self.runs: list[dict[str, Any]] = []

    def beyond(self, name: str, a: torch.Tensor, b: torch.Tensor) -> str | None:
        problem = beyond(a, b, [one[name] for one in self.runs])
        while problem and self.ways:
            self.runs += [one.tensors() for one in self.ways.pop(0)()]
            problem = beyond(a, b, [one[name] for one in self.runs])
        return problem


def _said(error: BaseException | None) -> str:
    return (
        "nothing"
        if error is None
        else f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:160]
    )


def facts_differ(a: Any, b: Any) -> str | None:
    """How the types, shapes, strides or histories of two results differ."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return (
            None
            if type(a) is type(b) and (a == b or a != a)
            else f"{_short(a)} in eager, {_short(b)} compiled"
        )
    for what in ("dtype", "device", "shape", "requires_grad", "is_leaf"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)} in eager, {getattr(b, what)} compiled"
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return None if a.layout is b.layout else f"{a.layout} in eager, {b.layout} compiled"
    strides = [(s, t) for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1]
    if a.numel() and any(s != t for s, t in strides):
        return f"strides {a.stride()} in eager, {b.stride()} compiled, shape {tuple(a.shape)}"
    return None


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, or as close as results of this dtype are expected to be."""
    a, b = (t.detach() if t.layout is torch.strided else t.detach().to_dense() for t in (a, b))
    if a.dtype is torch.complex32:  # has no comparison
        a, b = torch.view_as_real(a).float(), torch.view_as_real(b).float()
    if torch.equal(a, b):
        return True
    if a.dtype not in CLOSE:
        return False
    rtol, atol = CLOSE[a.dtype]
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def beyond(a: torch.Tensor, b: torch.Tensor, moved: Sequence[Any]) -> str | None:
    """Which elements are farther from eager than rounding explains."""
    a, b = (t.detach().cpu() if t.layout is torch.strided else t.detach().to_dense() for t in (a, b))
    others = [m.detach().cpu() for m in moved if isinstance(m, torch.Tensor) and m.shape == a.shape]
    if not a.is_floating_point() and not a.is_complex():
        wrong = a != b
        for other in others:
            wrong &= other == a
    else:
        rtol, atol = CLOSE[a.dtype]
        wide = torch.complex128 if a.is_complex() else torch.float64
        x, y, zs = a.to(wide), b.to(wide), [o.to(wide) for o in others]
        reach = torch.zeros(a.shape, dtype=torch.float64)
        sure = torch.ones(a.shape, dtype=torch.bool)
        for z in zs:
            sure &= (torch.isfinite(z) & torch.isfinite(x)) | (z == x) | (z.isnan() & x.isnan())
            reach = torch.maximum(reach, (z - x).abs().nan_to_num(0, 0, 0))
        near = (y - x).abs() <= 8 * reach + atol + rtol * x.abs().nan_to_num(0, 0, 0)
        wrong = ~(near | (x == y) | (x.isnan() & y.isnan())) & sure
    count = int(wrong.sum())
    if not count:
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    values = f"{a[at].item()!r} in eager, {b[at].item()!r} compiled"
    return f"{count} of {a.numel()} elements differ, the first at {at}: {values}"
