"""compile_step: 'forward to update' as one program has the losses, weights, state and gradients of the eager
loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.errors import UsageError
from dynamotor.base.events import counters

cross_entropy = nn.functional.cross_entropy


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).double()


def batches(n: int, size: int = 6, width: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, width, dtype=torch.float64), torch.randint(0, 4, (size,))) for _ in range(n)]


class Eager:
    """The loop that `compile_step` stands for."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: Any = None,
        scaler: Any = None,
        accumulate: int = 1,
        keep_grads: bool = False,
        loss_fn: Callable[..., torch.Tensor] = cross_entropy,
    ) -> None:
        self.model, self.optimizer, self.clip, self.scaler, self.loss_fn = (
            model,
            optimizer,
            clip,
            scaler,
            loss_fn,
        )
        self.accumulate, self.keep_grads, self.count = accumulate, keep_grads, 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.keep_grads and self.count % self.accumulate == 0:
            self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(x), y)
        scaled = loss / self.accumulate
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        self.count += 1
        if self.count % self.accumulate == 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if callable(self.clip):
                self.clip([p for g in self.optimizer.param_groups for p in g["params"]])
            elif self.clip is not None:
                nn.utils.clip_grad_norm_(
                    [p for g in self.optimizer.param_groups for p in g["params"]], self.clip
                )
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if not self.keep_grads:
                self.optimizer.zero_grad()
        return loss.detach()


def equal_state(a: Any, b: Any, tolerance: float) -> None:
    """Optimizers' (or models') states hold the same."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            equal_state(a[key], b[key], tolerance)
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            equal_state(x, y, tolerance)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=tolerance)
    else:
        assert a == b


class Pair:
    """A model trained by the eager loop beside its copy trained by compiled steps."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        scaler: Any = None,
        **options: Any,
    ) -> None:
        first = make()
        self.models = first, copy.deepcopy(first)
        self.optimizers = [optimizer(m) for m in self.models]
        scalers = [None if scaler is None else scaler() for _ in range(2)]
        loss_fn = options.pop("loss_fn", cross_entropy)
        self.scalers = scalers
        backend = options.pop("backend", "native")
        self.eager = Eager(self.models[0], self.optimizers[0], scaler=scalers[0], loss_fn=loss_fn, **options)
        self.step = dynamotor.compile_step(
            self.models[1], loss_fn, self.optimizers[1], scaler=scalers[1], backend=backend, **options
        )

    def train(
        self,
        data: list[tuple[torch.Tensor, ...]],
        each: Callable[[], None] = lambda: None,
        tolerance: float = 1e-10,
    ) -> None:
        for batch in data:
            expected, loss = self.eager(*batch), self.step(*batch)
            assert not loss.requires_grad
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            for a, b in zip(*(m.parameters() for m in self.models), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    torch.testing.assert_close(b.grad, a.grad, rtol=tolerance, atol=tolerance)
            each()
        equal_state(self.models[0].state_dict(), self.models[1].state_dict(), tolerance)
        equal_state(self.optimizers[0].state_dict(), self.optimizers[1].state_dict(), tolerance)

    def is_whole(self, programs: int | None = None) -> bool:
        found = sum(len(p) for graph in self.step.graphs for p in graph.programs.values())
        return not self.step.reasons and (found == programs if programs is not None else found > 0)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 1e-2}),
    ("Adam", {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {"lr": 1e-2}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
]
CASES = [
    (name, {**options, "foreach": foreach}) for name, options in OPTIMIZERS for foreach in (False, True)
] + [
    ("Adafactor", {}),
    ("Adafactor", {"eps": (1e-20, 1e-3)}),
    ("AdamW", {"lr": 1e-2, "fused": True}),
    ("SGD", {"lr": 0.1, "fused": True}),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{n}-{'-'.join(f'{k}={v}' for k, v in o.items())}" for n, o in CASES]
)
def test_every_optimizer_traces_through_its_own_python(name: str, options: dict[str, Any]) -> None:
    pair = Pair(mlp, lambda m: getattr(torch.optim, name)(m.parameters(), **options), backend="aot_eager")
    pair.train(batches(8))
    assert pair.is_whole()


def test_muon_trains_matrices() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)).double()

    pair = Pair(make, lambda m: torch.optim.Muon(m.parameters(), lr=1e-2))
    pair.train(batches(5), tolerance=1e-2)  # it orthogonalises in bfloat16
    assert pair.is_whole(1)


