"""How much of a compiled callable runs compiled: torch calls in its graphs against those that eager PyTorch runs.

Graphs are counted by their entries (calls served times calls in the graph), which costs nothing. Code that runs
natively at graph breaks is watched by a torch function mode for the first calls only; a callable without graph breaks
is never watched.

>>> dynamotor.counters["compiled share"]
Counter({'Model.forward': 97})                                  # per cent
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode

from ..base.compat import count_function_modes, function_mode_stack
from ..base.errors import EagerWarning, folders_of
from ..base.events import counters, emit, log, new_number
from .breaks import BreakReason
from .eager_times import EagerTimes
from .inner_frames import InnerFrames
from .op_state import reaches

_MODE_STACK = frozenset(
    ("_len_torch_function_stack", "_get_function_stack_at", "_get_current_function_mode_stack")
    + ("_is_torch_function_mode_enabled",)
)
# Tell of a mode as they tell of arguments with overrides. Who then hands the call to those sees no difference.
_OVERRIDES = frozenset(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"))
WATCHED_CALLS = 8  # after these nothing is counted any more
WATCHED_GRAPHS = 512  # nor after so many calls of graphs: a call may be a loop that runs for hours
TOLD_CALLS = 3  # so many calls are enough to tell
ENOUGH = 0.8  # with less of its torch calls in graphs, a callable gets a warning
_NEW = "a parameter that the function makes is allocated before the graph"
# Reads of a tensor by Python, which compute nothing: graph breaks consist of them.
_NAMES = """
    __array__ __bool__ __complex__ __contains__ __deepcopy__ __dir__ __float__ __format__ __get__ __hash__ __index__
    __int__ __iter__ __len__ __reduce_ex__ __repr__ __set__ __str__ _is_view backward cpu data_ptr dim element_size
    get_device has_names is_complex is_contiguous is_floating_point is_same_size is_tensor item ndimension nelement
    numel numpy register_hook requires_grad_ size storage_offset stride tolist type untyped_storage
