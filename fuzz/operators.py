"""PyTorch's operator database: every op over dtypes and layouts, alone and composed, forward and gradients.

A trial is written as a line of Python, `op0(x0, [x1, x2], dim=3)`, so that the compiler sees a plain call.

>>> [t.name for t in trials(0, "float32", most=2)]
['abs float32 0', 'abs float32 0 transposed', ...]
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .compare import Outcome, observe
from .databases import operator_infos
from .program import define
from .trial import Trial, compiled as tried, examine, targets

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64")
LAYOUTS = ("transposed", "strided", "expanded", "flipped", "channels_last", "offset")
# Ops whose numbers are arbitrary: uninitialised memory, or factors unique only up to signs and order.
UNCERTAIN = re.compile(
    "empty|svd|pca|resize|eig|qr|lu|householder|ldl|lobpcg|lstsq|fractional|cholesky_inverse|geqrf"
)
# Ops left out: they hand out shared memory that may not be written; a compiled one gives memory of
# its own.
UNSHARED = re.compile("^unsafe_(chunk|split)")
ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError)


def relaid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape and dtype laid out otherwise; `expanded` and `flipped` change the numbers too."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    if layout == "expanded" and tensor.numel():
        return tensor[:1].expand(tensor.shape) if tensor.dim() else tensor
    if layout == "flipped" and tensor.dim():
        return tensor.flip(-1)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "offset" and tensor.dim():
        return torch.cat([tensor[:1], tensor])[min(1, tensor.shape[0]) :]
    return tensor


class Writer:
    """Writes arguments as Python text; tensors become x0, x1, ..., what has no literal c0, c1, ..."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: dict[str, Any] = {}

    def value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return f"x{len(self.tensors) - 1}"
        if type(value) in (tuple, list, torch.Size):
            items = "".join(self.value(item) + ", " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if type(value) is dict:
            return "{" + ", ".join(f"{key!r}: {self.value(item)}" for key, item in value.items()) + "}"
        plain = isinstance(value, (bool, int, str, type(None), torch.dtype)) or type(value) in (
            slice,
            type(...),
        )
        if plain or (type(value) is float and value - value == 0):
            return str(value) if value is ... else repr(value)
        return self.object("c", value)

    def object(self, stem: str, value: Any) -> str:
        name = f"{stem}{len(self.objects)}"
        self.objects[name] = value
        return name

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *first: str) -> str:
        given = [*first] + [self.value(a) for a in args] + [f"{k}={self.value(v)}" for k, v in kwargs.items()]
        return f"{self.object('op', function)}({', '.join(given)})"


def trial(name: str, lines: str, writer: Writer, gradients: bool, settled: bool) -> Trial:
    """A trial of a function of the writer's tensors; each run gets copies with the same layouts."""
    tensors, source = (
        writer.tensors,
        f"def f({', '.join(f'x{n}' for n in range(len(writer.tensors)))}):\n{lines}",
    )

    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)  # of a GPU, too
        copies = [_copy(t) for t in tensors]
        asks = [gradients and t.requires_grad for t in tensors]
        return [c.requires_grad_() if a else c for c, a in zip(copies, asks, strict=True)]

    def prepare(compiled: bool) -> Callable[[], Outcome]:
        function = define(source, "f", writer.objects)
        call = tried(function) if compiled else function
        return lambda: observe(call, inputs(), None if gradients else ())

    facts = [
        f"x{n}: {t.dtype} {tuple(t.shape)} {t.stride()}"
        for n, t in enumerate(tensors)
        if t.layout is torch.strided
    ]
    return Trial(name, prepare, settled, source + "".join(f"# {fact}\n" for fact in facts))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, overlaps included."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,)).clone()
    copy = memory.as_strided(tensor.shape, tensor.stride())
    return copy.conj() if tensor.is_conj() else copy


def samples(op: Any, dtype: str, gradients: bool, most: int, look_at: int = 40) -> list[Any]:
    """Some of the op's first samples, from simple to odd ones."""
    torch.default_generator.manual_seed(0)
    try:
        known = list(
            itertools.islice(op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=gradients), 40)
        )
    except ERRORS:
        return []
    chosen = (
        known
        if len(known) <= most
        else [known[round(n * (len(known) - 1) / (most - 1))] for n in range(most)]
    )
    return chosen


