"""C++ for fused loop kernels: one function a kernel, one self-contained translation unit a graph.

>>> unit = emit_unit([emit_kernel(step.kernel) for step in loop_steps])   # text; build it with flags(unit)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..base import development
from ..base.config import config
from ..base.errors import UsageError
from ..lower.index_expr import Div, Index, Loaded, Mod
from ..lower.ir import (
    COLS,
    ROWS,
    SCAN,
    Expr,
    Kernel,
    Reduce,
    ScanStatement,
    Scratch,
    Store,
    Template,
    roots,
    walk,
)
from .cpp_cols import ColsEmitter
from .cpp_kernel import Emitter, isa
from .cpp_prelude import prelude
from .cpp_products import products_emitter
from .cpp_scan import ScanEmitter
from .cpp_segments import SegmentsEmitter, in_digits
from .cpp_vertical import vertical_emitter
from .scopes import title
from .verify_emitted import verify_cpp, verify_places

_FLAGS: tuple[str, ...] = (
    "-O2",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",  # integers wrap, as eager's do: an overflow that "cannot be" made `x + 1 > x` true
    "-shared",
    "-fPIC",
    "-w",
    "-fno-exceptions",  # C++'s library, which is not linked, handles them
)
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
# A unit without threads asks for little: reading the symbols of OpenMP's and C++'s libraries is a sixth of
# its build.
_FEW_LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")


def flags(source: str) -> tuple[str, ...]:
    """Flags that this text is written for; the runtime adds the user's `config.cxx_flags`. UsageError DM109
    where this processor cannot run it: the first call would end the process.
    """
    if not isa().is_here:
        raise UsageError(
            "DM109",
            f"config.isa = {config.isa!r}, which this processor does not have",
            cure='"portable" runs everywhere, "" is this machine',
        )
    libraries = ("-fopenmp",) if "#pragma omp" in source or config.sanitize else _FEW_LIBRARIES
    return (*_FLAGS, *isa().flags, *libraries, *(_SANITIZERS if config.sanitize else []))


@dataclass(frozen=True, slots=True)
class CFunction:
    """One C function `extern "C" void name(void** ptrs, const int64_t* ints)`.

    name: its ops and a hash of its structure: equal kernels share one function. params: C element
    types, one a pointer.
    """

    name: str
    source: str
    params: tuple[str, ...]
    widths: frozenset[int] = frozenset()
    random: bool = False
    sizes: bool = False


def _rows(kernel: Kernel) -> Emitter:
    return vertical_emitter(kernel) or products_emitter(kernel) or SegmentsEmitter(in_digits(kernel))


EMITTERS: dict[Template, Callable[[Kernel], Emitter]] = {ROWS: _rows, COLS: ColsEmitter, SCAN: ScanEmitter}
_memo: dict[str, CFunction] = {}


def structure(kernel: Kernel) -> str:
    """A key that is equal for kernels that differ in the names of buffers and variables only.

    Proofs about symbols, and choices by their hints, are part of it.
    """
    names: dict[str, str] = {p[0]: f"p{n}" for n, p in enumerate(kernel.params)}
    for part, loops in (("o", kernel.outer), ("m", kernel.middle), ("n", kernel.inner)):
        names.update({v.name: f"{part}{n}" for n, v in enumerate(loops)})
    lines = [
        kernel.template,
        str([p[1:] for p in kernel.params]),
        str([[v.size for v in vs] for vs in (kernel.outer, kernel.middle, kernel.inner)]),
        *(f"{s.name} {s.hint} {s.lo} {s.hi} {s.env.fixed.get(s)}" for s in kernel.symbols),
    ]
    streams = kernel.streams()
    ids: dict[Expr, int] = {}
    pattern = re.compile(r"t[0-9t]+")

    def index_text(i: object) -> str:
        return pattern.sub(lambda m: names.get(m.group(), m.group()), _index_repr(i, ids))

    for s in kernel.statements():
        for e in walk(*roots(s)):
            if e not in ids:
                parts = [
                    f"#{ids[a]}"
                    if isinstance(a, Expr)
                    else names.get(a, a)
                    if isinstance(a, str)
                    else index_text(a)
                    for a in e.args
                ]
                if e.op == "rand":
                    parts[1] = f"s{streams.index(e.args[1])}"
                lines.append(f"{len(ids)}={e.op}:{e.dtype}({','.join(map(str, parts))})")
                ids[e] = len(ids)
        extra = (
            (names[s.buffer], index_text(s.index), s.add, s.over)
            if isinstance(s, Store)
            else (
                (s.id, s.kind, s.across, index_text(s.position), s.top)
                if isinstance(s, Reduce)
                else (s.id, s.kind, index_text(s.position))
                if isinstance(s, ScanStatement)
                else (s.id,)
                if isinstance(s, Scratch)
                else ()
            )
        )
        lines.append(f"{type(s).__name__}#{ids[s.expr]}{extra}")
    lines.append(str([(len(p.inner), len(p.row)) for p in kernel.phases] + [len(kernel.final)]))
    return "\n".join(lines)


def _index_repr(i: object, ids: dict[Expr, int]) -> str:
    """repr of an index with loaded expressions by number."""
    if not isinstance(i, Index):
        return repr(i)
    parts = []
    for atom, c in i.terms.items():
        if isinstance(atom, Loaded):
            text = f"[#{ids[atom.expr]}<{atom.size}]"
        elif isinstance(atom, Div | Mod):
            text = f"({_index_repr(atom.base, ids)}{type(atom).__name__}{atom.n})"
        else:
            text = repr(atom)
        parts.append(f"{c}*{text}")
    return "+".join([*sorted(parts), str(i.const)])


def emit_kernel(kernel: Kernel) -> CFunction:
    """The C function of a kernel; equal structures give the same function (memo)."""
    key = f"{config.threads}{config.isa}\n{structure(kernel)}"
    found = _memo.get(key)
    if found is None:
        name = f"{title(kernel)}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        emitter = EMITTERS[kernel.template](kernel)
        text = emitter.function(name)
        verify_places(emitter.kernel, emitter.stores)
        verify_cpp(emitter.kernel, text)
        development.verify("verify_loops", emitter.kernel, text)
        if kernel.symbols:  # the same text whatever the hints: one entry of the disk cache
            old, name = (
                name,
                f"{title(kernel)}_{hashlib.sha256(text.replace(name, '').encode()).hexdigest()[:12]}",
            )
            text = text.replace(old, name)
        body = emitter.body
        found = CFunction(
            name, text, tuple(emitter.types), frozenset(body.widths), body.random, bool(kernel.symbols)
        )
        if len(_memo) > 4096:
            _memo.clear()
        _memo[key] = found
    return found


def emit_unit(functions: Iterable[CFunction]) -> str:
    """One translation unit: the prelude, then each distinct function once."""
    found = {f.name: f for f in functions}.values()
    widths = {w for f in found for w in f.widths}
    text = "".join(f.source for f in found)
    return prelude(text, widths, any(f.random for f in found), any(f.sizes for f in found)) + text