def test_schedulers_compile_nothing() -> None:
    pair = Pair(mlp, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30) for o in pair.optimizers
    ]  # moves betas too
    pair.train(batches(20), lambda: [s.step() for s in schedulers])  # type: ignore[func-returns-value]
    assert pair.is_whole(1)


def test_gradients_are_clipped() -> None:
    for clip in (0.05, lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3)):
        pair = Pair(mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5), clip=clip)
        pair.train(batches(5))
        assert pair.is_whole(1)


def test_gradients_accumulate_over_calls() -> None:
    for keep in (False, True):
        pair = Pair(
            mlp, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), accumulate=3, clip=0.1, keep_grads=keep
        )
        pair.train(batches(12))
        assert pair.is_whole(1)


def test_gradients_are_kept_when_asked_for() -> None:
    pair = Pair(mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), keep_grads=True, clip=0.05)
    pair.train(batches(5))
    assert pair.is_whole(1) and all(p.grad is not None for p in pair.models[1].parameters())


def test_steps_that_overflow_are_skipped_by_the_scaler() -> None:
    pair = Pair(
        mlp,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        clip=0.5,
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
    )
    data = batches(8)
    data[4][0][0, 0] = float("inf")
    for k, batch in enumerate(data):
        expected, loss = pair.eager(*batch), pair.step(*batch)
        assert (k == 4) == bool(loss.isnan())
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert pair.scalers[0].get_scale() == pair.scalers[1].get_scale()
    equal_state(
        pair.models[0].state_dict(), pair.models[1].state_dict(), 1e-6
    )  # the scale's inverse is a float32
    equal_state(pair.optimizers[0].state_dict(), pair.optimizers[1].state_dict(), 1e-6)
    assert pair.is_whole(1) and pair.scalers[1].state_dict() == pair.scalers[0].state_dict()


