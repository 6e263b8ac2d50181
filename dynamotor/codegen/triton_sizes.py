"""Numbers of a kernel's text that follow from sizes: literals at first, arguments once a second shape shows
which of them change.

    x_in = x < ⟦4096⟧          a draft: emitters put such numbers between marks x_in = x < 4096            the
    kernel of the first shape x_in = x < n0              under `config.size_arguments`, where an earlier
    kernel has the same text but for numbers

Whatever becomes an argument, the numbers put back into the text give the draft: a kernel is never used for a
shape that needs another text (a mask, another tile, another order of loops).
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from dataclasses import dataclass, field, replace

from ..base.config import config
from ..base.events import counters
from .triton_kernel import TritonFunction
from .triton_ops import ALIGNED, mark, unmarked

NUMBERS = re.compile("⟦([^⟧]*)⟧")
_MOST_ARGUMENTS = 24
_MOST_SAMPLES = 64  # of one text: beyond that numbers stay literals
Numbers = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NumberForm:
    """What stands at each number of a text: an argument, or (None) the literal of `sample`."""

    sample: Numbers
    places: tuple[int | None, ...]

    def fits(self, numbers: Numbers) -> bool:
        """Whether these numbers are the sample's where it has literals, and equal where they share an
        argument.
        """
        given: dict[int, str] = {}
        for number, place, literal in zip(numbers, self.places, self.sample, strict=True):
            if number != (literal if place is None else given.setdefault(place, number)):
                return False
        return True

    def arguments(self, numbers: Numbers) -> tuple[str, ...]:
        """The numbers that are arguments, in their order."""
        given = {
            place: number for number, place in zip(numbers, self.places, strict=True) if place is not None
        }
        return tuple(given[place] for place in sorted(given))

    @staticmethod
    def literal(numbers: Numbers) -> NumberForm:
        """Without arguments."""
        return NumberForm(numbers, (None,) * len(numbers))

    @staticmethod
    def guessed(numbers: Numbers) -> NumberForm:
        """For a text without an earlier kernel: integers that no kernel has had as literals probably come
        from the new sizes.
        """
        found: dict[str, int] = {}
        likely = {n for n in numbers if n.isdecimal() and int(n) > 1} - _literals
        return NumberForm(
            numbers, tuple(found.setdefault(n, len(found)) if n in likely else None for n in numbers)
        )

    def widened(self, numbers: Numbers) -> NumberForm:
        """Numbers that differ become arguments too; those that share one still do, and those that differ
        alike.
        """
        found: dict[tuple[int | None, str, str], int] = {}
        rows = zip(numbers, self.places, self.sample, strict=True)
        places = tuple(
            None if p is None and new == old else found.setdefault((p, old, new), len(found))
            for new, p, old in rows
        )
        return NumberForm(numbers, places)

    @property
    def n_arguments(self) -> int:
        return len(set(self.places) - {None})


@dataclass
class _Text:
    """What is known of one text: the numbers it was seen with, and the forms with arguments."""

    seen: dict[Numbers, None] = field(default_factory=dict)
    forms: list[NumberForm] = field(default_factory=list)

    def choose(self, numbers: Numbers, vary: bool) -> NumberForm:
        """The form that a kernel with these numbers takes."""
        if vary and numbers not in self.seen:
            found = next((form for form in self.forms if form.fits(numbers)), None) or self._nearest(numbers)
            if found is not None:
                return found
        if len(self.seen) < _MOST_SAMPLES:
            self.seen.setdefault(numbers)
        _literals.update(numbers)
        return NumberForm.literal(numbers)

    def _nearest(self, numbers: Numbers) -> NumberForm | None:
        """A new form: an earlier one that takes these numbers too, with the fewest arguments."""
        earlier = (*map(NumberForm.literal, self.seen), *self.forms)
        form = min(
            (known.widened(numbers) for known in earlier),
            key=lambda f: f.n_arguments,
            default=NumberForm.guessed(numbers),
        )
        if not 0 < form.n_arguments <= _MOST_ARGUMENTS or len(self.forms) >= _MOST_SAMPLES:
            return None
        self.forms.append(form)
        return form


_texts: dict[str, _Text] = {}
_literals: set[str] = set()  # numbers of kernels without arguments
_lock = threading.RLock()


def settle(draft: TritonFunction) -> TritonFunction:
    """The function of a draft: its numbers are literals or arguments, and its name ends in a hash of what it
    has become.
    """
    parts = NUMBERS.split(draft.source)
    numbers = tuple(parts[1::2])
    key = hashlib.sha256(
        "⟦⟧".join([*parts[::2], str((draft.signature, draft.warps, draft.stages))]).encode()
    ).hexdigest()
    with _lock:
        if len(_texts) > 8192:
            forget()
        form = _texts.setdefault(key, _Text()).choose(numbers, config.size_arguments)
    parts[1::2] = [
        n if place is None else _argument(place, n) for n, place in zip(numbers, form.places, strict=True)
    ]
    given = form.arguments(numbers)
    counters["kernels"]["with size arguments"] += bool(given)
    return replace(_named(draft, "".join(parts), tuple(map(_kind, given))), numbers=tuple(map(_value, given)))


def with_arguments(draft: TritonFunction, kind: str) -> tuple[TritonFunction, tuple[str, ...]]:
    """The function of a draft whose sizes differ between calls, and the expressions of its numbers: each is
    an argument of a kind ("i32", "i64").
    """
    parts, given = NUMBERS.split(draft.source), dict[str, str]()
    for n, text in enumerate(parts):
        if n % 2 and text.startswith("@"):
            parts[n] = given.setdefault(text, f"n{len(given)}")
    known = [text[1:].split(" ", 1) for text in given]
    kinds = tuple(kind if divisor == "1" else f"{kind}:{divisor}" for divisor, _ in known)
    return _named(draft, "".join(parts), kinds), tuple(expression for _, expression in known)


def _named(draft: TritonFunction, marked: str, kinds: tuple[str, ...]) -> TritonFunction:
    """The function with its numbers' arguments, under a name that says what is in it."""
    text = unmarked(marked).replace("):", "".join(f", n{n}" for n in range(len(kinds))) + "):", 1)
    signature = (*draft.signature, *kinds)
    digest = hashlib.sha256(f"{text}{signature}{draft.warps}".encode()).hexdigest()[:12]
    name = f"{draft.name}_{digest}"
    text = text.replace(f"def {draft.name}(", f"def {name}(", 1)
    return replace(draft, name=name, source=text, signature=signature)


def _argument(place: int, number: str) -> str:
    return f"n{place}" if _is_integer(number) else f"n{place}.to(tl.float32, bitcast=True)"


def _is_integer(number: str) -> bool:
    return number.lstrip("-").isdecimal()


def constant_of(number: str) -> str:
    """An expression for the number as a value of its own."""
    return f"tl.full((), {mark(number)}, tl.{'int32' if _is_integer(number) else 'float32'})"


def _value(number: str) -> int:
    """What a launch passes: the integer, or the bits of the float32."""
    return int(number) if _is_integer(number) else struct.unpack("<i", struct.pack("<f", float(number)))[0]


def _kind(number: str) -> str:
    """An argument's type in a signature; behind a colon, what divides it."""
    if not _is_integer(number):
        return "i32"
    kind = "i32" if -(1 << 31) <= int(number) < 1 << 31 else "i64"
    return f"{kind}:{ALIGNED}" if int(number) % ALIGNED == 0 else kind


def forget() -> None:
    """Forget the texts of earlier kernels."""
    with _lock:
        _texts.clear()
        _literals.clear()
