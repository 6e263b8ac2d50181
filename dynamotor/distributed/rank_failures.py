"""What goes wrong between ranks gets a code, a cure and the user's line, in every mode.

DDP's reducer fails inside autograd's engine, below anything of ours. So the engine object that Python calls
is replaced by one that looks at what comes out of it.

>>> install(ddp.process_group)
>>> loss.backward()        # another rank died: DistributedError DM703 at this line
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..base import compat
from ..base.errors import DistributedError, user_line
from .watch import RankWatch
from .wrapper import group_timeout

# What DDP's reducer complains about: a part of its text, code, what happened, what to do.
_NO_GRADIENT = "some parameters of the DistributedDataParallel module got no gradient in the last step"
_COMPLAINTS = (
    (
        "static_graph set to True",
        "DM704",
        _NO_GRADIENT,
        "static_graph=True is for programs that use the same parameters in each step; leave it out",
    ),
    (
        "Expected to have finished reduction",
        "DM704",
        _NO_GRADIENT,
        "DistributedDataParallel(..., find_unused_parameters=True), "
        "or freeze them with requires_grad_(False)",
    ),
    (
        "Expected to mark a variable ready only once",
        "DM705",
        "a parameter got its gradient twice in one backward",
        "one forward for each backward with find_unused_parameters=True or a reentrant checkpoint; "
        "or static_graph=True",
    ),
    (
        "Your training graph has changed",
        "DM705",
        "another set of parameters got gradients than in the first step",
        "static_graph=True is for programs that use the same parameters in each step; leave it out",
    ),
)
# How process groups put it; gloo has no error type of its own, and not all of its texts name it.
_GROUP_FAILURES = (
    "gloo",
    "NCCL",
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket Timeout",
)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_group_failure(error: BaseException) -> bool:
    """Whether a process group says that another rank is gone or late."""
    text = str(error)
    return (
        isinstance(error, dist.DistError)
        or isinstance(error, RuntimeError)
        and any(part in text for part in _GROUP_FAILURES)
    )


def coded(error: RuntimeError, doing: str) -> DistributedError | None:
    """The error as one of ours, with the user's line; None when ranks and DDP have no part in it."""
    if isinstance(error, DistributedError):
        return DistributedError(
            error.code, error.what, why=error.why, cure=error.cure, where=error.where or user_line()
        )
    for part, code, what, cure in _COMPLAINTS:
        if part in str(error):
            return DistributedError(code, what, why=first_line(error), cure=cure, where=user_line())
    if is_group_failure(error):
        return DistributedError(
            "DM703",
            f"rank {dist.get_rank()} failed {doing}",
            why=first_line(error),
            cure="another rank died, stopped or runs another program; see its own error. "
            "The gradients of this step are lost",
            where=user_line(),
        )
    return None


class told:  # a context manager is written like a function
    """A failure between ranks gets a code and the user's line."""

    __slots__ = ("doing",)

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            better = coded(error, self.doing)
            if better is not None:
                raise better from error.__cause__ or error


class _Engine(type(compat.execution_engine.get())):  # type: ignore[misc]
    """Autograd's engine; failures between ranks come out of it coded, and a GPU's endless wait is
    reported.
    """

    watch: RankWatch | None = None

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with told("in a backward, while gradients were reduced"):
            found = super().run_backward(*args, **kwargs)
            watch_gpu()
            return found


def watch_gpu() -> None:
    """What this process has queued so far ends with all-reduces that may never be done."""
    watch = getattr(compat.execution_engine.get(), "watch", None)
    if watch is not None:
        watch.behind_backward(user_line())


def install(group: dist.ProcessGroup) -> None:
    """From now on this process runs its backwards through an engine that translates; once is enough.

    Over NCCL the group's timeout also bounds how long a backward may stay unfinished before that is said.
    """
    if not isinstance(compat.execution_engine.get(), _Engine):
        compat.execution_engine.set(_Engine())
    engine: _Engine = compat.execution_engine.get()
    if engine.watch is None and dist.get_backend(group) == "nccl":
        engine.watch = RankWatch(group_timeout(group).total_seconds())
