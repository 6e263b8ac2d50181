"""Training loops as people write them. Each runs three times on the same data: eager DDP,
`compile(DDP(model))` and `DDP(compile(model))`.

A program gets a `Run`: `run.ddp(model, ...)` wraps a model, `run.see(module)` notes all gradients,
`run.note(tensor)` anything else.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_cases import CAP, Broken, D, Normed, Plain, Tied, _data, here, loss_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import dynamotor


class Run:
    """One way of running a program, and its counts."""

    def __init__(self, rank: int, how: str, backend: str, mode: str) -> None:
        self.rank, self.how, self.backend, self.mode = rank, how, backend, mode
        self.seen: list[torch.Tensor | None] = []
        self.shared: list[bool] = []  # whether it must be the same on all ranks

    def compile(self, module: nn.Module) -> Any:
        return dynamotor.compile(module, backend=self.backend, options={"ddp": self.mode})

    def ddp(self, model: nn.Module, before: Callable[[DDP], Any] = lambda ddp: None, **options: Any) -> Any:
        """The model under DDP, compiled the way this run is. `before` gets the DDP module."""
        options = {"bucket_cap_mb": CAP, **options}
        if here().type == "cuda":
            options["device_ids"] = [here().index]
        model = copy.deepcopy(model).to(here())
        ddp = DDP(self.compile(model) if self.how == "inside" else model, **options)
        before(ddp)
        return self.compile(ddp) if self.how == "outside" else ddp

    def data(self, step: int, rows: int = 6, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return _data(self.rank, step, dtype, rows)

    def note(self, value: torch.Tensor | None, shared: bool = False) -> None:
        self.seen.append(None if value is None else value.detach().clone())
        self.shared.append(shared)

    def see(self, *modules: nn.Module, shared: bool = True) -> None:
        """All gradients; shared ones are to be equal on all ranks."""
        for module in modules:
            for parameter in module.parameters():
                self.note(parameter.grad, shared)


def seed(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


PROGRAMS: dict[str, Callable[[Run], None]] = {}


def program(function: Callable[[Run], None]) -> Callable[[Run], None]:
    PROGRAMS[function.__name__] = function
    return function


def maybe(module: Any, sync: bool) -> Any:
    return contextlib.nullcontext() if sync else module.no_sync()


# Accumulation -----------------------------------------------------------------------------------------------
@program
def accumulation_in_odd_orders(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step, (sync, zero) in enumerate(
        [
            (True, True),
            (False, False),
            (True, False),
            (True, False),
            (False, True),
            (False, False),
            (True, False),
            (False, True),
            (True, True),
        ]
    ):
        if zero:
            module.zero_grad(set_to_none=step % 2 == 0)
        with maybe(module, sync):
            loss_of(module(run.data(step))).backward()
        run.see(module, shared=False)


@program
def forward_under_no_sync_backward_outside(run: Run) -> None:
    module = run.ddp(seed(Plain))
    loss_of(module(run.data(0))).backward()
    with module.no_sync():
        loss = loss_of(module(run.data(1)))
    loss.backward()
    run.see(module, shared=False)
    loss_of(module(run.data(2))).backward()
    run.see(module)


@program
def backward_under_no_sync_forward_outside(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(3):
        module.zero_grad()
        loss = loss_of(module(run.data(step)))
        with module.no_sync():
            loss.backward()
        run.see(module)


@program
def accumulation_with_bucket_views(run: Run) -> None:
    module = run.ddp(seed(Plain), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    for step in range(6):
        with maybe(module, step % 3 == 2):
            loss_of(module(run.data(step))).backward()
        if step % 3 == 2:
            run.see(module)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 3)


@program
def gradients_changed_between_accumulation_steps(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(4):
        with maybe(module, step % 2 == 1):
            loss_of(module(run.data(step))).backward()
        for i, p in enumerate(module.parameters()):
            if step == 2 and i % 2:
                p.grad = None if i % 4 == 1 else p.grad * 0.5
        run.see(module, shared=step % 2 == 1)


@program
def a_gradient_that_only_one_rank_holds(run: Run) -> None:
    module = run.ddp(seed(Plain))
    loss_of(module(run.data(0))).backward()
    module.zero_grad()
    if run.rank == 0:
        next(module.parameters()).grad = torch.ones(D, D, dtype=torch.float64, device=here())
    loss_of(module(run.data(1))).backward()
    run.see(module)


# Several forwards -------------------------------------------------------------------------------------------
@program
def three_forwards_one_backward(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(3):
        module.zero_grad(set_to_none=step != 1)
        sum(loss_of(module(run.data(10 * step + i, rows=4 + i))) for i in range(3)).backward()
        run.see(module)


@program
def two_forwards_two_backwards(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(3):
        module.zero_grad()
        first, second = (loss_of(module(run.data(10 * step + i))) for i in range(2))
        second.backward()
        first.backward()
        run.see(module, shared=False)


@program
def a_forward_that_nobody_needs(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(3):
        module.zero_grad()
        loss = loss_of(module(run.data(step)))
        module(run.data(step + 20))
        with torch.no_grad():
            module(run.data(step + 30))
        loss.backward()
        run.see(module)


@program
def one_rank_beyond_the_cache_limit_in_two_forwards(run: Run) -> None:
    module = run.ddp(seed(Plain))
    with dynamotor.config.patch(cache_size_limit=2):
        for step in range(6):
            module.zero_grad(set_to_none=step % 2 == 0)
            rows = 3 + step if run.rank == 0 else 6
            (loss_of(module(run.data(step, rows))) + loss_of(module(run.data(step + 20)))).backward()
            run.see(module)


@program
def one_rank_beyond_the_cache_limit(run: Run) -> None:
    module = run.ddp(seed(Plain))
    with dynamotor.config.patch(cache_size_limit=2):
        for step in range(6):
            module.zero_grad(set_to_none=step % 2 == 0)
            loss = loss_of(module(run.data(step, 3 + step if run.rank == 0 else 6)))
            with torch.no_grad():
                module(run.data(step + 20))
            loss.backward()
            run.see(module)


@program
def the_same_graph_twice_backward(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(2):
        module.zero_grad()
        loss = loss_of(module(run.data(step)))
        loss.backward(retain_graph=True)
        run.see(module)
        loss.backward()
        run.see(module, shared=False)


@program
def truncated_backpropagation(run: Run) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x, h):
            return torch.tanh(self.a(x) + self.b(h))

    module = run.ddp(seed(Cell))
    h = torch.zeros(6, D, dtype=torch.float64, device=here())
    for step in range(3):
        module.zero_grad()
        h = h.detach()
        loss: Any = 0.0
        for i in range(3):
            h = module(run.data(10 * step + i), h)
            loss = loss + loss_of(h)
        loss.backward()
        run.see(module)


# Two models -------------------------------------------------------------------------------------------------
@program
def generator_and_critic(run: Run) -> None:
    generator, critic = run.ddp(seed(Plain)), run.ddp(seed(lambda: Plain(4)))
    makers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (generator, critic)]
    for step in range(3):
        fake = generator(run.data(step))
        makers[1].zero_grad()
        (loss_of(critic(fake.detach())) - loss_of(critic(run.data(step + 20)))).backward()
        run.see(critic)
        makers[1].step()
        makers[0].zero_grad()
        loss_of(critic(fake)).backward()
        run.see(generator)
        makers[0].step()
        run.see(critic, shared=False)


@program
def one_rank_compiles_one_of_two_modules_anew(run: Run) -> None:
    first, second = run.ddp(seed(Plain)), run.ddp(seed(Plain))
    with dynamotor.config.patch(cache_size_limit=2):
        for step in range(6):
            for module in (first, second):
                module.zero_grad(set_to_none=step % 2 == 0)
            hidden = first(run.data(step, rows=9))
            loss_of(second(hidden[: 3 + step if run.rank == 0 else 6])).backward()
            run.see(first, second)


@program
def one_module_is_left_to_ddp(run: Run) -> None:
    first, second = run.ddp(seed(Plain)), run.ddp(seed(Plain), find_unused_parameters=True)
    with dynamotor.config.patch(cache_size_limit=2):
        for step in range(6):
            for module in (first, second):
                module.zero_grad()
            rows = 3 + step if run.rank == 0 else 6
            loss_of(second(first(run.data(step, rows))[:3])).backward()
            run.see(first, second)


@program
def two_modules_in_turns(run: Run) -> None:
    first, second = run.ddp(seed(Plain)), run.ddp(seed(Plain))
    for step in range(3):
        losses = [loss_of(module(run.data(step + 20 * i))) for i, module in enumerate((first, second))]
        for module, loss in zip((first, second), losses):
            module.zero_grad()
            loss.backward()
            run.see(module)


@program
def critic_frozen_for_the_generators_step(run: Run) -> None:
    generator, critic = run.ddp(seed(Plain)), run.ddp(seed(lambda: Plain(4)))
    for step in range(3):
        fake = generator(run.data(step))
        critic.zero_grad()
        loss_of(critic(fake.detach())).backward()
        run.see(critic)
        for p in critic.parameters():
            p.requires_grad_(False)
        generator.zero_grad()
        loss_of(critic(fake)).backward()
        run.see(generator)
        for p in critic.parameters():
            p.requires_grad_(True)


@program
def one_parameter_in_two_modules(run: Run) -> None:
    first, second = seed(Plain), seed(lambda: Plain(3))
    second.layers[0].weight = first.layers[0].weight
    wrapped = nn.ModuleList([first, second])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = wrapped

        def forward(self, x):
            return self.parts[1](self.parts[0](x)) + self.parts[1](x)

    module = run.ddp(Both())
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


@program
def a_teacher_beside(run: Run) -> None:
    student, teacher = run.ddp(seed(Plain)), run.compile(seed(Plain).to(here())).requires_grad_(False)
    for step in range(3):
        student.zero_grad()
        F.mse_loss(student(run.data(step)), teacher(run.data(step + 5))).backward()
        run.see(student)


# What parameters do -----------------------------------------------------------------------------------------
@program
def unfrozen_later(run: Run) -> None:
    model = seed(Plain)
    model.layers[2].weight.requires_grad_(False)
    module = run.ddp(model)
    for step in range(4):
        if step == 2:
            module.module.layers[2].weight.requires_grad_(True)
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module, shared=step < 2)


@program
def frozen_after_ddp_with_unused_parameters(run: Run) -> None:
    module = run.ddp(seed(Plain), find_unused_parameters=True)
    for step in range(6):
        module.module.layers[2].weight.requires_grad_(step in (0, 1, 4, 5))
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


@program
def used_twice(run: Run) -> None:
    class Twice(Plain):
        def forward(self, x):
            for layer in self.layers:
                x = F.gelu(layer(layer(x)))
            return x + F.linear(x, self.layers[0].weight.t())

    module = run.ddp(seed(Twice))
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


@program
def tied_and_clipped(run: Run) -> None:
    module = run.ddp(seed(Tied))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(module(run.data(step))).backward()
        run.note(nn.utils.clip_grad_norm_(module.parameters(), 0.1), shared=True)
        run.see(module)
        optimizer.step()


@program
def weight_norm(run: Run) -> None:
    model = seed(Plain)
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer)
    module = run.ddp(model)
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


@program
def sparse_gradients(run: Run) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(D, D, sparse=True)
            self.layer = nn.Linear(D, D)

        def forward(self, x):
            return self.layer(self.table(x.argmax(1)))

    module = run.ddp(seed(Sparse))
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        for p in module.parameters():
            run.note(p.grad.to_dense() if p.grad.is_sparse else p.grad, shared=True)


@program
def empty_and_scalar_parameters(run: Run) -> None:
    class Odd(Plain):
        def __init__(self) -> None:
            super().__init__(3)
            self.none = nn.Parameter(torch.empty(0, D))
            self.gain = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return super().forward(torch.cat([x, self.none])) * self.gain

    module = run.ddp(seed(Odd))
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


@program
def several_dtypes(run: Run) -> None:
    model = seed(Plain)
    model.layers[3].float()
    model.layers[4].bfloat16()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            for layer in self.inner.layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            return x.double()

    module = run.ddp(Mixed())
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        for p in module.parameters():
            run.note(p.grad.double().mul(0.01) if p.dtype is torch.bfloat16 else p.grad, shared=True)


@program
def gradients_that_somebody_keeps(run: Run) -> None:
    module = run.ddp(seed(Plain))
    kept = []
    for step in range(5):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        kept.append([p.grad.detach() if step % 2 else p.grad.view(-1)[1:] for p in module.parameters()])
    for gradients in kept:
        for gradient in gradients:
            run.note(gradient, shared=True)


@program
def weights_loaded_on_the_way(run: Run) -> None:
    module = run.ddp(seed(Normed))
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    saved = copy.deepcopy(module.state_dict())
    for step in range(4):
        if step == 2:
            module.load_state_dict(saved)
        optimizer.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)
        optimizer.step()
    for buffer in module.buffers():
        run.note(buffer)


# What programs do around a step -----------------------------------------------------------------------------
@program
def autocast_and_a_scaler(run: Run) -> None:
    torch.manual_seed(0)
    module = run.ddp(Plain())
    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**8)
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(here().type, torch.bfloat16):
            loss = loss_of(module(run.data(step, dtype=torch.float32)).float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in module.parameters():
            run.note(p.grad.double().mul(0.01), shared=True)  # bf16 inside: compared loosely
        scaler.step(optimizer)
        scaler.update()


@program
def infinite_gradients_on_one_rank(run: Run) -> None:
    torch.manual_seed(0)
    module = run.ddp(Plain())
    scaler = torch.amp.GradScaler(here().type, init_scale=4.0)
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for step in range(3):
        optimizer.zero_grad()
        x = run.data(step, dtype=torch.float32)
        loss = loss_of(module(x)) * (float("inf") if step == 1 and run.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.note(torch.tensor(scaler.get_scale()), shared=True)
    for p in module.parameters():
        run.note(p.double().mul(1e-3), shared=True)


@program
def evaluation_mode_between(run: Run) -> None:
    module = run.ddp(seed(Normed))
    for step in range(3):
        module.train()
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)
        module.eval()
        with torch.no_grad():
            run.note(module(run.data(step + 20)))
        module.zero_grad()
        loss_of(module(run.data(step))).backward()  # training with frozen statistics
        run.see(module)


@program
def checkpointing_with_reentry(run: Run) -> None:
    class Checkpoints(Plain):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda y, layer=layer: F.gelu(layer(y)), x, use_reentrant=True)
            return x

    module = run.ddp(seed(Checkpoints), static_graph=True)
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step).requires_grad_())).backward()
        run.see(module)


@program
def checkpointing_everything(run: Run) -> None:
    class Checkpoints(Plain):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    module = run.ddp(seed(Checkpoints))
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


@program
def another_branch_on_each_rank(run: Run) -> None:
    class Branches(Plain):
        def forward(self, x, which: int):
            for layer in list(self.layers)[which::2]:
                x = F.gelu(layer(x))
            return x

    module = run.ddp(seed(Branches), find_unused_parameters=True)
    for step in range(4):
        module.zero_grad()
        loss_of(module(run.data(step), (run.rank + step // 2) % 2)).backward()
        run.see(module)


@program
def nobody_uses_a_branch(run: Run) -> None:
    class Branches(Plain):
        def forward(self, x, which: int):
            for i, layer in enumerate(self.layers):
                x = F.gelu(layer(x)) if i != which else x
            return x

    module = run.ddp(seed(Branches), find_unused_parameters=True)
    for step in range(4):
        module.zero_grad()
        loss_of(module(run.data(step), step % 2)).backward()
        run.see(module)


@program
def an_output_that_the_loss_leaves_out(run: Run) -> None:
    class Two(Plain):
        def forward(self, x):
            y = F.gelu(self.layers[0](x))
            return self.layers[1](y), self.layers[2](y)

    module = run.ddp(seed(lambda: Two(3)), find_unused_parameters=True)
    for step in range(4):
        module.zero_grad()
        both = module(run.data(step))
        loss_of(both[0] if step % 2 else torch.cat(both)).backward()
        run.see(module)


@program
def a_break_and_another_batch(run: Run) -> None:
    module = run.ddp(seed(Broken))
    for step in range(4):
        module.zero_grad()
        loss_of(module(run.data(step, 3 + step * run.rank))).backward()
        run.see(module)


@program
def gradient_of_the_input(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(3):
        module.zero_grad()
        x = run.data(step).requires_grad_()
        loss_of(module(x)).backward()
        run.note(x.grad)
        run.see(module)


@program
def an_interrupted_step(run: Run) -> None:
    module = run.ddp(seed(Plain))
    for step in range(4):
        module.zero_grad()
        out = module(run.data(step))
        if step == 1:
            continue  # no backward: the batch was bad
        loss_of(out).backward()
        run.see(module)


@program
def buffers_and_uneven_inputs(run: Run) -> None:
    module = run.ddp(seed(Normed))
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for epoch in range(2):
        with module.join():
            for step in range(2 + run.rank):
                optimizer.zero_grad()
                loss_of(module(run.data(10 * epoch + step))).backward()
                optimizer.step()
    for p in [*module.parameters(), *module.buffers()]:
        run.note(p, shared=True)


# Whatever may come ------------------------------------------------------------------------------------------
def _random_step(run: Run, draw: random.Random, modules: list[Any], step: int) -> None:
    """Forwards of one or two modules, some dropped, some without gradients, batches that differ between
    ranks; one backward.
    """
    zero, sync = draw.choice(["none", "zeros", "keep"]), draw.random() < 0.75
    for module in modules:
        if zero != "keep":
            module.zero_grad(set_to_none=zero == "none")
    used, losses = set(), []
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(maybe(module, sync))
        for i in range(draw.choice([1, 1, 1, 2, 3])):
            first, quiet, dropped, chained = (
                draw.randrange(len(modules)),
                *(draw.random() < p for p in (0.3, 0.15, 0.3)),
            )
            x = run.data(100 * step + i, [draw.choice([3, 4, 5, 6]) for _ in range(2)][run.rank])
            if quiet:
                with torch.no_grad():
                    modules[first](x)
            if dropped:
                modules[first](x)
            path = [first, 1 - first] if chained and len(modules) == 2 else [first]
            for number in path:
                x = modules[number](x)
            used |= set(path)
            losses.append(loss_of(x))
        sum(losses).backward()
    run.see(*(modules[i] for i in sorted(used)), shared=sync and zero != "keep")


def _random_program(number: int, run: Run) -> None:
    draw = random.Random(number)
    views = draw.random() < 0.3
    modules = [
        run.ddp(seed(lambda: Plain(draw.choice([2, 3]))), gradient_as_bucket_view=views)
        for _ in range(draw.choice([1, 2]))
    ]
    with dynamotor.config.patch(cache_size_limit=draw.choice([2, 3, 16])):
        for module in modules:  # all ranks compile the first step
            loss_of(module(run.data(0))).backward()
        for step in range(1, 6):
            _random_step(run, draw, modules, step)


for _number in range(6):
    PROGRAMS[f"random program {_number}"] = functools.partial(_random_program, _number)


# Communication hooks ----------------------------------------------------------------------------------------
def _hooked(run: Run, before: Callable[[DDP], Any], **options: Any) -> None:
    torch.manual_seed(0)
    module = run.ddp(Plain(), before, **options)
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step, dtype=torch.float32))).backward()
        for p in module.parameters():
            run.note(p.grad.double().mul(1e-2), shared=True)


@program
def half_precision_on_the_wire(run: Run) -> None:
    _hooked(run, lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))


@program
def power_sgd(run: Run) -> None:
    def hook(ddp: DDP) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    _hooked(
        run, hook, bucket_cap_mb=25
    )  # its steps of several buckets overtake each other on gloo, in eager too


@program
def a_builtin_hook(run: Run) -> None:
    _hooked(run, lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE))


@program
def a_group_of_its_own(run: Run) -> None:
    module = run.ddp(seed(Plain), process_group=dist.new_group([0, 1]))
    for step in range(3):
        module.zero_grad()
        loss_of(module(run.data(step))).backward()
        run.see(module)


# ------------------------------------------------------------------------------------------------------------
def differences(
    rank: int, name: str, how: str, backend: str = "aot_eager", mode: str = "auto"
) -> dict[str, Any]:
    """The largest difference from eager DDP, whether the ranks are bit-equal where they must be, and the
    modes.
    """
    dynamotor.reset()
    runs = [Run(rank, "eager", backend, mode), Run(rank, how, backend, mode)]
    for run in runs:
        PROGRAMS[name](run)
    worst = 0.0
    for i, (a, b) in enumerate(zip(runs[0].seen, runs[1].seen, strict=True)):
        if (a is None) != (b is None):
            worst = float("inf")
            print(f"rank {rank}, {name}, value {i}: {'no' if a is None else 'a'} value in eager only")
        elif a is not None and a.numel():
            assert a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride(), (
                name,
                i,
                a.stride(),
                b.stride(),
            )
            gap = (
                (a - b).abs().max().item()
                if a.isfinite().all()
                else 0.0
                if torch.equal(a, b)
                else float("inf")
            )
            worst = max(worst, gap if gap == gap else float("inf"))
    return {
        "worst": worst,
        "same": _same(runs[1]),
        "eager same": _same(runs[0]),
        "modes": dict(dynamotor.counters["ddp"]),
        "fallback": dict(dynamotor.counters["fallback"]),
    }


def _same(run: Run) -> bool:
    values = [
        v.double().flatten()
        for v, shared in zip(run.seen, run.shared, strict=True)
        if shared and v is not None
    ]
    if not values:
        return True
    flat = torch.cat(values)
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return torch.equal(*both)
