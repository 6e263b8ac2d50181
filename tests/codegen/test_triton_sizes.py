"""Sizes as arguments of kernels: right for every shape, and built once."""

import re
import struct

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton_launches import check, launches

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.events import collect
from dynamotor.codegen import triton_sizes
from dynamotor.codegen.triton_kernel import TritonFunction
from dynamotor.codegen.triton_ops import HELPERS, mark
from dynamotor.codegen.triton_plan import GpuTuning
from dynamotor.runtime.triton_build import TritonJob, start_kernel, stop_workers

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
R = torch.randn


@pytest.fixture(autouse=True)
def nothing_known():
    triton_sizes.forget()
    yield
    triton_sizes.forget()


def settled(*numbers, vary=True):
    text = f"@triton.jit\ndef kernel(p0):\n    x = {' + '.join(map(mark, numbers))}\n"
    with config.patch(size_arguments=vary):
        f = triton_sizes.settle(TritonFunction("kernel", text, ("*fp32",), 1, 4))
    return f.source.split("x = ")[1].strip(), f.signature[1:], f.numbers


def test_numbers_are_literals_until_a_second_shape_shows_which_differ():
    assert settled(768, 64, 64, 768, vary=False) == ("768 + 64 + 64 + 768", (), ())
    assert settled(768, 64, 64, 768) == ("768 + 64 + 64 + 768", (), ())  # what is there is used
    assert settled(768, 72, 72, 768) == ("768 + n0 + n0 + 768", ("i32",), (72,))
    assert settled(768, 80, 80, 768) == ("768 + n0 + n0 + 768", ("i32:16",), (80,))
    assert settled(768, 81, 82, 768) == ("768 + n0 + n1 + 768", ("i32", "i32"), (81, 82))
    assert settled(768, 83, 84, 768) == ("768 + n0 + n1 + 768", ("i32", "i32"), (83, 84))
    assert settled(768, 85, 85, 768, vary=False) == ("768 + 85 + 85 + 768", (), ())


def test_the_nearest_kernel_says_what_an_argument_is():
    settled(768, 64, vary=False)
    settled(3072, 64, vary=False)
    assert settled(3072, 72)[0] == "3072 + n0" and settled(768, 72)[0] == "768 + n0"


def test_a_new_text_takes_numbers_that_no_kernel_had_as_arguments():
    settled(768, 5, vary=False)
    assert settled(5, 768, 96)[0] == "5 + 768 + n0"


def test_wide_negative_and_fractional_numbers():
    settled(1, 2, "0.5", vary=False)
    text, signature, numbers = settled(-7, 1 << 31, "0.25")
    assert text == "n0 + n1 + n2.to(tl.float32, bitcast=True)" and signature == ("i32", "i64:16", "i32")
    assert numbers[:2] == (-7, 1 << 31) and struct.pack("<i", numbers[2]) == struct.pack("<f", 0.25)
    assert settled(5, -6, vary=False)[0] == "5 - 6"


def test_the_arguments_put_back_give_the_kernel_of_that_shape():
    def fn(x, w):
        return torch.softmax(x * w + 1, -1), (x - w).sum(0), torch.cat([x, x * 2], 1)

    shapes = [(40, 96), (41, 112), (56, 208), (24, 51), (130, 70)]
    literal = {}
    for shape in shapes:
        literal[shape] = [s.function.source for s in launches(fn, R(shape), R(shape[1])).steps]
        triton_sizes.forget()
    with_arguments = 0
    for n, shape in enumerate(shapes):
        with config.patch(size_arguments=n > 0):
            functions = [s.function for s in launches(fn, R(shape), R(shape[1])).steps]
        for f, wanted in zip(functions, literal[shape], strict=True):
            with_arguments += bool(f.numbers)
            text = f.source
            for place, number in enumerate(f.numbers):
                fraction = struct.unpack("<f", struct.pack("<I", number & 0xFFFFFFFF))[0]
                text = text.replace(f"n{place}.to(tl.float32, bitcast=True)", repr(fraction))
                text = re.sub(rf"\bn{place}\b", str(number), text)
            body = text.replace("+ -", "- ").split("\n", 2)[2]
            assert body == wanted.split("\n", 2)[2]
    assert with_arguments >= 4


@pytest.mark.slow  # test_further_shapes_of_a_callable_build_nothing compares a few
@pytest.mark.parametrize("programs", [2, 64])
def test_results_for_many_shapes(programs):
    tuning = GpuTuning(programs=programs)
    fns = [
        lambda x: torch.softmax(x, -1).transpose(0, 1) * 2,
        lambda x: torch.layer_norm(x, x.shape[-1:]) + x.mean(0),
        lambda x: torch.nn.functional.pad(x, (1, 2, 3, 0))[1:, ::2],
        lambda x: x.cumsum(1) + x.argmax(1, keepdim=True),
        lambda x: torch.nn.functional.gelu(x).mean() + x.flip(0).amax(1),
        lambda x: torch.cat([x, x[:, :5]], 1).reshape(-1, 2).sum(1),
        lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)].t().contiguous(),
    ]
    for fn in fns:
        for n, shape in enumerate([(48, 64), (50, 64), (33, 65), (96, 129), (7, 1000), (1, 33), (64, 50)]):
            with config.patch(size_arguments=n > 0):
                check(
                    fn, R(shape[0], shape[1] + shape[1] % 2 + 1).contiguous(), tolerance=2e-5, tuning=tuning
                )


def kernels_of(call, x):
    with collect("code") as events:
        call(x).sum().backward()
    return {name for e in events for name in e.data["kernels"]}


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_further_shapes_of_a_callable_build_nothing(dynamic):
    def fn(x):
        return torch.nn.functional.gelu(x) * torch.softmax(x, -1)

    call, seen, new = dynamotor.compile(fn, dynamic=dynamic, options={"target": "triton"}), set(), []
    for columns in (34, 42, 50, 58):
        found = kernels_of(call, R(32, columns, requires_grad=True))
        new.append(len(found - seen))
        seen |= found
    assert (
        new[0]
        and [bool(n) for n in new[1:]]
        == {None: [True, False, False], True: [False] * 3, False: [True] * 3}[dynamic]
    )


def test_a_callable_of_one_shape_keeps_literals():
    with collect("code") as events:
        for _ in range(3):
            dynamotor.compile(lambda x: x.exp() + 1, options={"target": "triton"})(R(100, 30))
            dynamotor.reset()  # functions of one code share programs
    assert len(events) == 3 and all("n0" not in e.data["triton"].split("def dm_")[1] for e in events)


def test_kernels_with_arguments_are_built_for_a_gpu(tmp_path):
    fn, jobs = (lambda x: torch.softmax(x, -1) * x.mean()), []
    for n, rows in enumerate((512, 640, 333)):
        with config.patch(size_arguments=n > 0):
            jobs += [s.function for s in launches(fn, R(rows, 768)).steps]
    assert any(f.numbers for f in jobs)
    with config.patch(cache_dir=str(tmp_path)):
        try:
            for f in {f.name: f for f in jobs}.values():
                assert (
                    start_kernel(TritonJob(HELPERS + f.source, f.name, f.signature, f.warps, 90))
                    .result()
                    .cubin
                )
        finally:
            stop_workers()
