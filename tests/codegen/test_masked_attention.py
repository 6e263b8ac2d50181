"""Attention with masks of the graph's own on a GPU (its kernels in Triton's interpreter): masks become blocks,
results and gradients are eager's.
"""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import bench.verification  # noqa: F401  (registers the interpreter)
import dynamotor
from bench.triton_interpret import available
from dynamotor import config
from dynamotor.base.events import collect, counters
from dynamotor.capture import siblings
from dynamotor.codegen import flex_kernels, masked_attention
from dynamotor.codegen.flex_kernels import Case
from dynamotor.graph.mask_blocks import BLOCK
from dynamotor.graph.spec import TensorSpec

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not there as an interpreter")
OP = torch.ops.dynamotor.masked_attention.default
B, H, G, Q, D = 1, 4, 2, 300, 16
IDS = torch.randint(1, 4, (B, Q)).sort().values
KEEP = torch.arange(Q) < torch.tensor([[231]])

MASKS = {
    "window": lambda q, k, ids, keep: (k <= q) & (k > q - 90),
    "both sides": lambda q, k, ids, keep: (q - k).abs() <= 70,
    "chunks": lambda q, k, ids, keep: (k <= q) & (q // 100 == k // 100),
    "prefix": lambda q, k, ids, keep: (k <= q) | (k < 30),
    "documents": lambda q, k, ids, keep: (k <= q) & (ids[:, None, :, None] == ids[:, None, None, :]),
    "padding": lambda q, k, ids, keep: keep[:, None, None, :],
    "causal with padding": lambda q, k, ids, keep: (k <= q) & keep[:, None, None, :],
    "numbers": lambda q, k, ids, keep: (k <= q) & (ids[:, None, None, :] > 1),
    "rows of nothing": lambda q, k, ids, keep: (k < q) & (ids[:, None, None, :] > 1),
    "added": lambda q, k, ids, keep: torch.where(k <= q - 3, 0.0, -torch.inf).to(torch.bfloat16),
}


def attend(rule):
    def f(q, k, v, ids, keep):
        places = torch.arange(Q)
        mask = rule(places[None, None, :, None], places[None, None, None, :], ids, keep)
        k, v = (t[:, :, None].expand(B, G, H // G, Q, D).reshape(B, H, Q, D) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, Q, H * D)

    return f


def operands(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(B, Q, n, D, dtype=dtype).transpose(1, 2).requires_grad_() for n in (H, G, G)]


def compiled(f, given, rest=(IDS, KEEP), **options):
    counters["attention masks"].clear()
    with config.patch(target="triton", check=True):
        out = dynamotor.compile(f, fullgraph=True, **options)(*given, *rest)
        found = torch.autograd.grad(out, given, torch.ones_like(out)) if out.requires_grad else ()
    return [out, *found], {kind: n for kind, n in counters["attention masks"].items() if n}


@pytest.mark.parametrize("of_all", [False, True])
def test_blocks_in_an_order_end_within_a_length_that_tiles_divide_and_blocks_do_not(of_all):
    length = 2 * BLOCK + 64
    ids = torch.arange(length).clamp(max=200).div(70, rounding_mode="floor").expand(2, length).contiguous()
    ids[1, 40:] = 0  # another order of blocks in the second batch

    def f(q, k, v, ids):
        at = ids[0] if of_all else ids
        shown = at[:, None] == at if of_all else at[:, None, :, None] == at[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)

    given = [torch.randn(2, H, length, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found, seen = compiled(f, given, (ids,))
    assert seen == {"blocks": 1}
    want = f(*given, ids)
    for a, b in zip(found, [want, *torch.autograd.grad(want, given, torch.ones_like(want))], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_mask_becomes_blocks_at_each_length_that_a_function_sees(transposed):
    def f(q, k, v, ids):
        places = torch.arange(q.shape[2])
        mask = (places[:, None] >= places) & (places[:, None] - places < 90)
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2) if transposed else out

    counters["attention masks"].clear()
    call = dynamotor.compile(f, fullgraph=True)
    for length in (300, 400, 333, 289, 416):  # from the fourth on lengths are arguments of the kernels
        shape = (2, length, H, D) if transposed else (2, H, length, D)
        given = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        given = [t.transpose(1, 2) if transposed else t for t in given]
        ids = torch.randint(0, 3, (2, length)).sort().values
        with config.patch(target="triton", check=True):
            out = call(*given, ids)
            found = [out, *torch.autograd.grad(out, given, torch.ones_like(out))]
        want = f(*given, ids)
        assert out.stride() == want.stride()
        for a, b in zip(found, [want, *torch.autograd.grad(want, given, torch.ones_like(want))], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=4e-2)
    assert counters["attention masks"]["blocks"] == 2 and not counters["attention masks"]["kept"]


def functions_at(length, which, mask):
    """The functions of a call of this length, by name."""
    of = TensorSpec.dense((1, H, length, D), torch.bfloat16, torch.device("cpu"))
    n = -(-length // BLOCK)
    pair = [TensorSpec.dense(shape, torch.int32, of.device) for shape in ((1, 1, n), (1, 1, n, n))]
    return masked_attention._kernels(which, mask, 0.5, of.stride, 0, of, of, of, *pair * 4)._functions


def test_many_lengths_share_functions_whose_lengths_are_arguments():
    which = ("forward", "delta", "queries", "keys")
    found = [functions_at(n, which, "q-k-7>=0") for n in (300, 400, 333, 289, 417, 1023)]
    assert all(f.numbers == () for f in found[2].values())
    for what, f in found[3].items():
        others = [each[what] for each in found[4:]]
        assert all((o.name, o.source, o.signature) == (f.name, f.source, f.signature) for o in others)
        assert f.numbers[:2] == (289, 289) and others[0].numbers[:2] == (417, 417)


@pytest.mark.parametrize("what", ["forward", "queries", "keys"])
def test_terms_of_one_side_are_vectors_of_32_bits(what):
    """On a GPU a row of a tile took the whole tile of scores to the layout of its load: 3 KB of spills a thread."""
    q, flags = (
        TensorSpec.dense(shape, dtype, torch.device("cpu"))
        for shape, dtype in (((2, H, 512, D), torch.bfloat16), ((2, 512), torch.bool))
    )
    mask = masked_attention.lines_of_mask("(q>=k)&(int(r0[b,k])-1==0)", [flags], (2, H, 512, 512))
    source = getattr(flex_kernels, what)(Case(q, q, q, 0.5, None, mask, (flags,), 0)).source
    assert (
        "tl.load(f0 + (b) * 512 + (ki) * 1)" in source
        and "ki = tl.minimum(cols, 512 - 1).to(tl.int32)" in source
    )
    across, down = ("[:, None]", "[None, :]") if what == "keys" else ("[None, :]", "[:, None]")
    assert f"(qi{down}) >= (ki{across})" in source
    assert len(re.findall(r"qi\[|ki\[", source)) == 2  # the flags are compared as vectors


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_the_graph_becomes_blocks(name):
    f, given, raised = attend(MASKS[name]), operands(), counters["frames"]["graph raised"]
    found, kinds = compiled(f, given)
    wide = [t.detach().double().requires_grad_() for t in given]

    def exact(q, k, v, ids, keep):
        return (
            f(q, k, v, ids, keep)
            if name != "added"
            else attend(lambda q, k, ids, keep: k <= q - 3)(q, k, v, ids, keep)
        )

    out = exact(*wide, IDS, KEEP)
    wanted = [out, *torch.autograd.grad(out, wide, torch.ones_like(out))]
    assert kinds == {"blocks": 1} and counters["frames"]["graph raised"] == raised
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2 * float(b.detach().abs().max()))
    assert found[0].stride() == f(*given, IDS, KEEP).stride()


def test_layers_share_the_blocks_of_one_mask():
    def layers(n):
        def f(q, *rest):
            for _ in range(n):
                q = attend(MASKS["documents"])(q, *rest).view(B, Q, H, D).transpose(1, 2)
            return q

        with torch.no_grad(), collect("code") as events:
            compiled(f, operands())
        steps = events[-1].data["program"].steps
        return len(steps) - sum(getattr(step, "target", None) is OP for step in steps)

    assert layers(1) == layers(3)


def test_its_programs_are_kept_on_disk(tmp_path):
    f, given = attend(MASKS["causal with padding"]), operands()
    before = config.snapshot()
    config.update(verify=False, cache_dir=str(tmp_path))
    try:
        for answer in ("program.miss", "program.hit"):
            siblings.forget()
            counters["cache"].clear()
            with config.patch(target="triton", check=False):
                found = torch.autograd.grad(dynamotor.compile(f)(*given, IDS, KEEP).sum(), given)
            assert counters["cache"][answer] and not counters["cache"]["program.not_kept"]
    finally:
        config.update(verify=before.verify, cache_dir=before.cache_dir)
    wanted = torch.autograd.grad(f(*given, IDS, KEEP).sum(), given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().max()))


def test_another_mask_of_the_same_length_is_another_program():
    f = attend(lambda q, k, ids, keep: (k <= q) & (ids[:, None, :, None] == ids[:, None, None, :]))
    given = operands()
    with config.patch(target="triton"), torch.no_grad():
        g = dynamotor.compile(f, fullgraph=True)
        for seed in range(2):
            ids = torch.randint(1, 9, (B, Q), generator=torch.Generator().manual_seed(seed)).sort().values
            torch.testing.assert_close(g(*given, ids, KEEP), f(*given, ids, KEEP), rtol=2e-2, atol=2e-2)


UNSUITED = {
    "float32": (MASKS["window"], torch.float32, {}),
    "dropout": (MASKS["window"], torch.bfloat16, {"dropout_p": 0.1}),
    "a mask without a formula": (lambda q, k, ids, keep: torch.rand(Q, Q) < 0.5, torch.bfloat16, {}),
}


@pytest.mark.parametrize("name", UNSUITED)
def test_other_calls_keep_their_masks(name):
    rule, dtype, more = UNSUITED[name]
    places = torch.arange(Q)

    def f(q, k, v, ids, keep):
        mask = rule(places[:, None], places[None, :], ids, keep)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **more)

    with config.patch(check=False):
        _, kinds = compiled(f, operands(dtype))
    assert "blocks" not in kinds


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(D * H, 3 * D * H)

    def forward(self, x):
        q, k, v = self.net(x).view(B, Q, 3, H, D).permute(2, 0, 3, 1, 4)
        places = torch.arange(Q)
        mask = (places[None] <= places[:, None]) & (places[None] > places[:, None] - 30)
        q = q.float() * 1.5  # in float32, which autocast converts
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def test_a_whole_step_under_autocast_has_no_mask():
    x, losses = torch.randn(B, Q, D * H), []
    half = torch.autocast("cpu", torch.bfloat16)

    def loss_of(y, _):
        return y.float().square().mean()

    for compiles in (False, True):
        layer = Layer()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

        def plain(layer=layer, optimizer=optimizer):
            optimizer.zero_grad()
            with half:
                loss = loss_of(layer(x), x)
            loss.backward()
            optimizer.step()
            return loss

        counters["attention masks"].clear()
        with config.patch(target="triton"):
            whole = dynamotor.compile_step(layer, loss_of, optimizer) if compiles else None
            for _ in range(3):
                if whole is None:
                    loss = plain()
                else:
                    with half:
                        loss = whole(x, x)
        losses.append(float(loss))
    assert counters["attention masks"]["blocks"] == 1
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def saves_attention(context, op, *args, **kwargs):
    kinds = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return CheckpointPolicy.MUST_SAVE if op is kinds else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_a_policy_of_checkpoints_that_saves_attention_saves_this_one(selective):
    f, given = attend(MASKS["window"]), operands()
    context = functools.partial(create_selective_checkpoint_contexts, saves_attention)
    more = {"context_fn": context} if selective else {}

    def checkpointed(*args):
        return checkpoint(f, *args, use_reentrant=False, **more)

    with collect("code") as events:
        found, kinds = compiled(checkpointed, given)
    wanted = f(*given, IDS, KEEP)
    torch.testing.assert_close(found[0], wanted, rtol=2e-2, atol=2e-2)
    steps = [step for event in events for step in event.data["program"].steps]
    calls = [getattr(step, "target", None) for step in steps]
    assert kinds == {"blocks": 1} and calls.count(OP) == (1 if selective else 2)