class Net(nn.Module):
    """Convolutions with batch norm, a tied weight, a buffer that counts, a parameter that the loss does not
    see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.inner, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.inner.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.again(torch.tanh(self.inner(h)))) * self.scale * self.temperature


def net() -> nn.Module:
    return Net().double()


def images(n: int, size: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, 2, 5, 5, dtype=torch.float64), torch.randint(0, 4, (size,))) for _ in range(n)]


def test_buffers_tied_unused_and_frozen_parameters() -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        model.head.bias.requires_grad_(False)
        inner = [model.inner.weight]
        rest = [p for p in model.parameters() if p is not inner[0]]
        return torch.optim.AdamW(
            [{"params": inner, "lr": 0.05, "weight_decay": 0.0}, {"params": rest, "betas": (0.8, 0.9)}],
            lr=0.01,
        )

    pair = Pair(net, optimizer)
    pair.train(images(6))
    assert pair.is_whole(1)


def test_parameters_outside_of_the_optimizer_keep_their_gradients() -> None:
    pair = Pair(net, lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1, momentum=0.9))
    pair.train(images(4))
    assert pair.is_whole(1) and pair.models[1].conv.weight.grad is not None


def test_what_the_model_reads_may_change_between_steps() -> None:
    pair = Pair(net, lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    data = images(3)
    pair.train(data)
    for model in pair.models:
        model.scale = 2.0
    pair.train(data)
    for model in pair.models:
        model.eval()
    pair.train(data)
    pair.train(images(2, size=4))
    for model in pair.models:
        model.train()
        model.conv.weight.requires_grad_(False)
    pair.train(images(2))
    for model in pair.models:
        model.inner.weight.data.mul_(0.5)
    pair.train(data)
    assert pair.is_whole()


def test_a_loaded_state_is_what_goes_on() -> None:
    pair = Pair(mlp, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    pair.train(batches(3))
    saved = [copy.deepcopy(o.state_dict()) for o in pair.optimizers]
    pair.train(batches(3))
    for optimizer, state in zip(pair.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    pair.train(batches(3))
    assert pair.is_whole(1)
    for optimizer, model in zip(pair.optimizers, pair.models, strict=True):
        optimizer.param_groups[0]["weight_decay"] = 0.0  # another branch of the optimizer's Python
        optimizer.param_groups[0]["amsgrad"] = False
        model[0].weight.data = model[0].weight.data.clone()
    pair.train(batches(3))
    assert pair.is_whole(2)


def test_a_group_that_is_added_later() -> None:
    pair = Pair(net, lambda m: torch.optim.AdamW(m.head.parameters(), lr=1e-2), keep_grads=True)
    pair.train(images(3))
    for optimizer, model in zip(pair.optimizers, pair.models, strict=True):
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [model.inner.weight], "lr": 0.1})
        model.zero_grad()
    pair.train(images(4))
    assert pair.is_whole(2)


class Counting(torch.optim.Optimizer):
    """An optimizer of the user's own: counts in Python, keeps nested state, branches on its count, replaces
    tensors.
    """

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "seen": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        n=0, history=[torch.zeros_like(p), torch.zeros_like(p)], mean=torch.zeros_like(p)
                    )
                state["n"] += 1
                state["mean"] = state["mean"] * 0.9 + p.grad * 0.1  # another tensor each time
                state["history"][0] = state["history"][1].clone()
                state["history"][1].copy_(p.grad)
                p.sub_(
                    state["mean"] + 0.01 * state["history"][0], alpha=group["lr"] / (1 + state["n"]) ** 0.5
                )
                if state["n"] > 4:
                    p.mul_(0.99)


def test_an_optimizer_of_the_users_own() -> None:
    pair = Pair(mlp, lambda m: Counting(m.parameters()))
    pair.train(batches(8))
    assert pair.is_whole(2)
    assert pair.optimizers[1].param_groups[0]["seen"] == 8.0
    assert all(type(s["n"]) is int and s["n"] == 8 for s in pair.optimizers[1].state.values())


class Around(torch.optim.Optimizer):
    """Leaves the work to optimizers inside, which work on the parameters themselves."""

    def __init__(self, parameters: Any, hidden: bool) -> None:
        super().__init__(parameters, {})
        inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)
        self.inner: Any = [inner] if hidden else inner

    def step(self, closure: None = None) -> None:
        (self.inner[0] if isinstance(self.inner, list) else self.inner).step()


class Alternating(torch.optim.SGD):
    """Updates at every second step, by a count in a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.counts = [0]

    def step(self, closure: None = None) -> None:
        self.counts[0] += 1
        if self.counts[0] % 2:
            super().step()


@pytest.mark.parametrize(
    "make",
    [lambda p: Around(p, False), lambda p: Around(p, True), Alternating],
    ids=["inside", "hidden", "counts"],
)
def test_an_optimizer_that_does_what_no_program_repeats(make: Callable[[Any], Any]) -> None:
    pair = Pair(mlp, lambda m: make(m.parameters()), backend="aot_eager")
    pair.train(batches(6))
    assert [code for code, _ in pair.step.reasons] in (["DM505"], ["DM510"])


