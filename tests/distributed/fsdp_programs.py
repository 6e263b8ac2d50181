"""Programs over `fully_shard`, run by all ranks: in eager FSDP2 and compiled, in float64.

>>> ranks.run(compare, "accumulation", "whole", "native")     # on each rank
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as ShardParameters
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor.base import compat
from dynamotor.base.events import collect, counters
from dynamotor.distributed.shard_group import ShardGroup

F64 = torch.float64


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 14), nn.Linear(14, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(self.down(torch.tanh(self.up(x))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """An embedding, blocks, and a head; sizes that two ranks and four do not divide."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)


class Tied(Net):
    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t()


class Twice(Net):
    """A block that is called twice in a forward."""

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(ids)))
        return self.head(self.blocks[0](x))


class Unused(Net):
    """A block has a layer that is never called, and one block is called by some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].extra = nn.Linear(3, 3)


class Checkpointed(Net):
    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@dynamotor.disable
def _left_alone() -> None:
    pass


class Broken(Net):
    """A graph break inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].forward = self._broken  # type: ignore[method-assign]

    def _broken(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.blocks[1].up(x)
        _left_alone()
        return x + self.blocks[1].norm(self.blocks[1].down(torch.tanh(y)))


class DataDependent(Net):
    """Data decides a size in the middle of the model: the graph is cut there."""

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        x = x[ids > 4]
        return self.head(self.blocks[2](self.blocks[1](x)))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].norm.requires_grad_(False)


def shard(model: nn.Module, mesh: DeviceMesh, root: dict[str, Any] | None = None, **settings: Any) -> None:
    together = settings.pop("together", False)
    if "tensors" in (mesh.mesh_dim_names or ()):
        for block in model.blocks:
            parallelize_module(block, mesh["tensors"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["data"]
    for block in [list(model.blocks)] if together else model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings | (root or {}))


def _second_dimension(parameter: nn.Parameter) -> Shard | None:
    divides = parameter.ndim == 2 and parameter.shape[1] % 2 == 0
    return Shard(1) if divides else None


HALF = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=F64)
CAST = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=F64, output_dtype=F64)
# Name -> the model, and what `fully_shard` is called with.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Net, {}),
    "kept": (Net, {"reshard_after_forward": False}),
    "smaller types": (Net, {"mp_policy": HALF}),
    "output type": (Net, {"mp_policy": HALF, "root": {"mp_policy": CAST}}),
    "second dimension": (Net, {"shard_placement_fn": _second_dimension}),
    "tied": (Tied, {}),
    "twice": (Twice, {}),
    "unused": (Unused, {}),
    "checkpoint": (Checkpointed, {}),
    "break": (Broken, {}),
    "frozen": (Frozen, {}),
    "data decides": (DataDependent, {}),
}


class Run:
    """A sharded model, compiled or not, with an optimizer and the numbers that its steps gave."""

    def __init__(self, name: str, mesh: DeviceMesh, how: str, backend: str = "native") -> None:
        make, settings = MODELS[name]
        torch.manual_seed(0)
        self.model = make().to(F64)
        shard(self.model, mesh, **settings)
        self.call: Callable[..., torch.Tensor] = self.model
        if how == "whole":
            self.call = dynamotor.compile(self.model, backend=backend)
        elif how == "blocks":
            for i, block in enumerate(self.model.blocks):
                self.model.blocks[i] = dynamotor.compile(block, backend=backend)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.draw = torch.Generator().manual_seed(dist.get_rank())
        self.found: list[torch.Tensor] = []
        self.size = 3

    def ids(self) -> torch.Tensor:
        return torch.randint(0, 11, (self.size, 4), generator=self.draw)

    def loss(self, *given: Any, **named: Any) -> torch.Tensor:
        loss = self.call(self.ids(), *given, **named).to(F64).square().mean()
        self.found.append(loss.detach().clone())
        return loss

    def update(self) -> None:
        self.found += [whole(p.grad) for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.found += [whole(p) for p in self.model.parameters()]


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


# Steps ------------------------------------------------------------------------------------------------------
def plain(run: Run) -> None:
    run.loss().backward()
    run.update()


def arguments(run: Run) -> None:
    run.loss(scale=torch.tensor(0.5, dtype=F64, requires_grad=True)).backward()
    run.update()


def accumulation(run: Run) -> None:
    for last in (False, False, True):
        run.model.set_requires_gradient_sync(last)
        run.loss().backward()
    run.update()


def accumulation_over_kinds(run: Run) -> None:
    """Some of the backwards go through the hooks: ours must find their kept state, and the other way round."""
    for last, hooks in ((False, True), (False, False), (False, True), (True, False)):
        run.model.set_requires_gradient_sync(last)
        call, run.call = run.call, run.model if hooks else run.call
        run.loss().backward()
        run.call = call
    run.update()
    for last, hooks in ((False, False), (True, True)):
        run.model.set_requires_gradient_sync(last)
        call, run.call = run.call, run.model if hooks else run.call
        run.loss().backward()
        run.call = call
    run.update()


def synchronised_twice(run: Run) -> None:
    run.loss().backward()
    run.loss().backward()
    run.update()


def two_forwards(run: Run) -> None:
    (run.loss() + run.loss()).backward()
    run.update()


def clipping(run: Run) -> None:
    run.loss().backward()
    run.found.append(whole(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
    run.update()


def hooks_behind_gradients(run: Run) -> None:
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)) for p in run.model.parameters()
    ]
    run.loss().backward()
    for handle in handles:
        handle.remove()
    run.update()