"""
_READS = frozenset(_NAMES.split())


@dataclass
class Counts:
    """Torch calls that ran in graphs, and those that eager PyTorch ran, by reason; its seconds."""

    compiled: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """The part of all torch calls that ran compiled; 1 where there was none."""
        total = self.compiled + self.eager.total()
        return self.compiled / total if total else 1.0

    def __str__(self) -> str:
        total = self.compiled + self.eager.total()
        return f"{self.share:.0%} of the torch calls ran compiled ({self.compiled} of {total})"

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.compiled - other.compiled, self.eager - other.eager, self.seconds - other.seconds)


def _take_out(mode: TorchFunctionMode) -> None:
    """End a mode under those that were entered within it and stay."""
    above = []
    if all(other is not mode for other in function_mode_stack()):
        return  # the program ended one that it had not entered
    while (top := function_mode_stack()[-1]) is not mode:
        TorchFunctionMode.__exit__(top, None, None, None)
        above.append(top)
    TorchFunctionMode.__exit__(mode, None, None, None)
    for other in reversed(above):
        TorchFunctionMode.__enter__(other)


def _reads_modes(names: set[str]) -> bool:
    """Whether a function that uses these names may answer otherwise while a mode is on, as
    `TransformerEncoder` does."""
    asks = not _OVERRIDES.isdisjoint(names) and "handle_torch_function" not in names
    return asks or not _MODE_STACK.isdisjoint(names)


class Share:
    """The counts of one compiled callable; the rests behind its breaks and functions called there add to them.

    entries: gives its entries, those of such rests and functions included.
    """

    def __init__(self, name: str, entries: Callable[[], Iterable[Any]]) -> None:
        self.name, self.entries = name, entries
        self.number = new_number()
        self.watching, self.told = True, False
        self.calls = self.graphs = 0
        self.elsewhere = 0  # compiled calls that are in none of the entries' graphs
        self.native: Counter[str] = Counter()
        self.seconds = 0.0
        self.before = Counts()
        self.times, self.told_times = EagerTimes(), False
        self.is_timed = False  # whether graphs may run again, beside eager

    def counts(self) -> Counts:
        """The counts so far."""
        found = Counts(self.elsewhere, self.native.copy(), self.seconds)
        for entry in self.entries():
            data = entry.info.data
            runs = entry.hits + data.missed
            calls = runs * data.ops
            if data.made:
                found.eager[_NEW] += runs * data.made
            if data.left_to_eager:
                found.eager[data.left_to_eager[0]] += calls
            else:
                found.compiled += calls
        return found

    def natively(
        self, why: BreakReason | str, inner: InnerFrames | None, body: Any = None
    ) -> Callable[..., Any]:
        """What runs a function natively: (function, *args) -> its result. inner: captures its callees.

        body: the program's function that runs. PyTorch's own compilers, and code that reads which modes are on, would
        see the counting mode: such a run counts as one call.
        """
        unseen = not isinstance(why, str) and why.kind in ("transform", "modes")
        why = why if isinstance(why, str) else _text(why)

        def run(function: Callable[..., Any], *args: Any) -> Any:
            if not self.watching:
                pass
            elif unseen or count_function_modes() or reaches((body, function, args), _reads_modes):
                self.native[why] += 1  # where regions of modes are open, they may end inside
            else:
                return self._watch(why, inner, function, *args)
            return function(*args) if inner is None else inner.call(function, *args)

        return run

    def _watch(self, why: str, inner: InnerFrames | None, function: Callable[..., Any], *args: Any) -> Any:
        counting = _Counting(self, why)
        begin = time.perf_counter()
        counting.__enter__()
        try:
            return function(*args) if inner is None else inner.call(function, *args, around=counting.unseen)
        finally:
            _take_out(counting)
            self.seconds += time.perf_counter() - begin - counting.seconds

    def ends_calls(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """The same `finish` of an entry, which counts the calls of the callable."""

        def counted(outs: Any, args: tuple[Any, ...]) -> Any:
            try:
                return finish(outs, args)
            finally:
                if self.watching:
                    self.called()

        return counted

    def ran(self, captured: Any) -> None:
        """The first run of an entry has ended."""
        if captured.left_to_eager:
            self.tell()
        elif captured.reason is None and not self.calls:
            counters["compiled share"][self.name] = int(100 * self.counts().share)
            if not self.native:  # no rest of a function behind a break
                emit("share", name=self.name, of=self.number, counts=self.counts())
                self.compare()

    def called(self) -> None:
        """A call with something left to eager has ended."""
        self.calls += 1
        if self.calls in (TOLD_CALLS, WATCHED_CALLS):
            self.tell()
            self.compare()
        self.watching = self.watching and self.calls < WATCHED_CALLS

    def goes_on(self) -> bool:
        """Whether to count on behind another call of a graph."""
        self.graphs += 1
        if self.graphs == WATCHED_GRAPHS:
            self.watching = False
            self.tell()
        return self.watching

    @contextlib.contextmanager
    def watched(self) -> Iterator[Counts]:
        """The counts of a `with` block's calls, once it has ended."""
        found, before, watching, graphs = Counts(), self.counts(), self.watching, self.graphs
        self.watching, self.graphs = True, WATCHED_GRAPHS + 1  # to the end
        try:
            yield found
        finally:
            self.watching, self.graphs = watching and self.calls < WATCHED_CALLS, graphs
            now = self.counts() - before
            found.compiled, found.eager, found.seconds = now.compiled, now.eager, now.seconds

    def begin_again(self) -> None:
        """Watch the next calls: from now on they differ from those before."""
        self.before, self.calls, self.graphs, self.watching, self.told = self.counts(), 0, 0, True, False

    def tell(self, enough: float = ENOUGH) -> None:
        """State the share; warn once if it is low."""
        counts = self.counts() - self.before
        counters["compiled share"][self.name] = int(100 * counts.share)
        emit("share", name=self.name, of=self.number, counts=counts)
        if counts.share < 1:
            log("breaks", lambda: f"{self.name}: {counts}")
        if counts.share < enough and not self.told:
            self.told = True
            why, calls = counts.eager.most_common(1)[0]
            warnings.warn(
                f"{self.name} (dynamotor.compile): {counts}; most of the rest, {calls} calls, is left to eager since "
                f"{why}. dynamotor.explain lists all of it",
                EagerWarning,
                stacklevel=_level(),
            )

    def measure(self, entry: Any, inputs: Any, seconds: float) -> None:
        """Time an entry's graph, which has run once, beside eager; `seconds`: of its compilation."""
        data = entry.info.data
        once = data.undone != () or data.gm is None or data.left_to_eager
        if self.is_timed and self.watching and not once:
            self.times.add(data.gm, entry.run, inputs, seconds)

    def compare(self) -> None:
        """Warn once where the graphs take longer than their torch calls in eager."""
        if self.times.are_slower and not self.told_times:
            self.told_times = True
            counters["slower than eager"][self.name] += 1
            warnings.warn(
                f"{self.name} (dynamotor.compile) is slower than eager PyTorch: its graphs take {self.times}. "
                "dynamotor.report shows what takes the time; config.warn_slower = False ends these measurements",
                EagerWarning,
                stacklevel=_level(),
            )


def _text(reason: BreakReason) -> str:
    where = reason.where
    place = "" if where is None else f" at {where.filename}:{where.lineno} in {where.function}"
    return f"[{reason.code}] {reason.what}{place}"


def _level() -> int:
    """The `stacklevel` of the caller's line that called the compiled function."""
    frame, level, ours = sys._getframe(1), 1, (*folders_of("dynamotor"), "<dynamotor")
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    return level


class _Counting(TorchFunctionMode):
    """Counts torch calls; not those in graphs that run meanwhile (`unseen`)."""

    def __init__(self, share: Share, why: str) -> None:
        super().__init__()
        self.share, self.native, self.why, self.seconds = share, share.native, why, 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Collection[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _READS:
            self.native[self.why] += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:  # an error that the program keeps holds this frame, which must hold none of its tensors
            del args, kwargs

    def unseen(self, dispatcher: Callable[..., Any], *args: Any) -> Any:
        """Call it without this mode."""
        begin = time.perf_counter()
        modes = function_mode_stack() if count_function_modes() else ()
        if not modes or modes[-1] is not self:  # within a call that it has counted
            return dispatcher(*args)
        self.__exit__(None, None, None)
        try:
            return dispatcher(*args)
        finally:
            if self.share.goes_on():
                self.__enter__()
            self.seconds += time.perf_counter() - begin


def without_counting(call: Callable[[], Any]) -> Any:
    """Call it without the counting mode that is innermost; NotImplemented where there is none."""
    modes = function_mode_stack() if count_function_modes() else ()
    if not modes or not isinstance(modes[-1], _Counting):
        return NotImplemented
    return modes[-1].unseen(call)
