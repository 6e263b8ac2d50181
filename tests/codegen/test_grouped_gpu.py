"""The Triton kernels of `dynamotor::grouped_product`, in Triton's interpreter: compiled programs with CPU
tensors.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

import bench.verification  # noqa: F401  (registers the interpreter)
import dynamotor
from bench import moe, torchvision_stub
from bench.llm_rows import SMALL, model_of
from bench.triton_interpret import available
from dynamotor import config
from dynamotor.base.events import collect
from dynamotor.codegen import grouped_gpu

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not there as an interpreter")
SIZES = (5, 240, 72, 104)
COUNTS = ([33, 0, 130, 0, 77], [0, 64, 1, 0, 7])  # the rest of the rows has no group


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("form", moe.FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_form_is_as_exact_as_eager(dtype, form, counts):
    row = moe.check(dtype, "tf32x3", form, "", SIZES, moe.ends(counts, "cpu"))
    assert row["ok"], row


@pytest.mark.parametrize("how", ["bf16x6", "ieee", "tf32"])
def test_each_way_to_multiply(how):
    row = moe.check(torch.float32, how, "turned", "", SIZES, moe.ends(COUNTS[0], "cpu"))
    assert row["ok"], row


@pytest.mark.parametrize("sizes", [(3, 5, 40, 24), (3, 9, 2056, 8), (1, 300, 16, 8), (70, 200, 16, 16)])
def test_few_rows_long_sums_one_group_and_many(sizes):
    groups, rows = sizes[:2]
    counts = torch.bincount(torch.randint(groups, (rows,)), minlength=groups).tolist()
    for form in moe.FORMS:
        row = moe.check(torch.float32, "tf32x3", form, "", sizes, moe.ends(counts, "cpu"))
        assert row["ok"], row


def test_rows_behind_the_last_group_and_empty_groups_are_zeros():
    x, w = moe.operands("rows", torch.float32, "cpu", SIZES)
    offs = moe.ends([3, 0, 0, 5, 0], "cpu")
    assert not moe.run(x, w, offs)[8:].any()
    d = moe.run(x.t(), x, offs)
    assert not d[[1, 2, 4]].any() and d[0].any()


def test_ends_out_of_range_read_and_write_nothing_else():
    x, w = moe.operands("rows", torch.float32, "cpu", SIZES)
    offs = torch.tensor([-7, 20, 10, 1000, 1000], dtype=torch.int32)
    found = moe.run(x, w, offs)
    torch.testing.assert_close(found[:10], x[:10] @ w[1])
    torch.testing.assert_close(found[20:], x[20:] @ w[3])
    d = moe.run(x.t(), x, offs)
    torch.testing.assert_close(d[3], x[10:].t() @ x[10:])


def test_operands_in_rows_along_the_sum_are_products_of_three():
    def kind(form, how="auto"):
        a, b = moe.operands(form, torch.float32, "cpu", SIZES)
        out = moe.run(a, b, moe.ends(COUNTS[0], "cpu"))
        keys = [(tuple(t.shape), t.stride()) for t in (a, b, out)]
        return grouped_gpu.function_of(torch.float32, how, *keys)[0].source

    for form, how in (("turned", "tf32x3"), ("rows", "bf16x6"), ("weights", "bf16x6")):
        text = kind(form)
        assert f'input_precision="{how}"' in text and "acc += tl.dot" in text
        assert kind(form, "ieee") != text


def test_values_that_are_not_finite_and_gradients():
    for row in moe.behaviour("cpu"):
        assert row["ok"], row


@pytest.mark.parametrize("function", [torch._grouped_mm, F.grouped_mm])
@pytest.mark.parametrize("x_by_columns", [False, True])
@pytest.mark.parametrize("w_turned", [False, True])
def test_gradients_are_eagers_for_operands_of_any_layout(function, x_by_columns, w_turned):
    x, w = moe.operands("turned" if w_turned else "rows", torch.float32, "cpu", SIZES)
    x = x.t().contiguous().t() if x_by_columns else x
    offs = moe.ends(COUNTS[0], "cpu")

    def loss(x, w):
        return function(x * 2, w, offs=offs).tanh().square().mean()

    given = [t.requires_grad_() for t in (x, w)]
    with config.patch(target="triton", strict=True), collect("fallback") as events:
        found = torch.autograd.grad(dynamotor.compile(loss)(*given), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(moe.exact(wide[0] * 2, wide[1], offs).tanh().square().mean(), wide)
    assert not events
    for ours, theirs, t in zip(found, wanted, given, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-7)
        assert ours.stride() == t.stride()


@pytest.mark.parametrize("name", ["mixtral-like", "gpt-oss-like"])
def test_experts_of_transformers(name):
    torchvision_stub.prepare()
    torch.manual_seed(0)
    _, model = model_of(name, 32, {**SMALL, "num_hidden_layers": 1})
    ids = torch.randint(0, 256, (2, 24))

    def step(model):
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss

    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # grouped products of float64 there are none
    with config.patch(target="triton"), collect("code") as events:
        found = step(dynamotor.compile(model))
    torch.testing.assert_close(found.double(), step(wide).double(), rtol=1e-5, atol=1e-6)
    for (label, p), q in zip(model.named_parameters(), wide.parameters(), strict=True):
        scale = float(q.grad.abs().max())
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-4 * scale, msg=label)
    text = "\n".join(str(e.data) for e in events)
    assert text.count("dynamotor_grouped_product(") >= 6 and "_grouped_mm" not in text
    assert not any(word in text for word in (".item()", ".tolist()", ".cpu()", "_local_scalar_dense"))


def test_the_host_reads_no_ends(monkeypatch):
    """Ends without values (a meta tensor) reach the kernel as they are."""
    given = []
    monkeypatch.setattr(grouped_gpu, "launch", lambda *_: lambda *tensors: given.append(tensors))
    grouped_gpu._kernel.cache_clear()
    try:
        for form in moe.FORMS:
            a, b = moe.operands(form, torch.float32, "cpu", SIZES)
            out = torch.empty_like(moe.aten(a, b, moe.ends(COUNTS[0], "cpu")))
            offs = torch.empty(5, dtype=torch.int32, device="meta")
            grouped_gpu.grouped_product(a, b, offs, out=out)
            assert given.pop()[2] is offs
    finally:
        grouped_gpu._kernel.cache_clear()
