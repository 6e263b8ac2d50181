"""Types of the C extension (csrc/): guards, dispatch, kernel launch and the frame hook."""

from collections.abc import Callable, Sequence
from types import CodeType, GetSetDescriptorType
from typing import Any

import torch

ambient_reads_are_direct: bool
built_from: str

def are_none(tensors: tuple[torch.Tensor, ...], attributes: tuple[GetSetDescriptorType, ...], /) -> bool: ...
def data_ptrs(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]: ...
def fingerprint(tensors: Sequence[torch.Tensor], words: int = 8, /) -> int: ...
def saved_memory(tensors: Sequence[torch.Tensor], /) -> bytes: ...
def put_memory_back(tensors: Sequence[torch.Tensor], saved: bytes, /) -> None: ...
def tensor_layouts(tensors: Sequence[torch.Tensor], /) -> bytes | tuple[Any, ...]: ...
def lie_as_noted(tensors: Sequence[torch.Tensor], layouts: bytes | tuple[Any, ...], /) -> bool: ...
def tensor_stamps(tensors: Sequence[torch.Tensor]) -> bytes: ...
def tensor_reads_are_direct() -> bool: ...
def is_plain_access(found: Any, /) -> bool: ...
def kernel_settings() -> int: ...
def first_result(outs: Sequence[Any], args: tuple[Any, ...], /) -> Any: ...
def set_force_eager(on: bool, /) -> bool: ...
def named_by(cls: type, /) -> Callable[[Any, Any], Any]: ...
def set_frame_hook(hook: FrameHook | None) -> FrameHook | None: ...

class Kernel:
    n_tensors: int
    def __init__(
        self,
        address: int,
        n_tensors: int,
        numbers: Sequence[int] = ...,
        release_gil: bool = ...,
        owner: Any = ...,
    ) -> None: ...
    def __call__(self, *arguments: Any) -> None: ...

class Program:
    def call_by(
        self, function: Callable[..., Any], interferes: Callable[[], bool] | None, excluded: int, /
    ) -> bool: ...
    def __call__(self, *inputs: Any) -> tuple[Any, ...]: ...

reads_profiler: bool

class OneCall:
    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        inputs: tuple[int, ...],
        names: tuple[str, ...],
        checks: tuple[Callable[[Any], Any], ...],
        places: tuple[int, ...],
        n_inputs: int,
        /,
    ) -> None: ...
    def __call__(self, *inputs: Any) -> tuple[Any, ...]: ...

class _AtenFunction:
    def __init__(self, symbol: str, n_in: int, n_out: int, otherwise: Callable[..., Any], /) -> None: ...
    def __call__(self, *tensors: Any) -> Any: ...

AtenFunction: type[_AtenFunction] | None  # None: this build of PyTorch lacks functions that it calls

class _Lender:
    def __init__(
        self, tensor: torch.Tensor, storage: Any, handle: int, use_count: Callable[[int], int], /
    ) -> None: ...
    def settle(self) -> None: ...
    def __call__(self, sizes: tuple[int, ...], strides: tuple[int, ...], /) -> torch.Tensor | None: ...

Lender: type[_Lender] | None  # None: this build of PyTorch lacks functions that it calls

class Expect:
    def __init__(
        self,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        otherwise: Callable[[Any], Any],
    ) -> None: ...
    def __call__(self, value: Any) -> Any: ...

class GpuKernel:
    def __init__(
        self,
        launch: int,
        set_context: int,
        context: int,
        function: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        n_tensors: int,
        numbers: tuple[int, ...],
        n_extra: int,
        unaligned: Callable[..., None] | None,
        owner: Any,
        scratch: bool = False,
        overlaps: bool = False,
    ) -> None: ...
    def __call__(self, *tensors_and_stream: Any) -> None: ...

class GuardProgram:
    sizes: dict[str, int]
    settled: GuardProgram | None
    def __init__(
        self,
        nodes: list[tuple[str, int, Any]],
        checks: list[tuple[str, int, Any, Any]],
        inputs: Sequence[int],
        ambient: Any = ...,
        settled: GuardProgram = ...,
    ) -> None: ...
    def check(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None: ...

class Entry:
    program: GuardProgram
    run: Callable[..., Any]
    finish: Callable[[Any, tuple[Any, ...]], Any] | None
    kwnames: tuple[str, ...]
    info: Any
    n_positional: int
    hits: int
    general: bool
    def __init__(
        self,
        program: GuardProgram,
        run: Callable[..., Any],
        finish: Callable[[Any, tuple[Any, ...]], Any] | None,
        n_positional: int,
        kwnames: tuple[str, ...],
        info: Any = ...,
    ) -> None: ...

class Dispatcher:
    entries: tuple[Entry, ...]
    miss: Any
    original: Any
    name: str
    disabled: bool
    hits: int
    misses: int
    def __init__(
        self,
        miss: Callable[[Dispatcher, tuple[Any, ...], tuple[str, ...]], Any] | None,
        original: Any,
        name: str = ...,
        raised: Callable[..., Any] | None = ...,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: Any, owner: Any = ...) -> Any: ...
    def add(self, entry: Entry) -> None: ...
    def remove(self, entry: Entry) -> None: ...
    def serve(self, entry: Entry, inputs: tuple[Any, ...], args: tuple[Any, ...]) -> Any: ...
    def clear(self) -> None: ...

class FrameHook:
    answers: dict[int, tuple[CodeType, Any, Any]]
    around: Callable[..., Any] | None
    def __init__(
        self,
        callback: Callable[[CodeType, Any], Dispatcher | bool | None],
        classes: tuple[type, ...] | None = ...,
    ) -> None: ...
    def call(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def skip(self, code: CodeType) -> None: ...