def test_gradients_that_are_there_already_are_added_to() -> None:
    pair = Pair(mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    pair.train(batches(3))
    for model in pair.models:
        model[0].weight.grad = torch.ones_like(model[0].weight)
    pair.train(batches(2))


def test_hooks_on_gradients_run_and_are_a_reason() -> None:
    seen: list[int] = []
    pair = Pair(mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    pair.train(batches(2))
    for k, model in enumerate(pair.models):
        model[0].weight.register_hook(lambda grad, k=k: seen.append(k) or grad * 2)
    pair.train(batches(2))
    assert seen == [0, 1, 0, 1]
    assert pair.step.reasons[0][0] == "DM503" and "hooks" in pair.step.explain()


def test_step_hooks_run() -> None:
    seen: list[int] = []
    pair = Pair(mlp, lambda m: torch.optim.AdamW(m.parameters()))
    pair.train(batches(2))
    pair.optimizers[1].register_step_post_hook(lambda *_: seen.append(1))
    pair.train(batches(2))
    assert seen == [1, 1]


def test_a_break_in_the_forward_pass_is_a_reason() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y * 2 if y.sum().item() > 0 else y

    pair = Pair(Breaking, lambda m: torch.optim.AdamW(m.parameters()))
    pair.train(batches(4))
    assert pair.step.reasons[0][0] == "DM508"


def test_autocast_around_the_step() -> None:
    pair = Pair(lambda: mlp().float(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    for x, y in batches(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = pair.step(x.float(), y), pair.eager(x.float(), y)
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    assert pair.is_whole(1) and all(p.dtype is torch.float32 for p in pair.models[1].parameters())


def test_random_numbers_are_drawn_anew_at_each_step() -> None:
    model = nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.5), nn.Linear(64, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = dynamotor.compile_step(model, cross_entropy, optimizer)
    batch = batches(1)[0]
    losses = [float(step(*batch)) for _ in range(6)]
    assert len(set(losses)) == 6


def test_wrong_arguments() -> None:
    model = mlp()
    for bad in (
        {"optimizer": torch.optim.LBFGS(model.parameters())},
        {"optimizer": None},
        {"accumulate": 0},
        {"model": abs},
    ):
        arguments = {
            "model": model,
            "loss_fn": cross_entropy,
            "optimizer": torch.optim.SGD(model.parameters()),
            **bad,
        }
        with pytest.raises(UsageError, match="DM112"):
            dynamotor.compile_step(**arguments)  # type: ignore[arg-type]


@pytest.mark.regression
def test_a_parameter_frozen_while_gradients_accumulate() -> None:
    given, seen = torch.randn(6, 3, 4), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = dynamotor.compile_step(model, lambda y: y.square().sum(), optimizer, accumulate=2)
        for i, x in enumerate(given):
            model[0].weight.requires_grad_(i != 5)
            if compiled:
                step(x)
            else:
                (model(x).square().sum() / 2).backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        seen.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(seen[1], seen[0])


class Attentive(nn.Module):
    """A causal mask made of positions and repeated heads, as transformers makes them, below a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.query = nn.Embedding(60, 16), nn.Linear(16, 16)
        self.keys, self.head = nn.Linear(16, 16), nn.Linear(16, 60, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, (batch, length) = self.tokens(ids), ids.shape
        query = self.query(x).view(batch, length, 4, 4).transpose(1, 2)
        both = self.keys(x).view(batch, length, 2, 2, 4).transpose(1, 3)
        key, value = [t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in both.unbind(2)]
        at = torch.arange(length)
        mask = (at[None, :] <= at[:, None])[None, None].expand(batch, 1, length, length)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(seen.transpose(1, 2).reshape(batch, length, 16))


def shifted_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def test_a_step_understands_masks_and_computes_losses_in_chunks_as_compile_does() -> None:
    model = Attentive().double()
    eager = Eager(
        twin := copy.deepcopy(model), torch.optim.SGD(twin.parameters(), lr=0.1), loss_fn=shifted_loss
    )
    with dynamotor.config.patch(chunk_logits_from=0.01):
        step = dynamotor.compile_step(model, shifted_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        before = {name: dict(counters[name]) for name in ("attention masks", "losses")}
        for _ in range(3):
            ids = torch.randint(0, 60, (4, 17))
            torch.testing.assert_close(step(ids, ids), eager(ids, ids), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert counters["attention masks"]["causal"] == before["attention masks"].get("causal", 0) + 1
    assert counters["losses"]["in chunks"] == before["losses"].get("in chunks", 0) + 1
