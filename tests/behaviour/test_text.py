"""Strings, formatting, bytes and regular expressions."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import enum, re, string, textwrap, json, torch
class F:
    def __format__(self, spec): return "F" + spec
    def __str__(self): return "str"
    def __repr__(self): return "rep"
pat = re.compile(r"(\w+)-(\d+)")
name, width = "nm", 7
class Own(str): pass
class Bytes(bytes): pass
class Loud(str):
    def __str__(self): return "loud"
    def __repr__(self): return "LOUD"
    def __format__(self, spec): return "format" + spec
    def upper(self): return "Upper"
    def format(self, *a, **k): return "formatted"
    def join(self, items): return "joined"
    def split(self, *a): return ["split"]
    def replace(self, *a): return "replaced"
    def startswith(self, *a): return "starts"
    def encode(self, *a): return b"encoded"
    def find(self, *a): return -5
    def strip(self, *a): return "stripped"
class Asked(str):
    def __add__(self, o): return "added"
    def __mod__(self, o): return "modded"
    def __rmod__(self, o): return "rmodded"
    def __mul__(self, n): return "times"
    def __len__(self): return 77
    def __eq__(self, o): return "equal"
    def __hash__(self): return 5
    def __contains__(self, o): return True
    def __getitem__(self, i): return "item"
    def __iter__(self): return iter(["it"])
class Number(int):
    def __str__(self): return "number"
class Whole(int):
    def __index__(self): return 40
    def __float__(self): return 3.25
class Real(float):
    def __repr__(self): return "real"
class Word(str, enum.Enum): A = "a b"
class Name(enum.StrEnum): A = "a b"
own, loud, asked, one, half, whole = Own("a b"), Loud("a {} b"), Asked("a b"), Number(1), Real(0.5), Whole(3)
def folded(s):
    return [s.upper(), s.lower(), s.strip(), s.split(), s.join(["p", "q"]), s.replace("a", "b"), s.startswith("a"), s.encode(), s.find("b"), s.title(), s.casefold(), s.zfill(20), s.partition(" "), s.splitlines(), s.endswith("b"), s.format(1), "".join([s]), type(s.upper()).__name__, type(s[:]).__name__, type(s.strip()).__name__, type(s.replace("zz", "y")).__name__, type(s.removeprefix("a")).__name__]
def told(s):
    return [str(s), repr(s), f"{s}", f"{s:>9}", f"{s!r}", f"{s!s:>9}", "{}".format(s), "{!r:>9}".format(s), "%s" % s, "%r" % s, "%9s|" % (s,), "%s %s" % (s, s), "%(a)s" % {"a": s}, "%s".__mod__(s), str.__mod__("%s", s), s.__rmod__("%s"), Own("%s|") % s, Own("{}|").format(s), format(s, ""), [s], type("%s" % s).__name__]
"""

