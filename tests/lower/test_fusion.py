"""What fuses and what does not; writes into inputs; the index algebra behind it."""

import itertools
import random

import torch
from harness import check, loop_steps, lowered

from dynamotor.base.events import collect
from dynamotor.graph.spec import GraphInfo
from dynamotor.lower.fusion import Fuser
from dynamotor.lower.index_expr import Index, Var, flatten, unflatten
from dynamotor.lower.lower_graph import lower_graph
from dynamotor.lower.space import Split, match


def test_index_division_and_remainder_agree_with_integers():
    random.seed(0)
    a, b, c = Var("a", 4), Var("b", 6), Var("c", 5)
    for _ in range(400):
        index = Index(
            {v: random.choice([1, 2, 3, 5, 6, 10, 30]) for v in random.sample([a, b, c], 2)},
            random.choice([0, 0, 1, 7]),
        )
        n, m = random.choice([2, 3, 5, 6, 12]), random.choice([2, 4, 5])
        forms = [index // n, index % n, (index // n) % m, (index % n) // m, index // n // m]
        for x, y, z in itertools.islice(itertools.product(range(4), range(6), range(5)), 0, None, 7):
            env = {a: Index.of(x), b: Index.of(y), c: Index.of(z)}
            value = index.subst(env).const
            want = [value // n, value % n, value // n % m, value % n // m, value // n // m]
            assert [f.subst(env).const for f in forms] == want, (index, n, m)
            assert all(f.bounds[0] <= w <= f.bounds[1] for f, w in zip(forms, want, strict=True))


def test_reshaping_back_and_forth_leaves_no_divisions():
    i = [Index.of(Var("i", 8)), Index.of(Var("j", 12)), Index.of(Var("k", 64))]
    flat = flatten(i, (768, 64, 1))
    assert unflatten(flat, (8, 12, 64)) == tuple(i)
    assert all(x.is_affine for x in unflatten(flat, (8, 768)))


def test_match_splits_and_joins_dimensions():
    t0, t1, i0, i1 = Var("t0", 6), Var("t1", 20), Var("i0", 30), Var("i1", 4)
    nest = Index({t0: 20, t1: 1})
    assert match(nest, Index({Var("r", 120): 1}), [t0, t1], [Var("r", 120)]) == {Var("r", 120): nest}
    assert match(nest, Index({i0: 4, i1: 1}), [t0, t1], [i0, i1]) == Split(t1, 4)
    assert match(nest, Index({i0: 4, i1: 1}, 1), [t0, t1], [i0, i1]) is None


def test_a_long_elementwise_chain_is_one_kernel():
    def fn(x, y):
        for _ in range(6):
            x = torch.tanh(x * y) + x
        return x

    check(fn, torch.randn(40, 24), torch.randn(24), kernels=1, tolerance=1e-5)


def test_views_between_elementwise_ops_do_not_split_kernels():
    check(
        lambda x: (x.view(4, 6, 8).transpose(0, 1) * 2 + 1).reshape(6, 32).exp(),
        torch.randn(24, 8),
        kernels=1,
        tolerance=1e-5,
    )


def test_a_value_with_many_readers_is_computed_once():
    def fn(x):
        y = torch.exp(x) * torch.tanh(x)
        return y.sum(-1), y * 2, y.amax(-1)

    (text,) = check(fn, torch.randn(16, 64), kernels=1, tolerance=1e-5)
    assert text.count("phase") == 1


def test_a_transposed_reader_does_not_join_and_gives_the_right_answer():
    def fn(x):
        y = torch.exp(x)
        return y.sum(0), (y.t() + y).sum(1), y.t().contiguous()

    check(fn, torch.randn(20, 20, dtype=torch.float64))


def test_kernels_around_an_aten_call_keep_their_order():
    def fn(x, w):
        y = torch.exp(x)
        z = y @ w
        return z * y + y.sum(), torch.relu(z) - x

    check(fn, torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64))


def test_refusals_say_why():
    with collect("refuse") as events:
        lowered(lambda x: (x.sum(0) * 2, x.cumsum(0), (x - x.sum(0)).sum(1)), torch.randn(40, 30))
    assert all(e.data["reason"] for e in events)


def _with_copy(gm, placeholder, value):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(output):
        gm.graph.call_function(torch.ops.aten.copy_.default, (placeholder, value))
    return gm


def test_writes_into_inputs_come_after_every_read_of_them():
    from aten_graphs import aten_graph
    from harness import compile_aten

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    gm = aten_graph(lambda x, y: (x * 2 + y, y.sum(), x + 1, y - x), x, y)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    output = next(n for n in gm.graph.nodes if n.op == "output")
    new_x, new_y = output.args[0][2], output.args[0][3]
    output.args = (output.args[0][:2],)
    _with_copy(_with_copy(gm, places[0], new_x), places[1], new_y)
    program = lower_graph(gm, GraphInfo("inference", "writes"))
    assert set(program.mutations) == {"arg0", "arg1"}
    call = compile_aten(gm, GraphInfo("inference", "writes"))
    a, b = x.clone(), y.clone()
    first, second = call(a, b)
    torch.testing.assert_close(first, x * 2 + y)
    torch.testing.assert_close(second, y.sum())
    torch.testing.assert_close(a, x + 1)
    torch.testing.assert_close(b, y - x)


def test_swapping_two_inputs():
    from aten_graphs import aten_graph
    from harness import compile_aten

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    gm = aten_graph(lambda x, y: (x + y,), x, y)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    _with_copy(_with_copy(gm, places[0], places[1]), places[1], places[0])
    call = compile_aten(gm, GraphInfo("inference", "swap"))
    a, b = x.clone(), y.clone()
    call(a, b)
    assert torch.equal(a, y) and torch.equal(b, x)


def test_nothing_unneeded_is_stored():
    steps = loop_steps(
        lowered(lambda x, w: torch.nn.functional.layer_norm(x, (32,), w), torch.randn(8, 32), torch.randn(32))
    )
    assert [len(s.writes) for s in steps] == [1]


def test_random_programs_agree_with_eager():
    random.seed(1)
    for _ in range(12):
        ops = [random.choice(["exp", "row", "col", "t", "view", "add", "softmax"]) for _ in range(6)]

        def fn(x, ops=tuple(ops)):
            kept = [x]
            for name in ops:
                y = kept[-1]
                y = {
                    "exp": lambda y: torch.tanh(y) + 1,
                    "row": lambda y: y - y.mean(-1, True),
                    "col": lambda y: y * y.sum(0, True) / 10,
                    "t": lambda y: y.t(),
                    "view": lambda y: (y * 2).reshape(y.shape[1], y.shape[0]),
                    "add": lambda y, k=tuple(kept): y + k[0].sum() / 9,
                    "softmax": lambda y: torch.softmax(y, 0),
                }[name](y)
                kept.append(y)
            return kept[-1], kept[len(kept) // 2] * 2, kept[-2].sum(1)

        check(fn, torch.randn(24, 20, dtype=torch.float64), tolerance=1e-9)


def test_a_sum_that_touches_nothing_of_a_kernel_is_read_beside_it_there():
    def fn(x, r, p, w0, w1, w2):
        a, b = p @ w0, p @ w1
        y = x * r
        found = y @ w2
        total = a + b  # shares no operand with y, but what reads it does
        return found, total, total * y + x, (total * y).sum(1)

    x, weights = torch.randn(512, 64), [torch.randn(64, 64) / 8 for _ in range(3)]
    check(fn, x, torch.randn(512, 1), x.flip(0), *weights, kernels=1, tolerance=1e-4)


def test_items_run_in_program_order_behind_what_they_need():
    fuser = Fuser([], (), ())
    fuser.items = ["first", "needs the last", "needs that", "needs nothing", "last"]
    fuser.before = [0, 0b10000, 0b10010, 0, 0]
    assert fuser._ordered() == ["first", "last", "needs the last", "needs that", "needs nothing"]
