"""Exceptions, with blocks, match, and context managers."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import contextlib, torch
from contextlib import contextmanager, ExitStack, suppress, nullcontext, closing
from dataclasses import dataclass
class E1(Exception): pass
class E2(E1):
    def __init__(self, code, *a): super().__init__(code, *a); self.code = code
    def __str__(self): return f"E2<{self.code}>"
class Ctx:
    def __init__(self, swallow=False, log=None): self.swallow, self.log = swallow, log if log is not None else []
    def __enter__(self): self.log.append("in"); return self
    def __exit__(self, t, v, tb): self.log.append((t and t.__name__, str(v))); return self.swallow
class BadEnter:
    def __enter__(self): raise E1("enter")
    def __exit__(self, *a): return True
class BadExit:
    def __enter__(self): return 1
    def __exit__(self, *a): raise E1("exit")
class NoCtx: pass
@contextmanager
def cm(log):
    log.append("start")
    try: yield len(log)
    except ValueError as e: log.append(f"ve {e}")
    finally: log.append("end")
@contextmanager
def plain(v):
    yield v
@dataclass
class Pt:
    a: int
    b: int = 0
class Args:
    __match_args__ = ("u", "v")
    def __init__(self, u, v): self.u, self.v = u, v
def thrower(e): raise e
def m(v):
    match v:
        case 0: return "zero"
        case 1 | 2: return "one or two"
        case "a": return "str a"
        case True: return "true"
        case None: return "none"
        case []: return "empty"
        case [a]: return ("one", a)
        case [a, *rest] if a == 9: return ("nine", rest)
        case [a, [b, c]]: return ("nested", a, b, c)
        case [a, b]: return ("two", a, b)
        case (1, 2, *_): return "12"
        case {"k": k, **rest}: return ("dict k", k, rest)
        case {"x": [p, q]}: return ("dict x", p, q)
        case Pt(a=1): return "pt1"
        case Pt(a, b) if a == b: return ("pt eq", a)
        case Pt(a, b): return ("pt", a, b)
        case Args(u, v=2): return ("args", u)
        case int(n): return ("int", n)
        case float() as f: return ("float", f)
        case str(s): return ("str", s)
        case torch.Tensor(): return ("tensor", v.shape)
        case _: return "other"
"""

