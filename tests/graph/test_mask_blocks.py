"""Blocks of a mask: none that shows something is missing, none is called whole that is not, and few too many."""

import itertools
import random

import pytest
import torch

from dynamotor.graph import mask_blocks as module
from dynamotor.graph.mask_blocks import BLOCK, mask_blocks
from dynamotor.graph.mask_text import names_in

CPU = torch.device("cpu")
DOCUMENTS = torch.randint(0, 4, (2, 700)).sort().values
FLAGS = torch.rand(2, 1, 1, 700) < 0.7
MASKS = {
    "causal": "q-k>=0",
    "window": "(q-k>=0)&(-q+k+200>=0)",
    "chunks": "(q-k>=0)&((q//100)-(k//100)==0)",
    "both sides": "-abs(q-k)+130>=0",
    "prefix": "(q-k>=0)|(-k+150>=0)",
    "heads": "q-100*h-k>=0",
    "queries alone": "q-200>=0",
    "everything": "q>=0",
    "documents": "(q-k>=0)&(r0[b,k]-r0[b,q]==0)",
    "flags": "(q-k>=0)&(int(r1[b,0,0,k])-1==0)",
    "either": "(int(r1[b,0*k+0,0*k+0,k])==0)|(r0[b,q]-r0[b,k]-2>=0)",
    "multiples": "2*q-3*k+5*h-7>=0",
}
TIGHT = {"causal", "window", "both sides", "prefix", "heads", "queries alone", "everything", "flags"}


def of_both(mask, sizes, reads=(DOCUMENTS, FLAGS)):
    some, every = module._by_ends(mask, reads, sizes, CPU)
    shows, whole = module._by_places(mask, reads, sizes, CPU)
    assert some.dtype is every.dtype is torch.bool and some.shape == every.shape == shows.shape
    assert not (shows & ~some).any() and not (every & ~whole).any()
    return some, every, shows, whole


@pytest.mark.parametrize("rows", [700, 384])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_hold_all_that_a_mask_shows(name, rows):
    some, every, shows, whole = of_both(MASKS[name], (2, 3, rows, 700))
    if name in TIGHT:
        assert torch.equal(some, shows) and torch.equal(every, whole)
    assert some.sum() - shows.sum() <= 0.3 * some.numel() and whole.sum() - every.sum() <= 0.1 * some.numel()


@pytest.mark.parametrize("seed", range(30))
def test_blocks_of_random_formulas_hold_all_that_they_show(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    reads = torch.randint(-300, 300, (2, 300)), torch.rand(2, 1, 1, 300) < 0.5

    def number():
        atom = draw.choice(["q", "k", "h", "b", "r0[b,q]", "r0[b,k]", "int(r1[b,0,0,k])", "r0[1,q]"])
        atom = draw.choice([atom, f"(({atom}-150)//{draw.choice([2, 7, 64])})", f"abs({atom}-100)"])
        return draw.choice(["", "2*", "3*"]) + atom

    def fact():
        terms = draw.choice("+-").join(number() for _ in range(draw.choice([1, 2, 2, 3])))
        return f"({terms}{draw.randint(-200, 200):+d}{draw.choice(['>=0', '>=0', '==0'])})"

    text = fact()
    for _ in range(draw.randint(0, 2)):
        text = f"({text}{draw.choice('&|')}{fact()})"
    if names_in(text) & {"q", "k"} or "r" in text:
        of_both(text, (2, 3, 300, 300), reads)


def test_documents_whose_numbers_are_far_apart_hide_each_other():
    ends = torch.iinfo(torch.int64)
    numbers = torch.tensor([ends.min, ends.max, ends.max - 1, 0]).repeat_interleave(BLOCK)[None]
    some, every, shows, whole = of_both("r0[b,k]-r0[b,q]==0", (1, 1, 4 * BLOCK, 4 * BLOCK), (numbers,))
    assert torch.equal(shows, torch.eye(4, dtype=torch.bool)[None, None]) and every[0, 0, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_numbers_without_ends_are_looked_at_place_by_place(dtype):
    with pytest.raises(module.NoBounds):
        module._by_ends("r0[b,k]-r0[b,q]==0", (DOCUMENTS.to(dtype),), (2, 1, 700, 700), CPU)
    found = mask_blocks("r0[b,k]-r0[b,q]==0", (2, 1, 700, 700), CPU, DOCUMENTS.to(dtype))
    wanted = mask_blocks("r0[b,k]-r0[b,q]==0", (2, 1, 700, 700), CPU, DOCUMENTS)
    assert all(map(torch.equal, found, wanted))


def test_rows_of_blocks_are_ordered_from_the_longest_one_where_a_mask_reads_tensors():
    found = mask_blocks("(q-k>=0)&(r0[b,k]-r0[b,q]==0)", (2, 1, 700, 700), CPU, DOCUMENTS)
    for part, _, whole, _, order in (found[:5], found[5:]):
        counts = (part + whole).flatten()[order.long()].tolist()
        assert counts == sorted(counts, reverse=True) and sorted(order.tolist()) == list(range(12))


def test_blocks_name_what_a_mask_shows():
    n = 3 * BLOCK + 40
    part_counts, parts, whole_counts, wholes, *by_column = mask_blocks(
        f"(q-k>=0)&(-q+k+{2 * BLOCK}>=0)", (1, 1, n, n), torch.device("cpu")
    )
    # The last rows do not fill a block, so none of theirs is whole.
    assert part_counts.flatten().tolist() == [1, 1, 2, 3] and whole_counts.flatten().tolist() == [0, 1, 1, 0]
    assert [parts[0, 0, row, :n].tolist() for row, n in ((2, 2), (3, 3))] == [[0, 2], [1, 2, 3]]
    assert wholes[0, 0, 1:3, 0].tolist() == [0, 1]
    assert by_column[0].flatten().tolist() == [2, 2, 2, 1] and by_column[2].flatten().tolist() == [1, 1, 0, 0]


def test_lists_of_more_keys_than_queries():
    found = mask_blocks("(r0[b,k]-r0[b,q]==0)", (2, 1, 300, 700), CPU, DOCUMENTS)
    shows = DOCUMENTS[:, :300, None] == DOCUMENTS[:, None, :700]
    for b, row in itertools.product(range(2), range(3)):
        some = [
            column
            for column in range(6)
            if shows[b, row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128].any()
        ]
        listed = found[1][b, 0, row, : found[0][b, 0, row]].tolist()
        listed += found[3][b, 0, row, : found[2][b, 0, row]].tolist()
        assert set(some) <= set(listed)