def sizes(run: Run) -> None:
    """Batches of several sizes."""
    for size in (2, 3, 5, 7):
        run.size = size
        run.loss().backward()
    run.update()


def without_gradients(run: Run) -> None:
    with torch.no_grad():
        run.loss()
    run.loss().backward()
    run.update()


def by_hand(run: Run) -> None:
    """Parameters that the program gathers itself, a policy that changes, a divisor of its own."""
    run.model.unshard()
    run.loss().backward()
    run.update()
    run.model.set_reshard_after_forward(False)
    run.loss().backward()
    run.model.reshard()
    run.update()
    run.model.set_gradient_divide_factor(3.0)
    run.loss().backward()
    run.update()


def kept_behind_backwards(run: Run) -> None:
    """Parameters that stay gathered behind a backward: until they are gathered again no forward sees an update."""
    plain(run)
    run.model.set_reshard_after_backward(False)
    run.loss().backward()
    run.update()
    run.loss().backward()
    run.model.set_reshard_after_backward(True)
    run.loss().backward()
    run.update()
    run.loss().backward()
    run.update()


def gradients_of_inputs(run: Run) -> None:
    """`torch.autograd.grad` leaves `.grad` alone."""
    scale = torch.tensor(0.5, dtype=F64, requires_grad=True)
    run.found += torch.autograd.grad(run.loss(scale), scale)
    assert all(p.grad is None for p in run.model.parameters())
    run.loss().backward()
    run.update()


