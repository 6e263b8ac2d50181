"""Two processes that run functions: joined by gloo on the CPU, or by NCCL with a GPU each; killed when a call
takes too long.

>>> # [what rank 0 returned, what rank 1 returned]
>>> pair = Pair(); pair.run(ddp_cases.compare, "tied", "outside", "native")
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import children

CALL_SECONDS = 25.0
START_SECONDS = 90.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, size: int, port: int, timeout: float, device: str, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    import dynamotor  # noqa: F401

    torch.set_num_threads(1)
    join = {
        "init_method": f"tcp://127.0.0.1:{port}",
        "rank": rank,
        "world_size": size,
        "timeout": timedelta(seconds=timeout),
    }
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **join)
    else:
        dist.init_process_group("gloo", **join)
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send(("done", function(rank, *args)))
        except BaseException as error:
            pipe.send(("error", f"rank {rank}: {error!r}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Pair:
    """The two processes (or more). `run` gives all ranks' results; an error on any is raised here."""

    def __init__(self, group_timeout: float = 20.0, device: str = "cpu", size: int = 2) -> None:
        context = children.server()
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, group_timeout, device, there), daemon=True
            )
            process.start()
            there.close()  # so that a process that dies is noticed at once
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            self.answer(pipe, START_SECONDS)

    def answer(self, pipe: Any, seconds: float) -> Any:
        """The next line of a process."""
        if not pipe.poll(seconds):
            self.kill()
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        try:
            kind, value = pipe.recv()
        except EOFError:
            kind, value = "error", "a process died"
        if kind == "error":
            self.kill()
            raise AssertionError(value)
        return value

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = CALL_SECONDS) -> list[Any]:
        """Call `function(rank, *args)` in both processes."""
        for pipe in self.pipes:
            pipe.send((function, args))
        return [self.answer(pipe, seconds) for pipe in self.pipes]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Let the processes end."""
        for pipe in self.pipes:
            if self.alive:
                pipe.send(None)
        for process in self.processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        """End them now."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
