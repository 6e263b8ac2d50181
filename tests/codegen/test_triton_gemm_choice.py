"""Which products become templates: the stored table, timing with a clock that is made up, and the cache of
the findings.
"""

import functools
import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

import fake_cuda  # noqa: E402

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.errors import BackendError
from dynamotor.base.events import collect
from dynamotor.codegen import autotune, gemm_table, gpu_program, triton_gemm_choice
from dynamotor.codegen.gpu_program import GpuProgram
from dynamotor.codegen.triton import TritonStep
from dynamotor.codegen.triton_gemm import Tiling
from dynamotor.codegen.triton_gemm_choice import choose, tilings
from dynamotor.codegen.triton_gemm_sites import find_sites, template_step, trial
from dynamotor.graph.spec import GraphInfo, TensorSpec
from dynamotor.lower.program import ExternStep

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    with config.patch(cache_dir=str(tmp_path)):
        triton_gemm_choice.forget()
        yield
        triton_gemm_choice.forget()


def program_of(fn, *inputs):
    """The launches of a function as `choose` gets them; no product is computed."""
    seen = []

    def choose(program, gpu, tune=None):
        seen.append(program)
        raise BackendError("DM401", "seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_program.triton_gemm_choice, "choose", choose)
        with (
            torch.no_grad(),
            config.patch(target="triton", strict=True, check=False),
            pytest.raises(BackendError, match="seen"),
        ):
            dynamotor.compile(fn)(*inputs)
    return seen[0]


def layer():
    x, w, b = torch.randn(64, 48).to(BF16), torch.randn(96, 48), torch.randn(96).to(BF16)
    return program_of(lambda x, w, b: F.gelu(F.linear(x, w.to(BF16), b)), x, w, b)


def products(program):
    """(calls of the library, templates) of a program."""
    externs = [s for s in program.steps if isinstance(s, ExternStep)]
    return len(externs), [
        s.function for s in program.steps if isinstance(s, TritonStep) and s.function.stages
    ]


class Clock:
    """Says how long programs take: the library 1 ms, templates what `times` gives their number."""

    def __init__(self, times):
        self.times, self.asked = times, 0

    def __call__(self, programs):
        self.asked += 1
        assert products(programs[0]) == (1, []) and all(
            products(p)[0] == 0 and len(products(p)[1]) == 1 for p in programs[1:]
        )
        assert len({p.inputs for p in programs}) == 1
        assert all(
            [p.buffers[o.name].spec for o in p.outputs]
            == [programs[0].buffers[o.name].spec for o in programs[0].outputs]
            for p in programs
        )
        return [1.0, *(self.times(n) for n in range(len(programs) - 1))]


def test_nothing_is_a_template_without_a_row_or_a_clock():
    program = layer()
    assert choose(program, "NVIDIA H200") is program


def test_the_fastest_candidate_is_taken_and_remembered():
    program, clock = layer(), Clock(lambda n: 0.5 if n == 3 else 2.0)
    with collect("autotune") as events:
        library, (template,) = products(choose(program, "some GPU", clock))
    wanted = tilings((1, 64, 96, 48), BF16)[3]
    assert library == 0 and (template.warps, template.stages) == (wanted.warps, wanted.stages)
    assert (
        events[0].data["wins"]
        and events[0].data["template_ms"] == 0.5
        and events[0].data["library_ms"] == 1.0
    )
    choose(program, "some GPU", clock)
    assert clock.asked == 1
    triton_gemm_choice.forget()  # another process
    assert products(choose(program, "some GPU", clock))[0] == 0 and clock.asked == 1
    choose(program, "another GPU", clock)
    assert clock.asked == 2


def test_what_was_found_for_aligned_rows_says_nothing_of_others():
    x, w, clock = torch.randn(64, 48).to(BF16), torch.randn(48, 96).to(BF16), Clock(lambda n: 2.0)
    aligned, odd = (program_of(lambda x, w: x[:, at : at + 32] @ w[:32], x, w) for at in (8, 1))  # noqa: B023
    for asked, program in ((1, aligned), (2, odd), (2, aligned)):
        assert choose(program, "some GPU", clock) is program and clock.asked == asked


@pytest.mark.parametrize("times", [lambda n: 0.98, lambda n: float("inf"), lambda n: 3.0])
def test_the_library_stays_where_it_is_about_as_fast(times):
    program, clock = layer(), Clock(times)
    assert choose(program, "some GPU", clock) is program
    triton_gemm_choice.forget()
    assert choose(program, "some GPU", clock) is program and clock.asked == 1


def test_with_and_without_the_casts_of_operands():
    program = layer()
    (site,) = find_sites(program)
    with_cast, without = site.variants()
    assert (
        "cast f32" in with_cast.label()
        and "cast" not in without.label()
        and len(with_cast.steps()) == len(without.steps()) + 1
    )
    count = len(tilings((1, 64, 96, 48), BF16))
    found = choose(program, "some GPU", Clock(lambda n: 0.5 if n == count else 2.0))
    assert len(found.steps) == len(program.steps) - 1  # the cast stays, product and gelu are one


def rows_are(monkeypatch, rows):
    """The stored table for the rest of the test."""
    gemm_table._layers.cache_clear()
    monkeypatch.setattr(gemm_table, "table", lambda: rows)


@pytest.fixture(autouse=True)
def read_again():
    yield
    gemm_table._layers.cache_clear()


def test_a_row_speaks_for_the_same_layer_with_about_as_many_samples(monkeypatch):
    small, large = Tiling(64, 64, 64), Tiling(128, 128, 64)
    rows = {
        "G bf16 1x1000x768x64 nt+bias": small,
        "G bf16 1x4000x768x64 nt+bias": large,
        "G bf16 1x9000x768x64 nt+bias": None,
    }
    rows |= {"G bf16 1x768x64x1000 tn": small, "G bf16 32x49x49x32 nn": small}
    rows_are(monkeypatch, rows)
    for samples, tiling in (
        (500, small),
        (1900, small),
        (2100, large),
        (7000, None),
        (499, None),
        (18001, None),
    ):
        assert gemm_table.nearest(f"G bf16 1x{samples}x768x64 nt+bias") == tiling
    assert (
        gemm_table.nearest("G bf16 1x768x64x1500 tn") == gemm_table.nearest("G bf16 48x49x49x32 nn") == small
    )
    others = (
        "H bf16 1x1000x768x64 nt+bias",
        "G bf16 1x1000x769x64 nt+bias",
        "G bf16 1x1000x768x64 nt",
        "G f16 1x1000x768x64 nt+bias",
    )
    assert all(
        gemm_table.nearest(key) is None
        for key in (*others, "G bf16 1x769x64x1000 tn", "G bf16 32x50x49x32 nn")
    )
    assert gemm_table.stored("G bf16 1x1100x768x64 nt+bias") is None


def test_the_table_can_be_left_out():
    key = next(key for key, tiling in gemm_table.table().items() if tiling is not None)
    with gemm_table.ignored():
        assert gemm_table.stored(key) is gemm_table.nearest(key) is None and not gemm_table.knows(
            "NVIDIA H200"
        )
    assert gemm_table.stored(key) is not None and gemm_table.nearest(key) is not None


def test_similar_rows_are_followed_unless_products_are_timed(monkeypatch):
    program = layer()
    label = find_sites(program)[0].plain.label()
    similar = label.replace("1x64x96x48", "1x100x96x48")
    assert similar != label
    rows_are(monkeypatch, {f"NVIDIA H200 {similar}": Tiling(16, 32, 16)})
    assert products(choose(program, "NVIDIA H200"))[0] == 0
    assert products(choose(program, "NVIDIA H200", Clock(lambda n: 2.0)))[0] == 1


def test_rows_of_the_table_are_followed(tmp_path, monkeypatch):
    program = layer()
    label = find_sites(program)[0].plain.label()
    rows_are(monkeypatch, {f"NVIDIA H200 {label}": Tiling(16, 32, 16)})
    assert products(choose(program, "NVIDIA H200"))[0] == 0
    assert choose(program, "NVIDIA H100 80GB HBM3") is program


def test_rows_that_were_measured_with_other_strides_are_not_followed(monkeypatch):
    x, w = torch.randn(64, 48).to(BF16), torch.randn(48, 96).to(BF16)
    aligned, odd = (
        program_of(lambda x, w: F.relu(x @ w), x, w),
        program_of(lambda x, w: F.relu(x[:, 1:41] @ w[:40]), x, w),
    )
    labels = [find_sites(p)[0].label() for p in (aligned, odd)]
    for tma, wanted in ((True, [0, 1]), (False, [0, 0])):
        rows = {f"NVIDIA H200 {label}": Tiling(16, 32, 16, tma=tma) for label in labels}
        rows_are(monkeypatch, rows)
        assert [products(choose(p, "NVIDIA H200"))[0] for p in (aligned, odd)] == wanted


def test_the_stored_table_can_be_read():
    assert all(
        isinstance(tiling, Tiling | None) and len(key.split(" > ")[0].split()) >= 4
        for key, tiling in gemm_table.table().items()
    )


def test_labels_of_today_find_their_rows(monkeypatch):
    """A change to lowering or fusion that changes labels leaves rows behind, without a wrong answer to tell
    of it.
    """
    labels = []

    def choose(program, gpu, tune=None):
        labels.append([site.label() for site in find_sites(program)])
        raise InterruptedError  # nothing is run

    monkeypatch.setattr(gpu_program.triton_gemm_choice, "choose", choose)
    e = functools.partial(torch.empty, dtype=BF16)
    last = {"memory_format": torch.channels_last}
    x, w, r = e(32, 64, 56, 56).to(**last), e(64, 64, 3, 3).to(**last), e(32, 64, 56, 56).to(**last)
    wide, w1, norm = e(32, 256, 56, 56).to(**last), e(256, 64, 1, 1).to(**last), [e(64) for _ in range(4)]
    for fn, inputs in [
        (lambda x, w, *n: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), *n)), (x, w, *norm)),
        (
            lambda x, w, r, *n: F.relu(F.batch_norm(F.conv2d(x, w), *n) + r),
            (r, w1, wide, *(e(256) for _ in range(4))),
        ),
        (lambda x, w, b: F.gelu(F.linear(x, w, b)), (e(32, 128, 768), e(3072, 768), e(3072))),
        (lambda g, x: (g.t() @ x).float(), (e(1568, 4096), e(1568, 1024))),
        (lambda q, k: torch.bmm(q, k.transpose(1, 2)), (e(1024, 49, 32), e(1024, 49, 32))),
    ]:
        with (
            torch.no_grad(),
            config.patch(target="triton", strict=True, check=False),
            pytest.raises(Exception, match="InterruptedError"),
        ):
            dynamotor.compile(lambda *given: fn(*given))(*inputs)  # noqa: B023
    assert len(labels) == 5 and all(gemm_table.stored(f"NVIDIA H200 {label}") for (label,) in labels), labels


