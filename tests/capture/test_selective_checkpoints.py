"""Checkpoints with a policy: one graph, eager's gradients, and the policy decides about saved values."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dynamotor
from dynamotor import counters
from dynamotor.base.events import collect

mm = torch.ops.aten.mm.default
attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
first, second = (torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))


def block(x):
    return torch.tanh(torch.sin(x @ first) @ second)


def products(context, op, *args, **kwargs):
    return SAVE if op is mm else AGAIN


def nothing(context, op, *args, **kwargs):
    return AGAIN


def every_other():
    seen = {"products": 0}

    def policy(context, op, *args, **kwargs):
        seen["products"] += op is mm
        return SAVE if op is mm and seen["products"] % 2 else AGAIN

    return create_selective_checkpoint_contexts(policy)


made_outside = functools.partial(create_selective_checkpoint_contexts, products)


def under(context_fn, inner=block):
    return lambda x: checkpoint(inner, x, use_reentrant=False, context_fn=context_fn)


def made_inside(x):
    contexts = functools.partial(create_selective_checkpoint_contexts, [mm])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def by_lambda(x):
    return checkpoint(
        block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(products)
    )


def policy_of(kept):
    """A function whose policy is made inside and looks up a container from outside."""

    def function(x):
        def policy(context, op, *args, **kwargs):
            return SAVE if op in kept else AGAIN

        return checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        )

    return function


def gradients(function, x, backend=None):
    mine = x.clone().requires_grad_()
    first.grad = second.grad = None
    with collect("partition") as events:
        result = (dynamotor.compile(function, backend=backend) if backend else function)(mine)
        result.square().sum().backward()
    return [result.detach(), mine.grad, first.grad, second.grad], [e.data["saved_bytes"] for e in events]


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize(
    "function",
    [under(made_outside), made_inside, by_lambda, under(every_other)],
    ids=["outside", "inside", "lambda", "every other"],
)
def test_one_graph_with_the_gradients_of_eager(function, backend):
    x = torch.randn(8, 16, dtype=torch.float64)
    counters.clear()
    got, _ = gradients(function, x, backend)
    assert counters["capture"]["graphs"] == 1 and not counters["breaks"] and not counters["fallback"]
    torch.testing.assert_close(got, gradients(function, x)[0])


@pytest.mark.regression
@pytest.mark.parametrize("kept", [[mm], (mm,), {mm}, {mm: [1]}], ids=["list", "tuple", "set", "dict"])
def test_a_policy_made_inside_reads_containers_from_outside(kept):
    x = torch.randn(8, 16, dtype=torch.float64)
    counters.clear()
    function = policy_of(kept)
    got, saved = gradients(function, x, "native")
    assert not counters["breaks"] and not counters["fallback"] and saved == [2 * x.nbytes]
    torch.testing.assert_close(got, gradients(function, x)[0])


@pytest.mark.regression
def test_a_list_of_a_policy_may_change_between_calls():
    kept, x = [mm], torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    compiled = dynamotor.compile(policy_of(kept), backend="aot_eager")
    for size in (2, 0):
        with collect("partition") as events:
            compiled(x).sum().backward()
        assert [event.data["saved_bytes"] for event in events] == [size * x.nbytes]
        kept.clear()


def test_the_policy_decides_what_is_saved():
    x = torch.randn(8, 16, dtype=torch.float64)
    saved = {}
    for name, contexts in {
        "nothing": functools.partial(create_selective_checkpoint_contexts, nothing),
        "half": every_other,
        "products": made_outside,
    }.items():
        (saved[name],) = gradients(under(contexts), x, "aot_eager")[1]
    assert saved == {"nothing": 0, "half": x.nbytes, "products": 2 * x.nbytes}


def test_a_policy_that_saves_attention():
    def attend(x):
        heads = x.view(2, 2, 8, 8)
        return torch.nn.functional.scaled_dot_product_attention(
            heads, heads.cos(), heads, is_causal=True
        ).sin()

    x = torch.randn(16, 16, dtype=torch.float64)
    again, saving = (
        functools.partial(create_selective_checkpoint_contexts, ops) for ops in ([mm], [attention])
    )
    for contexts, n_bytes in ((again, 0), (saving, x.nbytes)):
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with collect("partition") as events:
            dynamotor.compile(under(contexts, attend), backend="aot_eager")(mine).sum().backward()
        under(contexts, attend)(other).sum().backward()
        torch.testing.assert_close(mine.grad, other.grad)
        (event,) = events
        assert event.data["saved_bytes"] >= n_bytes and bool(event.data["saved_bytes"]) is bool(n_bytes)


def test_modules_wrapped_for_checkpointing():
    net = torch.nn.Sequential(
        *[
            checkpoint_wrapper(
                torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU()),
                preserve_rng_state=False,
                context_fn=every_other,
            )
            for _ in range(2)
        ]
    )
    x = torch.randn(4, 16)
    counters.clear()
    found = [
        torch.autograd.grad(f(x).square().sum(), list(net.parameters()))
        for f in (dynamotor.compile(net), net)
    ]
    torch.testing.assert_close(*found)
    assert not counters["breaks"]


def test_dropout_without_a_preserved_generator_breaks_the_graph():
    def function(x):
        return checkpoint(
            lambda y: torch.nn.functional.dropout(y), x, use_reentrant=False, preserve_rng_state=False
        )

    counters.clear()
    dynamotor.compile(function)(torch.randn(4, requires_grad=True))
    assert counters["breaks"]


def test_other_contexts_break_the_graph():
    import contextlib

    def function(x):
        return checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()),
        )

    x = torch.randn(8, 16, dtype=torch.float64)
    counters.clear()
    torch.testing.assert_close(gradients(function, x, "native")[0], gradients(function, x)[0])
    assert counters["breaks"]
