"""Compile many programs with one run of the C++ compiler, and hand them memory that holds NaNs.

Starting g++ and reading the prelude costs more than a small kernel. In a batch each call stops where it would
wait for its library (`Waiting`); `build()` compiles what all of them need as one unit, then they run through.

>>> with Batch() as batch:
...     with suppress(Waiting):
...         call(x)
...     batch.build()
...     call(x)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from dynamotor.base.errors import BuildError
from dynamotor.codegen import cpp
from dynamotor.codegen.call_program import CallProgram
from dynamotor.codegen.gpu_program import GpuProgram
from dynamotor.runtime import cpp_build, memory
from dynamotor.runtime.device_memory import DeviceArena


class Waiting(BaseException):
    """A call has reached kernels that are not built yet. No Exception: no fallback may take it."""


class Batch:
    """While entered, fresh memory is poisoned, and kernels of call programs wait for `build`. `waits=False`: they
    are built as they are for users.
    """

    def __init__(self, waits: bool = True) -> None:
        self._waits = waits
        self._functions: dict[str, cpp.CFunction] = {}
        self._pending: Future[cpp_build.Library] = Future()
        self._saved: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Batch:
        batch, prepare = self, CallProgram.prepare

        def start_builds(call: Any) -> dict[str, str]:
            functions = list(call._writer.functions.values())
            batch._functions.update({f.name: f for f in functions})
            call._units, call.builds = ([functions], [batch._pending]) if functions else ([], [])
            call.cpp_source = ""
            return {"cpp": ""}

        def wait_or_prepare(call: Any) -> None:
            if any(not pending.done() for pending in getattr(call, "builds", ())):
                raise Waiting
            prepare(call)

        if self._waits:
            self._put(CallProgram, "_start_builds", start_builds)
            self._put(CallProgram, "prepare", wait_or_prepare)
        for kind in (CallProgram, GpuProgram):
            self._put(kind, "_built", _poisoned_globals(kind._built))
        for arena in (memory.Arena, DeviceArena):
            self._put(arena, "acquire", _poisoned_block(arena.acquire))
        return self

    def __exit__(self, *_: object) -> None:
        while self._saved:
            setattr(*self._saved.pop())

    def _put(self, where: Any, name: str, value: Any) -> None:
        self._saved.append((where, name, getattr(where, name)))
        setattr(where, name, value)

    def build(self) -> None:
        """Compile and load all kernels that calls wait for. BuildError when the compiler refuses one."""
        functions, pending = self._functions, self._pending
        self._functions, self._pending = {}, Future()
        if not functions:
            return
        try:
            unit = cpp.emit_unit(functions.values())
            pending.set_result(cpp_build.load_library(unit, cpp.flags(unit)))
        except BuildError as error:
            pending.set_exception(error)
            raise


def _poisoned_globals(built: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """A program's globals, whose allocators give memory that holds the pattern."""

    def globals_of(call: Any) -> dict[str, Any]:
        found = built(call)
        return {**found, **{name: poisoned(found[name]) for name in ("take", "new") if name in found}}

    return globals_of


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An allocator whose memory holds NaNs."""
    return lambda *args: memory.poison(make(*args))


def _poisoned_block(acquire: Callable[..., memory.Block]) -> Callable[..., memory.Block]:
    def poison(arena: memory.Arena, nbytes: int) -> memory.Block:
        block = acquire(arena, nbytes)
        memory.poison(block.bytes)
        return block

    return poison