def test_candidates_fit_the_product():
    assert all(t.m <= 16 and t.n >= 16 for t in tilings((1, 8, 4096, 4096), BF16)) and tilings(
        (1, 8, 4096, 4096), BF16
    )
    assert len(tilings((1, 4096, 4096, 4096), BF16)) >= 12
    assert not any(t.persistent for t in tilings((1, 512, 512, 4096), BF16))
    assert max(t.k for t in tilings((1, 4096, 4096, 4096), torch.float32)) == 64
    assert tilings((1, 1, 1, 1), BF16)


def test_candidates_suit_the_operands():
    x, w = torch.randn(2048, 2048).to(BF16), torch.randn(2048, 2056).to(BF16)
    for start, wanted in ((8, True), (4, False)):  # 16 bytes or 8 into w
        (site,) = find_sites(program_of(lambda x, w: x @ w[:, start : start + 2048], x, w))  # noqa: B023
        found = tilings(site.product.size, BF16, site.product)
        assert any(t.tma for t in found) == wanted and any(t.persistent for t in found)
    images, kernel = (
        t.to(BF16).to(memory_format=torch.channels_last)
        for t in (torch.randn(1, 32, 34, 34), torch.randn(64, 32, 3, 3))
    )
    (site,) = find_sites(program_of(lambda x, w: F.relu(F.conv2d(x, w)), images, kernel))
    found = tilings(site.product.size, BF16, site.product)
    assert any(t.tma for t in found) and not any(t.persistent or t.k != 32 for t in found)


