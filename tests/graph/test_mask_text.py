"""A mask's formula as text says what the formula says, and nothing but a formula is evaluated."""

import pytest
import torch
from torch import fx

from dynamotor.graph.index_formulas import (
    Amount,
    Magnitude,
    NoFormula,
    Position,
    Read,
    affine,
    at_least,
    both,
    computed,
    either,
    is_zero,
)
from dynamotor.graph.mask_text import evaluated, names_in, text_of

B, H, Q, K = (Position(name, size) for name, size in zip("bhqk", (2, 3, 12, 15), strict=True))
b, h, q, k = map(affine, (B, H, Q, K))
IDS, FLAGS = torch.randint(0, 3, (2, 15)), torch.rand(2, 1, 15) < 0.5
TENSORS = {"ids": IDS, "flags": FLAGS}
NUMBER = affine(Read("ids", (b, k)))
FLAG = affine(Read("flags", (b, affine(0), k), is_condition=True))

FORMULAS = {
    "causal": at_least(q - k),
    "window": both(at_least(q - k), at_least(k - q + 4)),
    "chunks": both(at_least(q - k), is_zero(q.divided(4)[0] - k.divided(4)[0])),
    "both sides": at_least(-affine(Magnitude(q - k)) + 3),
    "prefix": either(at_least(q - k), at_least(-k + 2)),
    "multiples": at_least(q.times(2) - k.times(3) + h.times(5) - 7),
    "quotients that are negative": is_zero((q - k - 3).divided(4)[0] + 1),
    "documents": both(at_least(q - k), is_zero(NUMBER - affine(Read("ids", (b, q))))),
    "flags": is_zero(FLAG - 1),
    "either flag or number": either(is_zero(FLAG), at_least(NUMBER - 2)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_text_says_what_its_formula_says(name):
    formula = FORMULAS[name]
    places = dict(
        zip((B, H, Q, K), torch.meshgrid(*map(torch.arange, (2, 3, 12, 15)), indexing="ij"), strict=True)
    )

    def atom(item):
        if type(item) is Position:
            return places[item]
        return TENSORS[item.node][tuple(torch.as_tensor(computed(i, atom)) for i in item.at)].long()

    reads = ["ids", "flags"]
    text = text_of(formula, reads)
    given = {p.name: place for p, place in places.items()} | {"r0": IDS, "r1": FLAGS}
    assert torch.equal(evaluated(text, given), computed(formula, atom))
    assert names_in(text) <= given.keys()


def test_a_trace_records_a_text():
    graph = fx.Graph()
    given = {name: fx.Proxy(graph.placeholder(name)) for name in ("b", "h", "q", "k", "r0", "r1")}
    graph.output(evaluated(text_of(FORMULAS["documents"], ["ids"]), given).node)
    run = fx.GraphModule({}, graph)
    for i, j in ((3, 2), (3, 4), (11, 0)):
        numbers = [torch.tensor(n) for n in (1, 0, i, j)]
        assert bool(run(*numbers, IDS, None)) == (i >= j and bool(IDS[1, i] == IDS[1, j]))


def test_sizes_that_differ_between_calls_have_no_text():
    with pytest.raises(NoFormula):
        text_of(at_least(q - affine(Amount("s", None))), [])


def test_a_read_of_one_side_speaks_of_no_other():
    """Kernels load such a number once for a row or a column, not for each place of a tile."""
    first = [affine(Read("ids", (affine(0), place))) for place in (k, q)]
    text = text_of(is_zero(first[0] - first[1]), ["ids"])
    assert text == "r0[0,q]==r0[0,k]"
    places = {"q": torch.arange(12)[:, None], "k": torch.arange(15)}
    assert torch.equal(evaluated(text, places | {"r0": IDS}), IDS[0, :12, None] == IDS[0])
    assert evaluated(
        text_of(is_zero(affine(Read("ids", (affine(0), affine(1))))), ["ids"]), places | {"r0": IDS}
    ).shape


@pytest.mark.parametrize("text", ["__import__('os')", "q.real", "open(q)", "q if k else b", "[q]", "q < k"])
def test_what_is_no_formula_is_not_evaluated(text):
    with pytest.raises((ValueError, KeyError)):
        evaluated(text, {"q": 1, "k": 2, "b": 0})