TABLE = r"""
m(0), m(1), m(2), m("a"), m(None), m([]), m([5]), m([9, 8]), m([9, 1, 2]), m([1, [2, 3]]), m([1, 2]), m((1, 2, 3))
m({"k": 1, "z": 2}), m({"x": [1, 2]}), m(Pt(1)), m(Pt(2, 2)), m(Pt(2, 3)), m(Args(3, 2)), m(Args(3, 4)), m(77), m(1.5), m("zz"), m(x), m({}), m(True)
thrower(E1("a"))
thrower(E2(5))
thrower(KeyError("k"))
thrower(E1)
thrower(3)
thrower(ExceptionGroup("g", [ValueError(1)])) #2

    try: thrower(E2(3, "x"))
    except E1 as e: return type(e).__name__, e.code, str(e), e.args

    try: return "try"
    finally: S.append("fin")

    try: thrower(ValueError("v"))
    except (KeyError, ValueError) as e: r = repr(e)
    else: r = "else"
    finally: S.append(1)
    return r

    try: a = 1
    except ValueError: a = 2
    else: a = 3
    finally: a += 10
    return a

    try:
        try: thrower(KeyError("a"))
        finally: S.append("inner")
    except KeyError: return S

    try:
        try: thrower(KeyError("a"))
        except KeyError: raise
    except LookupError as e: return "again", e.args

    try:
        try: thrower(KeyError("a"))
        except KeyError as k: raise ValueError("b") from k
    except ValueError as e: return type(e.__cause__).__name__, e.__suppress_context__, type(e.__context__).__name__

    try:
        try: thrower(KeyError("a"))
        except KeyError: thrower(ValueError("b"))
    except ValueError as e: return type(e.__context__).__name__, e.__cause__

    try:
        try: thrower(KeyError("a"))
        except KeyError: raise ValueError("b") from None
    except ValueError as e: return e.__cause__, e.__suppress_context__

    for i in range(5):
        try:
            if i == 1: continue
            if i == 3: break
            S.append(i)
        finally: S.append("f")
    return S

    def f():
        try: return 1
        finally: return 2
    return f()

    def f():
        for i in range(3):
            try: return i
            finally:
                if i < 1: continue
    return f()

    while True:
        try: break
        finally: S.append("out")
    return S

    try: 1 / 0
    except ZeroDivisionError as e: msg = str(e)
    try: e
    except NameError as n: return msg, type(n).__name__

    try: thrower(ExceptionGroup("g", [ValueError("v"), KeyError("k"), TypeError("t")]))
    except* ValueError as g: a = [str(e) for e in g.exceptions]
    except* (KeyError, TypeError) as g: b = len(g.exceptions)
    return a, b #2

    try: thrower(ValueError("lone"))
    except* ValueError as g: n = type(g).__name__, len(g.exceptions)
    return n #2

    try: thrower(E2(1))
    except E1 as e:
        e.add_note("n")
        return e.__notes__ #2

    try: [][1]
    except IndexError as e: return str(e)

    try: {}["q"]
    except KeyError as e: return e.args, str(e)

    try: int("z")
    except ValueError as e: return str(e)

    try: None.foo
    except AttributeError as e: return str(e), e.name #2

    try: x.view(5)
    except RuntimeError as e: return "shape" in str(e) #2

    try: torch.cat([x, x[:, :2]], 0)
    except RuntimeError: return x * 2 #2

    try: assert x.ndim == 3, "dims"
    except AssertionError as e: return str(e), x + 1

    y = x
    try:
        y = y * 2
        raise E1
    except E1:
        y = y + 1
    finally:
        y = y - 3
    return y

    with Ctx() as c: y = x * 2
    return y, c.log

    with Ctx(swallow=True) as c: thrower(ValueError("q"))
    return c.log

    with Ctx(log=S): thrower(ValueError("q"))

    with Ctx() as a, Ctx(True) as b: thrower(E1("z"))
    return a.log, b.log

    with (Ctx() as a, Ctx() as b): r = 1
    return r, a.log, b.log

    with BadEnter(): pass

    with BadExit() as v: S.append(v)

    with NoCtx(): pass

    with cm(S) as n: S.append(n)
    return S

    with cm(S): raise ValueError("in")
    return S

    with cm(S): raise KeyError("in")

    def f():
        with cm(S): return x + 1
    return f()

    for i in range(3):
        with cm(S):
            if i == 1: break
    return S

    with suppress(KeyError): {}["a"]
    return x + 1

    with suppress(KeyError): [][1]

    with nullcontext(5) as v: return v, x

    with ExitStack() as st:
        a = st.enter_context(plain(1)); st.callback(S.append, "cb"); b = st.enter_context(Ctx(log=S))
    return a, S

    with ExitStack() as st:
        st.push(lambda *a: True)
        raise ValueError("swallowed")
    return "after"

    @plain(3)
    def f(v): return v * 2
    return f(x)

    with torch.no_grad(): y = x * 2
    return y, torch.is_grad_enabled()

    with torch.enable_grad(), torch.set_grad_enabled(False): g = torch.is_grad_enabled()
    return g, torch.is_grad_enabled()

    @torch.no_grad()
    def f(): return torch.is_grad_enabled()
    return f(), torch.is_grad_enabled()

    with torch.autocast("cpu", dtype=torch.bfloat16): y = x @ x.T
    return y.dtype

    with torch.device("cpu"): return torch.ones(2)

    with closing(type("C", (), {"close": lambda self: S.append("closed")})()): pass
    return S #2

    class_ = Pt(1, 2)
    match class_:
        case Pt(a=a, b=b): return a + b, x

    match x.shape:
        case (3, n): return n
        case _: return None

    match {"op": "add", "args": [x, x]}:
        case {"op": "add", "args": [a, b]}: return a + b

    match ("go", 3):
        case ("go", (1 | 3) as n): return n

    match 5:
        case n if n > 10: return "big"
        case -5: return "neg"
        case 5.0: return "five"

    try:
        raise E2(7) from E1("cause")
    except E2 as e: return e.code, e.__cause__.args

    e = E1("made"); e.extra = 5
    try: raise e
    except E1 as f: return f is e, f.extra

    def gen():
        with Ctx(log=S): yield x
    return list(gen())

    try: raise StopIteration(4)
    except StopIteration as e: return e.value

    def gen():
        raise StopIteration
        yield
    list(gen())

    try: thrower(OSError(2, "no"))
    except OSError as e: return e.errno #2

    import math as mm
    from operator import add as plus
    return mm.floor(2.5), plus(1, 2)

    S.append(1 if x.ndim == 2 else 2)
    if x.ndim == 2: raise E1(S[0])
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
