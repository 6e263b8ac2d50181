"""Products with a vocabulary that 8 does not divide: padded operands, that the graph's results stay,
strides of outputs.
"""

import pytest
import torch
import torch.nn.functional as F
from aten_graphs import aten_graph

import dynamotor
from bench import triton_interpret
from dynamotor.base.config import config
from dynamotor.codegen import gpu_program, triton
from dynamotor.graph.spec import GraphInfo
from dynamotor.graph.verify_graph import verify_aten_graph
from dynamotor.lower.lower_graph import lower_graph
from dynamotor.lower.product_padding import pad_products

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _small():
    with config.patch(pad_products_from=8):
        yield


def padded(fn, *inputs, kind="inference", n_outputs=0):
    """The graph after the pass, checked against the function; and its products' sizes."""
    gm = aten_graph(fn, *inputs)
    pad_products(gm, GraphInfo(kind, "test", frozenset(), n_outputs))
    gm.recompile()
    verify_aten_graph(gm)
    want = fn(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    for got, expected in zip(gm(*inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        if kind == "inference":
            assert got.stride() == expected.stride()
    products = [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    return gm, [(*n.args[-2].meta["val"].shape, n.args[-1].meta["val"].shape[1]) for n in products]


def half(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def test_the_sizes_along_which_memory_is_contiguous_are_padded():
    assert padded(lambda h, w: h @ w.t(), half(16, 24), half(19, 24))[1] == [(16, 24, 24)]
    assert padded(lambda g, w: g @ w, half(16, 19), half(19, 24))[1] == [(16, 24, 24)]
    assert padded(lambda g, h: g.t() @ h, half(16, 19), half(16, 24))[1] == [(24, 16, 24)]
    assert padded(lambda a, b: a @ b, half(17, 24), half(24, 32))[1] == [(17, 24, 32)]
    assert padded(lambda b, h, w: torch.addmm(b, h, w.t()), half(19), half(16, 24), half(19, 24))[1] == [
        (16, 24, 24)
    ]


def test_what_is_left_alone():
    assert padded(lambda a, b: a @ b, torch.randn(9, 9), torch.randn(9, 9))[1] == [(9, 9, 9)]
    assert padded(lambda a, b: a @ b, half(4, 9), half(9, 9))[1] == [(4, 9, 9)]
    assert padded(lambda a, b: a @ b, half(16, 24)[:, ::2], half(12, 19))[1] == [(16, 12, 19)]


def test_two_products_share_one_padded_operand_and_their_results_are_views():
    def f(g, w, h):
        d = g * 2
        return d @ w, d.t() @ h

    gm, sizes = padded(f, half(16, 19), half(19, 24), half(16, 24))
    assert sizes == [(16, 24, 24), (24, 16, 24)]
    pads = [n for n in gm.graph.nodes if n.target is aten.constant_pad_nd.default]
    assert len(pads) == 2
    program = lower_graph(gm, GraphInfo("inference", "test"))
    assert not any("copy" in getattr(s, "note", "") for s in program.steps)


def test_saved_results_keep_the_padding_and_the_users_do_not():
    def f(h, w):
        logits = (h @ w.t()).view(2, 8, 19)
        return logits * 2, logits

    gm, _ = padded(f, half(16, 24), half(19, 24), kind="forward", n_outputs=1)
    first, saved = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    assert first.meta["val"].stride == (152, 19, 1) and saved.meta["val"].stride == (192, 24, 1)
    gm, _ = padded(f, half(16, 24), half(19, 24), kind="forward", n_outputs=2)
    assert next(n for n in gm.graph.nodes if n.op == "output").args[0][1].meta["val"].stride == (152, 19, 1)


def test_what_is_saved_beside_the_users_copy_is_not_copied_again():
    def f(h, w):
        logits = h @ w.t()
        return logits.view(2, 8, 19), logits.clone()

    gm, _ = padded(f, half(16, 24), half(19, 24), kind="forward", n_outputs=1)
    first, saved = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    assert first.target is aten.clone.default and saved.target is aten.slice.Tensor
    gm, _ = padded(
        lambda h, w: (h, (h @ w.t()).clone()), half(16, 24), half(19, 24), kind="inference", n_outputs=2
    )
    assert next(n for n in gm.graph.nodes if n.op == "output").args[0][1].meta["val"].is_contiguous


@pytest.mark.skipif(not triton_interpret.available(), reason="no interpreter")
def test_a_language_models_loss_trains_on_padded_products(monkeypatch):
    programs = []
    expand = triton.expand
    monkeypatch.setattr(gpu_program.triton, "expand", lambda p: programs.append(p) or expand(p))
    h, w, t = half(2, 8, 16).requires_grad_(), half(19, 16).requires_grad_(), torch.randint(0, 19, (2, 8))

    def loss(h, w, t):
        logits = F.linear(h, w)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 19).float(), t[:, 1:].reshape(-1))

    with config.patch(target="triton", strict=True):
        ours = dynamotor.compile(loss)(h, w, t)
        ours.backward()
    got, h.grad = h.grad, None
    got_w, w.grad = w.grad, None
    theirs = loss(h, w, t)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got, h.grad, rtol=3e-2, atol=1e-2)
    torch.testing.assert_close(got_w, w.grad, rtol=3e-2, atol=1e-2)
    assert got_w.is_contiguous() and got_w.shape == (19, 16)
    widths = {
        b.spec.stride[0]
        for p in programs
        for b in p.buffers.values()
        if len(b.spec.shape) == 2 and 24 in b.spec.shape
    }
    assert 24 in widths and not any(
        b.spec.numel == 16 * 19 for p in programs for b in p.buffers.values() if b.kind == "temp"
    )
