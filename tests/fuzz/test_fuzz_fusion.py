"""The fuzzer of tensor programs: some of its programs, faults that it must find, and the programs that it cuts them down
to.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernels import forget_kernels

from bench.json_worker import JsonWorker
from dynamotor.codegen import cpp_body, cpp_kernel, gpu_program, triton_gemm_sites
from dynamotor.lower import index_expr, verify_program
from fuzz import bounds, fusion, fuzzers, ops, place, report, trial, workers
from fuzz.compare import Outcome, differences, links, observe
from fuzz.generate import Generator
from fuzz.program import Input, Program, Step
from fuzz.reduce import kind, reduce
from fuzz.trial import targets


def chunk(seed, count, target):
    return [fusion.generated(seed, n, target) for n in range(count)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", targets())
def test_programs_of_a_fixed_seed_are_right(target):
    verdicts = fusion.judged(chunk(4, 4 if target in trial.INTERPRETED else 16, target), target)
    assert {v.trial.name: v.problems for v in verdicts if v.problems} == {}


def test_programs_for_a_gpu_find_what_their_kernels_do_not_write(monkeypatch):
    """Moved to a device and built as users' programs are: as on a GPU, here on the CPU in the interpreter."""
    monkeypatch.setattr(trial, "on_device", lambda name: place.on_device("cpu"))
    monkeypatch.setitem(trial.TARGETS, "cuda", {"target": "triton"})
    programs = [
        Program((Input((2, 9), layout="transposed", grad=True),), (Step(text, (0,)),), (1,), target="cuda")
        for text in ("{0}.sum(-1)", "{0}.exp() + torch.arange(9)")
    ]
    assert fusion.problems(programs, "cuda") == [[], []]
    monkeypatch.setattr(gpu_program, "interpreted", lambda f, ints: lambda *args: None)
    assert "nan compiled" in fusion.problems(programs[:1], "cuda")[0][0]


def test_a_seed_gives_the_same_program_and_the_same_inputs():
    one, other = Generator(7).program(), Generator(7).program()
    assert one == other and one.source() == other.source()
    for a, b in zip(one.make_inputs(), other.make_inputs(), strict=True):
        assert torch.equal(a, b)


def dropped_stores(monkeypatch):
    """The first store of each pass over a row is never written."""
    plain = cpp_kernel.Emitter.store

    def store(self, s, scope):
        if s.buffer != self.kernel.params[-1][0]:
            plain(self, s, scope)

    monkeypatch.setattr(cpp_kernel.Emitter, "store", store)
    forget_kernels(monkeypatch)


def test_a_store_that_is_missing_is_found_and_cut_down(monkeypatch):
    dropped_stores(monkeypatch)
    programs = chunk(2, 8, "portable")
    wrong = [p for p, found in zip(programs, fusion.problems(programs, "portable"), strict=True) if found]
    assert wrong
    large = max(wrong, key=lambda program: len(program.steps))
    small = reduce(large, lambda some: fusion.problems(some, "portable"))
    assert len(small.steps) <= 1 and len(small.inputs) <= 2


def test_the_report_is_a_test_that_fails_as_the_program_does(monkeypatch):
    dropped_stores(monkeypatch)
    program = Program((Input((2, 3)),), (Step("{0}.exp()", (0,)),), (1,), target="portable")
    finding = fuzzers.finding(program, fusion.problems([program], "portable")[0])
    scope: dict = {}
    exec(report.HEADER + finding["text"], scope)
    test = next(value for name, value in scope.items() if name.startswith("test_found"))
    with pytest.raises(AssertionError):
        test()


def test_a_reduction_keeps_the_way_of_failing():
    steps = (
        Step("{0} * 2", (0,)),
        Step("{0}.exp()", (2,)),
        Step("{0}.sum(-1) + {1}", (3, 1)),
        Step("{0}.tanh()", (2,)),
    )
    program = Program((Input((64, 17), "bfloat16", "ties", "transposed"), Input((64,))), steps, (4, 5))

    def examine(programs):
        """As if `exp` were wrong wherever a dimension is larger than 2."""
        found = []
        for one in programs:
            one.function()(*one.make_inputs())
            large = any(n > 2 for i in one.inputs for n in i.shape)
            found.append(["output 0: 3 of 9 elements differ"] if large and "exp" in one.source() else [])
        return found

    small = reduce(program, examine)
    assert small.source() == "def f(x0):\n    v1 = x0.exp()\n    return (v1,)\n"
    assert small.inputs == (Input((3,)),)


