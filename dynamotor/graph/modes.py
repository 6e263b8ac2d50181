"""Grad mode, inference mode and autocast, which a trace changes for real: read, and put back. And settings
that go with a call.

>>> with preserved_modes():
...     compat.set_grad_enabled(False)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ..base import compat
from .states import enter_inference, leave_to, open_regions

AUTOCAST_DEVICES = ("cpu", "cuda")
# The settings that choose attention's kernels: what sets each, and what reads it.
ATTENTION_SETTINGS: dict[Any, Any] = {
    compat.enable_flash_attention: compat.flash_attention_enabled,
    compat.enable_mem_efficient_attention: compat.mem_efficient_attention_enabled,
    compat.enable_math_attention: compat.math_attention_enabled,
    compat.enable_cudnn_attention: compat.cudnn_attention_enabled,
    compat.enable_overrideable_attention: compat.overrideable_attention_enabled,
    compat.set_attention_order: compat.attention_order,
}


class UnderSettings:
    """The target of a node that calls a function of attention under settings of the program's."""

    def __init__(self, function: Callable[..., Any], settings: dict[Any, Any]) -> None:
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "attention")
        self.function, self.settings = function, dict(settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = {setter: ATTENTION_SETTINGS[setter]() for setter in self.settings}
        try:
            for setter, value in self.settings.items():
                setter(value)
            return self.function(*args, **kwargs)
        finally:
            for setter, value in before.items():
                setter(value)

    def __repr__(self) -> str:
        settings = ", ".join(f"{setter.__name__}={value}" for setter, value in self.settings.items())
        return f"{self.__name__} under {settings}"


class _Modes:
    """Grad mode, inference mode, autocast and function transforms of this thread, as they are now."""

    __slots__ = ("autocast", "cache", "depth", "grad", "nesting", "regions")

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.cache = torch.is_autocast_cache_enabled()
        self.autocast, self.nesting = autocast_state(), _nesting()
        self.regions, self.depth = open_regions(), compat.transform_depth()

    def restore(self) -> None:
        """Leave the regions that were entered since."""
        if compat.transform_depth() > self.depth:
            compat.leave_transforms(self.depth)
            if not self.depth and compat.forward_level.get() < 0:
                with contextlib.suppress(RuntimeError):  # none is left where no jvp was among them
                    compat.exit_dual_level(level=0)
        leave_to(self.regions)
        compat.set_grad_enabled(self.grad)
        torch.set_autocast_cache_enabled(self.cache)
        for _ in range(_nesting() - self.nesting):
            torch.autocast_decrement_nesting()
        if not self.nesting:
            torch.clear_autocast_cache()
        for device, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def preserved_modes() -> Iterator[None]:
    """Put grad mode, inference mode and autocast back as they were: a trace changes them for real and may
    stop anywhere.
    """
    before = _Modes()
    try:
        yield
    finally:
        before.restore()


class TrialMode(compat.TorchDispatchMode):
    """A mode of PyTorch's dispatcher for a run of a graph that may stop anywhere.

    Leaves the regions that were entered beneath it before itself: the end of inference mode puts back the
    dispatch keys of its beginning, this mode's among them, and each later call of the thread would look for
    a mode that is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[_Modes] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the dispatch would import torch._dynamo for its decorator

    def __enter__(self) -> Any:
        self._before.append(_Modes())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._before.pop().restore()
        super().__exit__(*error)


_REGIONS = frozenset((compat.set_grad_enabled, compat.enter_autocast, enter_inference))


def left_when_raising(run: Callable[..., Any], gm: fx.GraphModule | None) -> Callable[..., Any]:
    """The compiled form of a graph, which leaves the regions that the graph enters also if an op raises.

    Regions are plain nodes: without this, an error between two of them would leave the thread in no_grad or
    autocast. Any backend may run such a graph op by op.
    """
    if gm is None or not any(node.target in _REGIONS for node in gm.graph.nodes):
        return run

    def run_and_leave(*tensors: Any) -> Any:
        before = _Modes()
        try:
            return run(*tensors)
        except BaseException:
            before.restore()
            raise

    return run_and_leave


def autocast_state() -> dict[str, tuple[bool, torch.dtype]]:
    """Whether autocast is on, and its type, by kind of device."""
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in AUTOCAST_DEVICES
    }


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