def test_convolutions_are_chosen_the_same_way():
    images, kernel = (
        t.to(BF16).to(memory_format=torch.channels_last)
        for t in (torch.randn(2, 32, 9, 9), torch.randn(16, 32, 3, 3))
    )
    program = program_of(lambda x, w: F.relu(F.conv2d(x, w)), images, kernel)
    assert products(program) == (1, [])
    library, templates = products(choose(program, "some GPU", Clock(lambda n: 0.5 if n == 0 else 2.0)))
    assert library == 0 and len(templates) == 1
    assert choose(program, "a slow GPU", Clock(lambda n: 2.0)) is program


def test_a_trial_reads_and_leaves_what_the_site_does():
    def fn(x, w, r):
        y = x @ w
        return F.relu(y) + r, y

    program = program_of(
        fn, torch.randn(32, 16).to(BF16), torch.randn(16, 32).to(BF16), torch.randn(32, 32).to(BF16)
    )
    (site,) = find_sites(program)
    alone = trial(program, site, [program.steps[n] for n in site.steps()])
    assert len(alone.inputs) == 3 and len(alone.outputs) == 2 and json.dumps(alone.inputs)
    specs = [alone.buffers[name].spec for name in alone.inputs]
    assert [t.stride() for t in autotune.random_inputs(specs)] == [s.stride for s in specs]


