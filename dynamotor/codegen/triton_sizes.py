"""Numbers of a kernel's text that follow from sizes: emitters put them between marks, and what a draft is for
says what they become.

    x_in = x < ⟦4096⟧                a draft
    x_in = x < 4096                  a kernel of fixed sizes
    x_in = x < ⟦@16 16*s0⟧           a draft of sizes that differ between calls
    x_in = x < n0                    its kernel, which is given them

`triton_batch.py` compares drafts by what stands around their numbers.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from .triton_kernel import TritonFunction
from .triton_ops import mark, unmarked

NUMBERS = re.compile("⟦([^⟧]*)⟧")


def settle(draft: TritonFunction) -> TritonFunction:
    """The function of a draft of fixed sizes."""
    fallback = draft.fallback
    if fallback is not None and NUMBERS.search(fallback.source):
        fallback = settle(fallback)
    return _named(replace(draft, fallback=fallback), draft.source, ())


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
    """The function with its numbers' arguments, under a name for its contents."""
    text = unmarked(marked).replace("):", "".join(f", n{n}" for n in range(len(kinds))) + "):", 1)
    signature = (*draft.signature, *kinds)
    digest = hashlib.sha256(f"{text}{signature}{draft.warps}".encode()).hexdigest()[:12]
    name = f"{draft.name}_{digest}"
    text = text.replace(f"def {draft.name}(", f"def {name}(", 1)
    return replace(draft, name=name, source=text, signature=signature)


def constant_of(number: str) -> str:
    """An expression for the number (an integer, or a float32 as text) as a value of its own."""
    kind = "int32" if number.lstrip("-").isdecimal() else "float32"
    return f"tl.full((), {mark(number)}, tl.{kind})"
