"""Attention as products of scores, as transformers' "eager" writes it, on a GPU (its kernels in Triton's
interpreter): no scores, and eager's results and gradients or better.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F

import bench.verification  # noqa: F401  (registers the interpreter)
import dynamotor
from bench import torchvision_stub
from bench.llm_rows import SMALL, model_of
from bench.triton_interpret import available
from dynamotor import config
from dynamotor.base.events import collect, counters

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not there as an interpreter")
B, H, G, Q, D = 1, 4, 2, 300, 16
LEAST = torch.finfo(torch.bfloat16).min
IDS = torch.randint(1, 4, (B, Q)).sort().values
KEEP = torch.arange(Q) >= torch.tensor([[70]])  # padded on the left, so that rows see nothing

MASKS = {
    "none": None,
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: (k <= q) & (k > q - 90),
    "documents": lambda q, k: (k <= q) & (IDS.to(q)[:, None, :, None] == IDS[:, None, None, :]),
    "padding": lambda q, k: (k <= q) & KEEP[:, None, None, :],
}


def mask_of(name, dtype):
    """As transformers makes it."""
    if MASKS[name] is None:
        return None
    places = torch.arange(Q)
    seen = MASKS[name](places[None, None, :, None], places[None, None, None, :])
    seen = seen.expand(B, -1, Q, Q)
    return torch.where(seen, torch.zeros((), dtype=dtype), torch.finfo(torch.bfloat16).min)


def repeated(t):
    return t[:, :, None].expand(B, G, H // G, *t.shape[2:]).reshape(B, H, *t.shape[2:])


def attend(name, change=lambda weights: weights, dtype=torch.bfloat16, softmax_type=None):
    """change: a function of the weights."""

    def f(q, k, v, sinks=None):
        k, v = repeated(k), repeated(v)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        mask = mask_of(name, scores.dtype)
        scores = scores if mask is None else scores + mask
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(B, -1, Q, -1)
            scores = torch.cat([scores, column], dim=-1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
        weights = F.softmax(scores, dim=-1, dtype=softmax_type or scores.dtype)
        weights = weights if sinks is None else weights[..., :-1]
        weights = change(weights).to(v.dtype)
        return torch.matmul(weights, v).transpose(1, 2).contiguous()

    return f


def operands(sinks, dtype=torch.bfloat16):
    torch.manual_seed(0)
    given = [torch.randn(B, Q, n, D, dtype=dtype).transpose(1, 2).requires_grad_() for n in (H, G, G)]
    return [*given, torch.randn(H, dtype=dtype).requires_grad_()] if sinks else given


def taken():
    return {kind: n for kind, n in counters["eager attention"].items() if n}


def run(f, given):
    out = f(*given)
    grad = torch.sin(torch.arange(out.numel())).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, given, grad)]


def compiled(f, given, **options):
    counters["eager attention"].clear()
    counters["attention masks"].clear()
    with config.patch(target="triton", check=True, **options):
        return run(dynamotor.compile(f, fullgraph=True), given)


def errors(found, exact):
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("softmax_type", [None, torch.float32])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_no_scores_and_no_more_error_than_eager(name, sinks, softmax_type):
    f, given, raised = (
        attend(name, softmax_type=softmax_type),
        operands(sinks),
        counters["frames"]["graph raised"],
    )
    found = compiled(f, given)
    if name == "padding" and not sinks:
        assert taken() == {"kept": 1}  # rows that see nothing see all keys alike
    else:
        assert taken() == {"with sinks" if sinks else "without sinks": 1}
    assert counters["frames"]["graph raised"] == raised
    eager = run(f, given)
    exact = run(attend(name), [t.detach().double().requires_grad_() for t in given])
    for ours, theirs, right in zip(errors(found, exact), errors(eager, exact), exact, strict=True):
        least = 5e-3 if right.dim() == 1 else 1e-3  # the rounding of four numbers is luck
        assert ours <= 1.05 * theirs + least * float(right.detach().abs().max())
    assert found[0].stride() == eager[0].stride()


@pytest.mark.parametrize(("name", "sinks"), [("causal", False), ("causal", True), ("window", False)])
def test_a_causal_mask_without_sinks_is_pytorchs_kernel(name, sinks):
    with collect("code") as events:
        compiled(attend(name), operands(sinks), program_cache=False)
    text = "\n".join(str(e.data) for e in events)
    ours = "masked_attention" in text
    assert (
        ours == (sinks or name == "window") and ("is_causal" in text or "scaled_dot_product" in text) != ours
    )
    assert "300, 300]" not in text


CHANGES = {
    "dropout": lambda weights: F.dropout(weights, 0.1),
    "weights are a result": None,
    "doubled": lambda weights: weights * 2,
    "another dimension": None,
    "float32": None,
    "scores are read": None,
    "a learned bias": None,
    "a written query": None,
}


def other(name):
    def f(q, k, v):
        k, v = repeated(k), repeated(v)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask_of("window", q.dtype)
        if name == "a learned bias":
            scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + q[:, :, :, :1]
        weights = F.softmax(scores, dim=2 if name == "another dimension" else -1)
        if CHANGES[name] is not None:
            weights = CHANGES[name](weights)
        if name == "a written query":
            v = v.clone()
            old = torch.matmul(weights, v)
            v.mul_(0.5)
            return old, torch.matmul(weights, v)
        out = torch.matmul(weights, v)
        return (
            (out, weights)
            if name == "weights are a result"
            else (out, scores.amax(-1))[: 1 + (name == "scores are read")]
        )

    return f


@pytest.mark.parametrize("name", CHANGES)
def test_other_programs_keep_their_scores(name):
    f, given = other(name), operands(False, torch.float32 if name == "float32" else torch.bfloat16)
    counters["eager attention"].clear()
    with config.patch(target="triton"), torch.no_grad():
        found = dynamotor.compile(f, fullgraph=True)(*given)
        wanted = f(*given)
    assert not taken().keys() - {"kept"}
    if name != "dropout":
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


def test_a_query_that_is_written_after_its_scores_is_kept():
    def f(q, k, v):
        q = q * 1
        scores = torch.matmul(q, repeated(k).transpose(2, 3))
        q.mul_(0.0)
        return torch.matmul(F.softmax(scores, -1), repeated(v)) + q

    given = operands(False)
    with config.patch(target="triton"), torch.no_grad():
        counters["eager attention"].clear()
        found = dynamotor.compile(f, fullgraph=True)(*given)
        torch.testing.assert_close(found, f(*given), rtol=3e-2, atol=3e-2)
    assert not taken()


@pytest.mark.parametrize("sinks", [False, True])
def test_a_result_that_is_written_is_kept(sinks):
    plain, given = attend("window"), operands(sinks)

    def f(*given):
        return plain(*given).mul_(2)

    found, wanted = compiled(f, given), run(f, given)
    assert not taken()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(b.abs().max()))


@pytest.mark.parametrize(("name", "sinks"), [("causal", False), ("window", False), ("causal", True)])
def test_second_derivatives(name, sinks):
    def penalty(f, given):
        first = torch.autograd.grad(f(*given).float().square().sum(), given[:2], create_graph=True)
        return torch.autograd.grad(sum(t.float().square().sum() for t in first), given)

    given = operands(sinks)
    with config.patch(target="triton"):
        found = penalty(dynamotor.compile(attend(name)), given)
    wanted = penalty(attend(name), [t.detach().double().requires_grad_() for t in given])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-2, atol=5e-2 * float(b.abs().max()))


def small(name, length=256, **more):
    torchvision_stub.prepare()
    torch.manual_seed(0)
    sizes = {**SMALL, "num_hidden_layers": 1, "sliding_window": 128, **more}
    _, model = model_of(name, length, sizes | ({"num_local_experts": 2} if name == "gpt-oss-like" else {}))
    model.config._attn_implementation = "eager"
    return model


@pytest.mark.parametrize(
    ("name", "auto"), [("gpt-oss-like", True), ("gpt-oss-like", False), ("mistral-1b", True)]
)
def test_a_training_step_of_transformers(name, auto):
    model, ids = small(name), torch.randint(0, 256, (1, 256))
    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # grouped products of float64 there are none
    model = model if auto else model.bfloat16()
    plain = copy.deepcopy(model)
    half = torch.autocast("cpu", torch.bfloat16) if auto else contextlib.nullcontext()

    def step(model, call, mode):
        with mode:
            loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *[p.grad for p in model.parameters()]]

    exact = step(wide, wide, contextlib.nullcontext())
    eager = step(plain, plain, half)
    counters["eager attention"].clear()
    with config.patch(target="triton"):
        found = step(model, dynamotor.compile(model, fullgraph=True), half)
    assert taken() == {"with sinks" if name == "gpt-oss-like" else "without sinks": 1}
    for label, ours, theirs, right in zip(
        ["loss", *[n for n, _ in model.named_parameters()]],
        errors(found, exact),
        errors(eager, exact),
        exact,
        strict=True,
    ):
        assert ours <= 2 * theirs + 1e-2 * float(right.abs().max()), (label, ours, theirs)


def test_weights_that_are_asked_for_stay():
    model, ids = small("gpt-oss-like").bfloat16(), torch.randint(0, 256, (1, 256))
    counters["eager attention"].clear()
    with config.patch(target="triton"), torch.no_grad():
        found = dynamotor.compile(model)(ids, output_attentions=True).attentions
        for a, b in zip(found, model(ids, output_attentions=True).attentions, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
    assert not taken()


def test_padded_inputs_are_read_in_inference():
    model, ids = small("gpt-oss-like").bfloat16(), torch.randint(0, 256, (2, 256))
    keep = (torch.arange(256) >= torch.tensor([[100], [0]])).long()
    counters["eager attention"].clear()
    with config.patch(target="triton"), torch.no_grad():
        found = dynamotor.compile(model)(ids, attention_mask=keep).logits
    wanted = model(ids, attention_mask=keep).logits
    assert taken() == {"with sinks": 1}
    torch.testing.assert_close(found[keep > 0], wanted[keep > 0], rtol=5e-2, atol=2e-2)