def test_random_inputs_lie_as_the_programs_own():
    expanded = TensorSpec((4, 3), (0, 1), torch.bfloat16)  # all rows share their place
    apart, turned = TensorSpec((4, 3), (8, 1), torch.float32), TensorSpec((3, 4), (1, 3), torch.float16)
    found = autotune.random_inputs([expanded, apart, turned])
    assert [t.stride() for t in found] == [(0, 1), (8, 1), (1, 3)] and all(t.float().std() > 0 for t in found)


def test_random_inputs_may_be_positions():
    x, i = autotune.random_inputs(
        [TensorSpec.dense((4,), torch.float32), TensorSpec.dense((4,), torch.int64)]
    )
    assert x.std() > 0 and not i.any()


@pytest.mark.parametrize(
    "mode, on", [("max-autotune", True), ("max-autotune-no-cudagraphs", True), ("reduce-overhead", False)]
)
def test_modes_turn_it_on(mode, on):
    seen = []

    def backend(gm, inputs):
        seen.append(config.max_autotune)
        return gm.forward

    dynamotor.compile(lambda x: x + 1, backend=backend, mode=mode)(torch.ones(2))
    assert seen == [on]


def test_the_programs_that_are_timed_give_the_same():
    program = layer()
    (site,) = find_sites(program)
    library = trial(program, site, [program.steps[n] for n in site.steps()])
    template = trial(program, site, [template_step(program, site, Tiling(32, 32, 16))])
    inputs = [
        torch.randn_like(t)
        for t in autotune.random_inputs([library.buffers[name].spec for name in library.inputs])
    ]
    info, device = GraphInfo("inference", "trial"), torch.device("cpu")
    results = [
        GpuProgram(p, info, device, gpu_program._raise, expanded=True)(*inputs) for p in (library, template)
    ]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_programs_are_timed_in_turns_and_one_that_does_not_run_is_out(monkeypatch):
    fake_cuda.install(monkeypatch)
    program = layer()
    (site,) = find_sites(program)
    library = trial(program, site, [program.steps[n] for n in site.steps()])
    template = trial(program, site, [template_step(program, site, Tiling(64, 64, 64))])
    info, device = GraphInfo("inference", "trial"), torch.device("cpu")
    times = GpuProgram(library, info, device, gpu_program._raise, expanded=True)._time(
        info, [library, template], rounds=2
    )
    assert times == [1.0, 1.0]
    placed = gpu_program._placed(
        library, torch.device("cuda", 0)
    )  # an input on the CPU would be copied in every timed call
    assert (
        {b.spec.device.type for b in placed.buffers.values()}
        == {"cuda"}
        != {b.spec.device.type for b in library.buffers.values()}
    )

    def broken(*inputs):
        raise RuntimeError("out of shared memory")

    never = float("inf")
    right, slightly, wrong = (lambda x, by=by: (x * by,) for by in (2, 2.01, -2))
    x = torch.randn(40, 30).expand(2, 40, 30)
    assert autotune.time_calls([right, broken, slightly, wrong], [x], device) == [1.0, never, 1.0, never]
    assert autotune.time_calls([broken, right], [x], device) == [
        never,
        never,
    ]  # no reference for right results


def test_what_a_candidate_leaves_in_its_inputs_counts(monkeypatch):
    fake_cuda.install(monkeypatch)

    def fn(x, w, r):
        y = F.silu(x @ w)
        r.add_(y)
        return y

    program = program_of(
        fn, torch.randn(32, 16).to(BF16), torch.randn(16, 32).to(BF16), torch.randn(32, 32).to(BF16)
    )
    (site,) = find_sites(program)
    library = trial(program, site, [program.steps[n] for n in site.steps()])
    template = trial(program, site, [template_step(program, site, Tiling(32, 32, 16))])
    assert (
        library.inputs == template.inputs
        and len(library.inputs) == 3
        and library.mutations == template.mutations != ()
    )
    info, device = GraphInfo("inference", "trial"), torch.device("cpu")
    calls = [GpuProgram(p, info, device, gpu_program._raise, expanded=True) for p in (library, template)]
    inputs = autotune.random_inputs([library.buffers[name].spec for name in library.inputs])
    assert autotune.time_calls(
        [*calls, lambda *given: calls[1](*(t.clone() for t in given))], inputs, device
    ) == [1, 1, float("inf")]