def checkpoints(run: Run) -> None:
    """A state saved after a step, loaded into the model of a step later."""
    plain(run)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder[0])
    plain(run)
    state = {"model": run.model.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    run.model.load_state_dict(state["model"])
    assert Path(folder[0], ".metadata").exists()
    plain(run)


STEPS = {
    step.__name__: step
    for step in (
        plain,
        arguments,
        accumulation,
        accumulation_over_kinds,
        synchronised_twice,
        two_forwards,
        clipping,
        hooks_behind_gradients,
        sizes,
        without_gradients,
        by_hand,
        kept_behind_backwards,
        gradients_of_inputs,
        checkpoints,
    )
}


def meshes(kind: str) -> DeviceMesh:
    if kind == "tensor parallel":
        half = dist.get_world_size() // 2
        return init_device_mesh("cpu", (half, 2), mesh_dim_names=("data", "tensors"))
    if kind == "HSDP":
        half = dist.get_world_size() // 2
        return init_device_mesh("cpu", (2, half), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole_steps(rank: int) -> dict[str, Any]:
    """`compile_step` of a sharded model with clipping, beside the loop that it stands for."""
    dynamotor.reset()
    want, got = Run("plain", meshes(""), "eager"), Run("plain", meshes(""), "eager")
    step = dynamotor.compile_step(got.model, lambda out: out.square().mean(), got.optimizer, clip=0.05)
    with collect() as events:
        for _ in range(4):
            got.found.append(step(got.ids()))
            got.found += map(whole, got.model.parameters())
    for _ in range(4):
        loss = want.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(want.model.parameters(), 0.05)
        want.optimizer.step()
        want.optimizer.zero_grad()
        want.found += map(whole, want.model.parameters())
    worst = max(float((a - b).abs().max()) for a, b in zip(got.found, want.found, strict=True))
    return {"worst": worst, "sent": sum(e.kind == "shards" for e in events), "text": step.explain()}


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Gather and reduce as on a GPU; a CPU's streams run everything at once."""
    with (
        patch.object(ShardGroup, "on_gpu", True),
        patch.object(compat, "empty_strided_cuda", compat.empty_strided_cpu),
        patch.object(torch.cuda, "current_stream", torch.cpu.Stream),
        patch.object(torch.cuda, "set_stream", lambda stream: None),
    ):
        yield


def compare_as_on_a_gpu(rank: int, *args: str) -> dict[str, Any]:
    with as_on_a_gpu():
        return compare(rank, *args)


def updates_in_parts(rank: int) -> list[tuple[float, int]]:
    """How far `compile_step` with AdamW is from the loop that it stands for, and the parameters of each update,
    where gradients are noted as they arrive, as on a GPU. With a hook of the optimizer it is one update.
    """
    sizes, found = [], []

    def counted(self: torch.optim.AdamW) -> None:
        sizes.append(sum(p.grad is not None for group in self.param_groups for p in group["params"]))

    real = torch.optim.AdamW.step
    step_and_count = lambda self, *args: (counted(self), real(self, *args))[1]  # noqa: E731
    with as_on_a_gpu(), patch.object(torch.optim.AdamW, "step", step_and_count):
        for hooked in (False, True):
            dynamotor.reset()
            want, got = Run("plain", meshes(""), "eager"), Run("plain", meshes(""), "eager")
            for run in (want, got):
                decayed, plain = (
                    [p for p in run.model.parameters() if p.ndim > 1],
                    [p for p in run.model.parameters() if p.ndim < 2],
                )
                groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
                run.optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
                run.schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
            if hooked:
                got.optimizer.register_step_post_hook(lambda *args: None)
            step = dynamotor.compile_step(got.model, lambda out: out.square().mean(), got.optimizer)
            for _ in range(3):
                sizes.clear()
                got.found.append(step(got.ids()))
                got.schedule.step()
                got.found += map(whole, got.model.parameters())
            updates = tuple(sizes)
            for _ in range(3):
                loss = want.loss()
                loss.backward()
                want.optimizer.step()
                want.optimizer.zero_grad()
                want.schedule.step()
                want.found += map(whole, want.model.parameters())
            pairs = zip(got.found, want.found, strict=True)
            state = [
                (whole(a["exp_avg"]), whole(b["exp_avg"]))
                for a, b in zip(got.optimizer.state.values(), want.optimizer.state.values(), strict=True)
            ]
            found.append((max(float((a - b).abs().max()) for a, b in (*pairs, *state)), updates))
    return found


def compare(
    rank: int, name: str, step: str, how: str, backend: str = "native", mesh: str = ""
) -> dict[str, Any]:
    """How far compiled steps are from eager FSDP2's, and how they were captured."""
    dynamotor.reset()
    place = meshes(mesh)
    want, got = Run(name, place, "eager"), Run(name, place, how, backend)
    before = {kind: copy.copy(counters[kind]) for kind in ("capture", "fsdp", "fallback")}
    with collect() as events:
        for _ in range(3):
            for run in (want, got):
                STEPS[step](run)
    pairs = list(zip(got.found, want.found, strict=True))
    return {
        "worst": max(float((a - b).abs().max() / (b.abs().max() + 1e-30)) for a, b in pairs),
        "graphs": counters["capture"]["graphs"] - before["capture"]["graphs"],
        "sharded": counters["fsdp"]["graphs"] - before["fsdp"]["graphs"],
        "hooks": counters["fallback"]["fsdp"] - before["fallback"]["fsdp"],
        "sent": [str(e.data["what"]) for e in events if e.kind == "shards"],
    }


def saved_weights(rank: int) -> tuple[list[str], list[str]]:
    """The weight matrices among the saved values of a forward, where parameters are resharded and where they are kept."""
    found = []
    for name in ("plain", "kept"):
        dynamotor.reset()
        run = Run(name, meshes(""), "whole")
        shapes: dict[tuple[int, ...], str] = {}
        for key, p in run.model.named_parameters():
            if p.ndim == 2 and "embed" not in key:
                shapes.setdefault(tuple(p.shape), key)
        with collect() as events:
            plain(run)
        (graph,) = [
            e.data["graph"] for e in events if e.kind == "aten_graph" and e.data["stage"] == "forward"
        ]
        saved = [node.meta["val"].shape for node in graph.graph.output_node().args[0][1:]]
        found.append([shapes[shape] for shape in saved if shape in shapes])
    return found[0], found[1]


def weights_alive(rank: int) -> list[tuple[str, int]]:
    """How many groups have gathered weights in memory whenever another one has got its own, pass by pass."""
    dynamotor.reset()
    run = Run("plain", meshes(""), "whole")
    plain(run)
    alive: list[weakref.ref[torch.Tensor]] = []
    found = []
    finish = ShardGroup.finish_gather

    def counted(group: ShardGroup, flat: torch.Tensor) -> list[torch.Tensor]:
        weights = finish(group, flat)
        alive.append(weakref.ref(weights[0].untyped_storage()))
        found.append((stage, sum(ref() is not None for ref in alive)))
        return weights

    ShardGroup.finish_gather = counted  # type: ignore[method-assign]
    try:
        stage = "forward"
        loss = run.loss()
        stage = "backward"
        loss.backward()
    finally:
        ShardGroup.finish_gather = finish  # type: ignore[method-assign]
    return found


def failed_backward(rank: int) -> float:
    """Steps after a backward that raises behind the compiled one; the hooks' own state does not survive that."""
    dynamotor.reset()
    want, got = Run("plain", meshes(""), "eager"), Run("plain", meshes(""), "whole")

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a hook")

    scale = torch.ones((), dtype=F64, requires_grad=True) * 2
    scale.register_hook(fail)
    want.ids()
    with contextlib.suppress(ValueError):
        got.loss(scale).backward()
    assert all(p.grad is None for p in got.model.parameters())
    got.found.clear()
    for _ in range(2):
        plain(want)
        plain(got)
    return max(float((a - b).abs().max()) for a, b in zip(got.found, want.found, strict=True))


def failed_forward(rank: int) -> tuple[int, float]:
    """How often hooks gather when a compiled forward raises, and how far steps after it are from eager."""
    dynamotor.reset()
    want, got = Run("plain", meshes(""), "eager"), Run("plain", meshes(""), "whole")
    for run in (want, got):
        plain(run)
    gathered, gather = [], ShardParameters.unshard

    def counted(group: Any, *args: Any) -> Any:
        gathered.append(group)
        return gather(group, *args)

    with patch.object(ShardParameters, "unshard", counted), contextlib.suppress(IndexError):
        got.call(torch.full((3, 4), 11))
    for run in (want, got):
        plain(run)
    worst = max(float((a - b).abs().max()) for a, b in zip(got.found, want.found, strict=True))
    return len(gathered), worst


def dies(rank: int, where: str) -> str:
    """Rank 1 ends before a forward or before a backward: the code that rank 0 gets."""
    dynamotor.reset()
    run = Run("plain", meshes(""), "whole")
    plain(run)
    if rank and where == "forward":
        os._exit(1)
    try:
        loss = run.loss()
        if rank:
            os._exit(1)
        loss.backward()
    except dynamotor.DynamotorError as error:
        return error.code
    return "no error"


def modes_of_ranks(rank: int) -> float:
    """Rank 0 trains through the hooks, rank 1 compiled, by turns: they send the same."""
    dynamotor.reset()
    want, got = Run("plain", meshes(""), "eager"), Run("plain", meshes(""), "whole")
    compiled = got.call
    for step in range(4):
        plain(want)
        got.call = compiled if step % 2 == rank else got.model
        plain(got)
    return max(float((a - b).abs().max()) for a, b in zip(got.found, want.found, strict=True))


REFUSED: dict[str, dict[str, Any]] = {
    "offloaded to the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "several modules are sharded together": {"together": True},
}


def refusals(rank: int) -> dict[str, tuple[float, list[str]]]:
    """Cases that only the hooks can do: how far steps are from eager's, and the breaks that are reported."""
    found = {}
    for case, settings in REFUSED.items():
        dynamotor.reset()
        MODELS[case] = (Net, settings)
        want, got = Run(case, meshes(""), "eager"), Run(case, meshes(""), "whole")
        del MODELS[case]
        with collect() as events:
            for run in (want, got):
                plain(run)
        worst = max(float((a - b).abs().max()) for a, b in zip(got.found, want.found, strict=True))
        found[case] = worst, [str(e.data["reason"]) for e in events if e.kind == "break"]
    return found