TABLE = r"""
folded(own), folded(Own("a b")), folded(loud), folded(Loud("a {} b")) #9
folded(Word.A), folded(Name.A)
told(own), told(Own("a b")), told(Word.A), told(loud), told(Loud("q"))
told(Name.A) #9
[(s + "c", "c" + s, s * 2, s[0], s[:], len(s), s == "a b", "a" in s, list(s), s % 1, "%s" % s, s.upper(), type(s.upper()).__name__) for s in (asked, Asked("a b"))]
"%s %d %x %r" % (one, one, one, one), "%s" % one, "%d" % one, "%s %f %r" % (half, half, half), "%s" % half, "%s" % Number(2), "%d" % Number(2), "%s" % Real(2), "%f" % Real(2), "%.1f" % Number(2), "%c" % Own("x")
"%d" % whole, "%x" % whole, "%f" % whole #2
"%d %x %f" % (Whole(3), Whole(3), Whole(3)) #2
"%s %s" % loud
"%(a)s" % loud
"a" % loud
loud.__rmod__(3), "%s" % own is own, own % () is own, Own("%s") % own
"abc".upper(), "ABC".lower(), "abc def".title(), "abc".capitalize(), "aBc".swapcase(), "ß".casefold()
" a ".strip(), "xxaxx".strip("x"), " a".lstrip(), "a ".rstrip(), "abc".removeprefix("a"), "abc".removesuffix("c")
"a,b,c".split(","), "a b  c".split(), "a,b,c".rsplit(",", 1), "a\nb\r\nc".splitlines(), "a=b=c".partition("="), "a=b=c".rpartition("=")
",".join(["a", "b"]), "".join(c for c in "abc" if c != "b"), "-".join(map(str, range(3)))
"abcabc".find("b"), "abcabc".rfind("b"), "abc".find("z"), "abc".index("c"), "abcabc".count("bc"), "abc".rindex("a")
"abc".replace("b", "x"), "aaa".replace("a", "b", 2), "abc".startswith("ab"), "abc".endswith(("x", "c")), "abc".startswith("b", 1)
"abc".center(7, "*"), "a".ljust(3) + "|", "a".rjust(3), "5".zfill(3), "-5".zfill(4), "a\tb".expandtabs(4)
"abc".isalpha(), "12".isdigit(), "a1".isalnum(), " ".isspace(), "Ab".istitle(), "AB".isupper(), "ab".islower(), "a_1".isidentifier()
"abc"[1], "abc"[-1], "abc"[::-1], "abcdef"[1:5:2], "abc"[5:], "abc" * 2, "a" "b"
"abc" < "abd", "b" in "abc", "" in "a", "abc" == "abc", len("héllo"), "é".encode(), b"\xc3\xa9".decode()
"%s %d %5.2f %x %r %%" % ("a", 3, 1.5, 255, "q"), "%-5s|%05d" % ("a", 3), "%c" % 97, "%e" % 12345.678
"%(a)s" % {"a": 1}
"%r %s" % (F(), F()), "%r" % F(), "%s" % [F()], "%5s|%-4r|%%" % (F(), F()), "%s %d" % (F(), 3), "%r" % ([F(), "a"],), "%.2s" % F(), "%s" % (x.shape,)
"%s %s" % F()
"%s" % (F(), 1)
"%d" % F() #2
"%(a)s %(b)s" % {"a": F(), "b": 1} #2
"%a" % F() #2
"{} {}".format(1, 2), "{1} {0}".format("a", "b"), "{a:>5}".format(a=1), "{:{w}}".format("a", w=4)
"{0[1]} {1.ndim}".format([1, 2], x) #2
f"{1 + 1} {'a'!r} {3.14159:.2f} {5:03d} {1000000:,} {0.5:%}"
f"{width:>{width}} {name!s:^10} {name=} {width=:03d}"
f"{x.shape} {x.ndim} {x.dtype} {tuple(x.shape)}"
f"{F()} {F():abc} {F()!r} {F()!s:>5} {F()!a}" #2
f"{[1, 2]} {{'a'}} {{}} {None} {(1,)}"
f"{'nested ' + f'{1}'} {max(1, 2)} {'a' if width else 'b'}"
f"{1e10} {1e-10:g} {12345.6789:.3e} {255:#x} {5:b} {-5:+d} {5:+d} {'a':<4}|"
str(F()), repr(F()), format(F(), "q"), format(3.14159, ".3f"), format(5, "05"), format("a", ">3")
string.ascii_lowercase[:3], string.digits, string.capwords("a b")
string.Template("$a").substitute(a=1) #2
re.match(r"(\d+)", "12a").group(1), re.search("b", "abc").start(), re.fullmatch("a+", "aab"), re.findall(r"\d", "a1b2")
re.sub(r"\d", "#", "a1b2"), re.split(r"[,;]", "a,b;c"), re.escape("a.b")
re.sub("a", lambda m: m.group().upper(), "banana") #2
pat.match("ab-12").groups(), pat.search("x ab-12").span(), pat.sub(r"\2-\1", "ab-12"), pat.findall("a-1 b-2"), pat.pattern
[m.group(2) for m in pat.finditer("a-1 b-2")]
bool(pat.match("nope")), pat.match("nope") is None, re.compile("a", re.I).match("A").group()
textwrap.dedent("  a\n  b"), textwrap.indent("a", "  "), textwrap.shorten("aa bb cc", 6)
json.dumps({"a": [1, 2.5, None, True]}), json.loads('{"a": [1, null]}'), json.dumps("é"), json.dumps({"b": 1, "a": 2}, sort_keys=True)
"a-b_c".translate(str.maketrans("-_", "  ")), "abc".translate({97: "x"}), str.maketrans({"a": "b"})
b"abc".hex(), bytes.fromhex("6162"), b"a b".split(), b"abc".upper(), b"%d" % 3, b"abc".find(b"c"), b"a" in b"abc"
"abc".encode("ascii"), "a".isascii(), "x".join("abc"), "a b c".split(maxsplit=1), "abc".split("b")
"{:>10}|{:<10}|{:^10}".format("a", "b", "c"), "{!r}".format("a"), "{:.3}".format("abcdef"), "{:08.3f}".format(3.14159)
"abc".__len__(), "abc".__contains__("a"), "abc".__add__("d"), str.upper("a"), str.join(",", ["a"]), "a".__eq__("a")
list("abc"), tuple("ab"), set("aab") == {"a", "b"}, sorted("cab"), dict(zip("ab", [1, 2])), [*"ab"], max("abc")
"a".join([])
",".join([1])
"%d" % "a"
"{}".format()
"{a}".format(b=1)
f"{1:q}"
f"{x.nope}"
"a" * -1, "a" * 0, 3 * "ab"
"abc".nope()
"a".encode("ascii").decode("utf8")
"é".encode("ascii")
re.compile("(")
json.loads("{")
"x={} y={}".format(*[1, 2]), "{a}{b}".format(**{"a": 1, "b": 2}), "{0}{0}".format("z")

    parts = []
    for i, ch in enumerate("hello"):
        if ch in "aeiou":
            parts.append(f"{i}:{ch}")
    S.extend(parts)
    return x, ";".join(parts)

    text = ""
    for k in range(3):
        text += f"{k},"
    return text.rstrip(","), x * len(text)

    key = f"layer{x.shape[0]}"
    table = {"layer3": 2.0, "layer4": 3.0}
    return x * table[key]

    a, b = "k=v".split("=")
    return {a: b}, a + b

    m = pat.match("ab-12")
    if m:
        word, number = m.groups()
        return x * int(number), word
    return None

    out = []
    for line in "a:1\nb:2\n\n# c".splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        k, _, v = line.partition(":")
        out.append((k, int(v)))
    return dict(out), x

    buffer = bytearray()
    buffer += b"ab"
    buffer.append(99)
    return bytes(buffer)   #9

    "%s" % (1, 2)

    t = Own("ab"); b = Bytes(b"ab"); dash = Own("-")
    return [t % () is t, t % {"k": 1} is t, t.format() is t, t.format(1, k=2) is t, t.partition("-")[0] is t, "a-b".partition(dash)[1] is dash, t.rpartition("-")[2] is t, t.upper() is t, t.strip() is t, b.strip() is b, b.partition(b"-")[0] is b, type(t.replace("a", "a")).__name__, type(t.translate({})).__name__, type(Own("%s") % t).__name__, ("%s" % t).__class__.__name__]
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
