"""What CPython refuses: special methods that give something else than they must, and arguments that are not of the
kind that C asks for."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
class Truth:
    def __bool__(self): return 1.2
class Length:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
class Texts:
    def __str__(self): return 3
    def __repr__(self): return 3
    def __format__(self, spec): return 3
    def __bytes__(self): return 3
class Numbers:
    def __int__(self): return 1.5
    def __float__(self): return 1
    def __complex__(self): return 1
    def __index__(self): return 1.5
class Two:
    def __index__(self): return 2
class Hash:
    def __init__(self, h): self.h = h
    def __hash__(self): return self.h
    def __eq__(self, other): return True
class Iter:
    def __iter__(self): return 3
class Plain: pass
class Whole(int):
    def __bool__(self): return False
    def __repr__(self): return "whole"
class Real(float): pass
class Folded(str):
    def __eq__(self, other): return str.lower(self) == str.lower(other)
    def __hash__(self): return hash(str.lower(self))
class Alike(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
class Pow:
    def __pow__(self, other, modulus=None): return NotImplemented if modulus == 7 else ("pow", modulus)
class Longer(str):
    def __len__(self): return 42
def times(a, b):
    a *= b
    return a
def star(*a, **k): return a, k
def catch(kind):
    try: raise ValueError("v")
    except kind: return "caught"
def delete(o):
    del o[0]
"""

TABLE = r"""
(x + 1, not Truth()) #2
(x + 1, 1 if Truth() else 2) #2
(x + 1, any([Truth()])) #2
(x + 1, Truth() and 3) #2
(x + 1, len(Length(1.5))) #2
(x + 1, len(Length(-1))) #2
(x + 1, not Length(-1)) #2
(x + 1, 1 if Length(1.5) else 2) #2
(x + 1, str(Texts())) #2
(x + 1, repr(Texts())) #2
(x + 1, f"{Texts()}") #2
(x + 1, format(Texts(), "a")) #2
(x + 1, "%s" % Texts()) #2
(x + 1, bytes(Texts())) #2
(x + 1, int(Numbers())) #2
(x + 1, float(Numbers())) #2
(x + 1, complex(Numbers())) #2
(x + 1, [1, 2, 3][Numbers()]) #2
(x + 1, range(Numbers())) #2
(x + 1, [1] * Two(), (1,) * Two(), Two() * "ab") #2
(x + 1, [1] * Plain()) #2
(x + 1, {Hash("a"): 1}) #2
(x + 1, hash(Hash("a"))) #2
(x + 1, hash(Hash(-1)), hash(Hash(5))) #2
(x + 1, hash(Hash(2 ** 70))) #2
(x + 1, Hash(7) in {1, 2}, Hash(2) in {1, 2}) #2
(x + 1, Hash("a") in {1, 2}) #2
(x + 1, list(Iter())) #2
(x + 1, [v for v in Iter()]) #2
(x + 1, sorted([2, 3], reverse=None)) #2
(x + 1, sorted([2, 3], reverse="yes")) #2
(x + 1, sorted([2, 3], reverse=1), sorted([3, 2], reverse=False)) #2
(x + 1, star(*3)) #2
(x + 1, star(*Plain())) #2
(x + 1, ",".join(3)) #2
(x + 1, getattr(Plain(), 3)) #2
(x + 1, getattr(Plain(), None, 1)) #2
(x + 1, hasattr(Plain(), 3)) #2
(x + 1, setattr(Plain(), 3, 4)) #2
(x + 1, catch(3)) #2
(x + 1, catch((KeyError, Plain))) #2
(x + 1, catch((KeyError, ValueError))), (x + 1, catch(Exception))
(x + 1, complex(Real(2.5), Real(2.5)), complex(Real(1.5))) #2
(x + 1, int(Whole(3), 10)) #2
(x + 1, int(Whole(3)), float(Real(2.5)), complex(Real(2.5)))
(x + 1, pow(Pow(), 2, 3), pow(Pow(), 2)) #2
(x + 1, pow(Pow(), 2, 7)) #2
(x + 1, pow(Whole(3), 2, 5)) #2
(x + 1, f"{Whole(3)}{Real(2.5)}{Whole(3):03d}", format(Whole(3)), str(Whole(3)))
(x + 1, "abc"[Whole(1)], b"abc"[Whole(1)])
(x + 1, (1, 2, 3)[Whole(1)], [1, 2, 3][Whole(1)])
(x + 1, {Folded("A"): 1}[Folded("a")], len({Folded("A"), Folded("a"), "a"}), Folded("A") in {Folded("a")})
(x + 1, {Alike("a"): 1}.get("b"), {Alike("a"): 1}.get("a"))
(x + 1, b"ab" % [1]) #2
(x + 1, sum(["a", "b"], "")) #2
(x + 1, list(reversed(Longer("ab")))) #2
(x + 1, times(Whole(3), [1]), times(Whole(3), 2)) #3
(x + 1, delete(3)) #2
(x + 1, delete((1, 2))) #2
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