def arguments(sample: Any, layout: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample's arguments, its tensors laid out anew."""
    again = functools.partial(_relaid_all, layout=layout)
    return tuple(again(a) for a in (sample.input, *sample.args)), {
        k: again(v) for k, v in sample.kwargs.items()
    }


def _relaid_all(value: Any, layout: str) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and type(value) is torch.Tensor
        return (
            relaid(value.detach(), layout).requires_grad_(value.requires_grad) if plain and layout else value
        )
    if type(value) in (tuple, list):
        return type(value)(_relaid_all(item, layout) for item in value)
    return value


def trials(number: int, dtype: str, most: int = 6) -> Iterator[Trial]:
    """Trials of one op in one dtype: every sample as it is, and each in another layout or two."""
    op = operator_infos()[number]
    if getattr(torch, dtype) not in op.dtypes or UNSHARED.search(op.name):
        return
    gradients = op.supports_autograd and getattr(torch, dtype) in op.supported_backward_dtypes("cpu")
    label = f"{op.name} {op.variant_test_name}".strip()
    rng = random.Random(f"{label} {dtype}")
    for n, sample in enumerate(samples(op, dtype, gradients, most)):
        for layout in ("", *rng.sample(LAYOUTS, 2)):
            writer = Writer()
            try:
                args, kwargs = arguments(sample, layout)
            except ERRORS:
                continue
            text = writer.call(op.op, args, kwargs)
            name = f"{label} {dtype} {n} {layout}".strip()
            # `normal_` draws by element where the memory has holes; its functional twin never sees such
            # memory.
            settled = not UNCERTAIN.search(op.name) and not (label == "normal in_place" and layout)
            yield trial(name, f"    return {text}\n", writer, gradients, settled)


class _Chain:
    """Ops one after another: a first one, a second on its result, a third on the first one's input."""

    def __init__(self, rng: random.Random, dtype: str) -> None:
        self.rng, self.dtype, self.gradients = rng, dtype, getattr(torch, dtype).is_floating_point
        self.writer, self.lines, self.names = Writer(), [], []
        self.shared: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def try_one(self) -> None:
        """Add a random op, if its sample's other arguments fit its operands."""
        op = self.rng.choice(operator_infos())
        if getattr(torch, self.dtype) not in op.dtypes or UNCERTAIN.search(op.name):
            return
        known = [
            s for s in samples(op, self.dtype, self.gradients, 4, look_at=6) if type(s.input) is torch.Tensor
        ]
        if not known:
            return
        sample = self.rng.choice(known)
        given = sample.input if self.shared is None else self.last if len(self.lines) == 1 else self.shared
        assert given is not None
        try:
            with torch.no_grad():
                result = op.op(given.detach().clone(), *sample.args, **sample.kwargs)
        except Exception:  # ops refuse results of others with errors of many classes
            return
        if type(result) is torch.Tensor and result.layout is torch.strided and result.numel() <= 4096:
            self._add(op, sample, result)

    def _add(self, op: Any, sample: Any, result: torch.Tensor) -> None:
        if self.shared is None:
            self.shared = sample.input
            self.writer.value(sample.input)
        given = "v0" if len(self.lines) == 1 else "x0"
        self.lines.append(
            f"    v{len(self.lines)} = {self.writer.call(op.op, sample.args, sample.kwargs, given)}\n"
        )
        self.names.append(op.name)
        self.last = result


def composition(seed: int) -> Trial | None:
    """Two or three ops over a shared input; None when no two were found that go together."""
    rng = random.Random(seed)
    chain = _Chain(rng, rng.choice(["float32", "float32", "float64", "bfloat16", "int64"]))
    for _ in range(40):
        if len(chain.lines) < 3:
            chain.try_one()
    if len(chain.lines) < 2:
        return None
    results = ", ".join(f"v{n}" for n in range(len(chain.lines)))
    name = f"{'+'.join(chain.names)} {chain.dtype} seed {seed}"
    return trial(name, "".join(chain.lines) + f"    return {results}\n", chain.writer, chain.gradients, True)


def by_name(name: str) -> Trial:
    """The trial of this name, as reports give it."""
    if " seed " in name:
        found = composition(int(name.split()[-1]))
        assert found is not None
        return found
    dtype = next(word for word in name.split() if word in DTYPES)
    label = name.split(f" {dtype} ")[0]
    number = next(
        n for n, op in enumerate(operator_infos()) if f"{op.name} {op.variant_test_name}".strip() == label
    )
    return next(t for t in trials(number, dtype) if t.name == name)


def is_right(name: str, target: str = "") -> bool:
    """Whether the trial of this name gives eager's results: for tests."""
    return not examine([by_name(name)], target or targets()[0])[0].problems