def test_problems_of_the_same_kind_differ_in_numbers_only():
    assert kind("output 0: 3 of 9 elements differ, the first at (0, 1): 2.0 in eager, nan compiled") == kind(
        "output 2: 1 of 4 elements differ, the first at (3,): inf in eager, -1e-05 compiled"
    )
    assert kind("output 0: strides (1, 2) in eager, (2, 1) compiled, shape (2, 2)") != kind(
        "output 0: 3 of 9 elements differ"
    )
    assert kind("eager raised nothing, compiled raised ValueError: 3") != kind(
        "eager raised nothing, compiled raised KeyError: 3"
    )


def made_of(kind, seed):
    """A program of one line of a kind, over an input that asks for a gradient."""
    generator = Generator(seed)
    generator.trains = True
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        generator.new_input(generator._space(), "float32", "random")
        for _ in range(20):
            if not generator.steps and not generator.spoilt:
                generator._try(kind)
    return generator._finish()


@pytest.mark.slow
def test_positions_that_are_rounded_towards_zero_are_found_behind_regroupings(monkeypatch):
    def split(self, n):
        whole = {a: c // n for a, c in self.terms.items() if index_expr.divides(n, c)}
        rest = {a: c for a, c in self.terms.items() if a not in whole}
        return index_expr.Index(whole, self.const // n), index_expr.Index(rest, self.const % n)

    programs = [made_of(ops.regrouped, seed) for seed in range(24)]
    assert not any(fusion.problems(programs, "portable"))
    monkeypatch.setattr(index_expr.Index, "_split", split)
    monkeypatch.setattr(cpp_body, "may_be_negative", lambda atom: False)
    monkeypatch.setattr(verify_program, "_atom_bounds", lambda atom, facts: atom.bounds)
    forget_kernels(monkeypatch)
    assert any(fusion.problems(programs, "portable"))


def test_a_write_through_a_regrouping_that_is_lost_is_found(monkeypatch):
    programs = [made_of(ops.write_regrouped, seed) for seed in range(12)]
    assert any(program.steps for program in programs) and not any(fusion.problems(programs, "portable"))
    dropped_stores(monkeypatch)
    assert any(fusion.problems(programs, "portable"))


def normed(x):
    """What hangs on zeros of a norm: numbers that are their row's mean."""
    y = F.layer_norm(x, (8,))
    return y.count_nonzero(1), torch.copysign(torch.ones(3, 8), y), y


ROUNDED = (
    (
        {"dtype": "float16", "fill": "infinite"},
        "({0} * {0}).prod(-1)",
    ),  # a product that vanishes meets infinity
    ({"dtype": "float64"}, "torch.softmax({0}, 0).sum((0, 1)).to(torch.int64)"),  # 64, to the last digit
)


@pytest.mark.parametrize("given, text", ROUNDED)
def test_what_hangs_on_how_a_reduction_was_rounded_is_not_called_wrong(given, text):
    steps = (Step(text, (0,)),)
    programs = [
        Program((Input((16, 64, 5)[: 3 - (text[0] == "t")], **given),), steps, (1,), seed=n) for n in range(8)
    ]
    assert not any(fusion.problems(programs, "portable"))


def test_the_sign_of_nan_among_numbers_is_undefined():
    x = torch.tensor([[1.0, torch.nan], [2, 3]])
    run = functools.partial(observe, lambda x: torch.copysign(x[1], x.amin(-1, keepdim=True)), [x], ())
    judged = [
        differences(run(), Outcome([value], [x]), functools.partial(bounds.spread, run))
        for value in (torch.tensor([[2.0, 3], [2, 3]]), torch.tensor([[-2.0, -3], [2, 3]]), -x.new_ones(2, 2))
    ]
    assert judged[:2] == [[], []] and judged[2]


def test_a_mean_whose_terms_cancel_may_be_zero_and_one_whose_terms_do_not_may_not():
    """Of multiples of a tenth eager's order leaves a rounding, where another order leaves nothing."""
    x = torch.tensor([[0.4, 1.4, -1.7, 0, -0.3, 0.1, 0.1], [0.4, 1.4, -1.7, 0, -0.3, 0.1, 0.2]])

    def judged(got):
        run = functools.partial(observe, lambda x: x.mean(-1).bool(), [x], ())
        return differences(run(), Outcome([torch.tensor(got)], [x]), functools.partial(bounds.spread, run))

    assert x.mean(-1).bool().all()
    assert judged([True, True]) == judged([False, True]) == []
    assert judged([True, False]) and judged([False, False])


def test_what_hangs_on_a_rounded_norm_is_not_called_wrong_and_what_does_not_is():
    x = torch.tensor([[2.0, -2, 1, 0, 0, -1, 1, 0], [0.1] * 8, [0, 1, 2, 3, 4, 5, 6, 7]])

    def judged(got):
        run = functools.partial(observe, normed, [x], ())
        return differences(run(), got, lambda *runs: bounds.spread(run, *runs))

    exact = (x.double() - x.double().mean(1, keepdim=True)) / (x.double().var(1, correction=0) + 1e-5).sqrt()[
        :, None
    ]
    y = exact.float().masked_fill(exact.abs() < 1e-6, 0)
    plain = Outcome([y.count_nonzero(1), torch.copysign(torch.ones(3, 8), y), y], [x])
    assert judged(plain) == []
    y = y.clone()
    y[2, 3] *= -1
    y[2, 5] += 1e-4
    wrong = judged(
        Outcome([plain.outputs[0] - torch.tensor([0, 0, 1]), torch.copysign(torch.ones(3, 8), y), y], [x])
    )
    assert len(wrong) == 3


def test_what_hangs_on_whether_nan_meets_the_padding_is_not_called_wrong():
    weights = Input((2, 5, 1, 1), "bfloat16", "nan")
    steps = (Step("F.conv2d({1}, {0}, padding=2, dilation=2)", (0, 1)),)
    program = Program((weights, Input((1, 5, 4, 2), "bfloat16")), steps, (2,), seed=15001080528)
    assert fusion.problems([program], "portable") == [[]]


def test_eager_runs_again_where_gradients_are_zeros_without_memory():
    def run():
        return observe(lambda x: (x * 2).sgn(), [torch.ones(4).bfloat16().requires_grad_()], (0,))

    assert [one.error for one in bounds.spread(run, range(4))] == [None] * 4


def test_memory_is_shared_by_bytes_whatever_the_types():
    x = torch.zeros(4, dtype=torch.complex64)
    assert links([x], [torch.view_as_real(x)[1:]]) == ["output 0 shares the memory of input 0 (8 bytes on)"]


@pytest.mark.slow
@pytest.mark.parametrize("eager_dies", [True, False])
def test_a_program_that_ends_eagers_own_process_is_not_a_finding(monkeypatch, eager_dies):
    """81001:58725: eager's `group_norm` of channels-last images whose weights alone ask for a gradient."""
    dies = f"""if True:
        import os, signal, sys
        line = sys.stdin.readline()
        if '"target": "eager"' in line and not {eager_dies}:
            print('{{"tally": {{}}}}', flush=True)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    monkeypatch.setattr(workers, "_start", lambda: JsonWorker([sys.executable, "-c", dies]))
    job = {"fuzzer": "fusion", "seed": 4, "start": 2, "count": 1, "target": "portable"}
    told = []
    found = workers.Workers(1, 60.0, told.append).run(iter([job]))
    assert (len(found.findings), found.tally["died in eager"]) == ((0, 1) if eager_dies else (1, 0))
    assert ("eager" if eager_dies else "the process died (-9)") in told[0]


@pytest.mark.parametrize(
    "text",
    ["torch.addcmul({0}, {1}, {1}, value=0.3)", "{0}.sub({1}, alpha=0.3)", "torch.lerp({0}, {1}, 0.3)"],
)
def test_a_product_that_is_added_may_be_rounded_once_or_twice(text):
    """91001:89087: `addcmul` gave zero here, and in eager (whose processor has FMA) the rounding error."""
    multiples, ties = Input((64, 16), fill="multiples"), Input((64, 16), fill="ties")
    steps = (Step(text, (0, 1)), Step("{0}.count_nonzero(0)", (2,)))
    programs = [Program((multiples, ties), steps, (3,), seed=n) for n in range(4)]
    for target in targets()[:3]:
        assert not any(fusion.problems(programs, target))


def test_a_template_that_keeps_the_kernel_of_its_map_is_found(monkeypatch):
    """The pass that joins equal maps takes it for that map: here of a product of a tensor with itself."""
    text = "torch.stack([({0} @ {0}).sigmoid() * i for i in range(4)])"
    program = Program((Input((16, 16), "bfloat16"),), (Step(text, (0,)),), (1,), target="templates")
    assert fusion.problems([program], "templates") == [[]]
    plain = triton_gemm_sites.template_step

    def keeping(given, site, tiling):
        step, old = plain(given, site, tiling), given.steps[site.consumer]
        args = tuple(name for name, _, _ in old.kernel.params)  # so that the step itself does not refuse it
        return replace(step, kernel=old.kernel, args=args)

    monkeypatch.setattr(triton_gemm_sites, "template_step", keeping)
    assert fusion.problems([program], "templates")[0]
