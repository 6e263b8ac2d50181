"""Load built GPU code through the driver and make callables of it that cost about a microsecond a launch.

>>> kernel = make_gpu_kernel(job, code, device, grid=264, n_tensors=2, numbers=())
>>> kernel(x, y, stream)          # stream: torch._C._cuda_getCurrentRawStream(device.index)
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from .. import _C
from ..base.errors import BuildError
from .triton_build import GpuCode, TritonJob, start_kernel

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_LIMIT = 48 << 10  # bytes of shared memory that need no asking


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(
            "DM304", "the CUDA driver cannot be loaded", why=str(error), cure="install the NVIDIA driver"
        ) from error


@functools.cache
def _address(name: str) -> int:
    return ctypes.cast(getattr(driver(), name), ctypes.c_void_p).value or 0


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        why = f"CUDA error {status}: {text.value.decode() if text.value else 'unknown'}"
        raise BuildError(
            "DM305",
            f"{what} failed",
            why=why,
            cure="see the driver's message; `python -m dynamotor doctor` helps",
        )


@functools.cache
def arch(index: int) -> int:
    """The compute capability of a device as a number: 90 for an H100 or H200."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@functools.cache
def _context(index: int) -> int:
    """PyTorch's own (primary) context of a device, made current on this thread."""
    torch.cuda.init()
    with torch.cuda.device(index):
        torch.cuda.synchronize()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver().cuDeviceGet(ctypes.byref(device), index), "finding the device")
    _check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "retaining the device's context")
    return context.value or 0


_functions: dict[tuple[int, bytes, str], int] = {}
_lock = threading.Lock()


def _load(code: GpuCode, index: int) -> int:
    """The function of built code on a device; loaded once, it stays for the life of the process."""
    key = (index, code.cubin, code.symbol)
    with _lock:
        found = _functions.get(key)
        if found is not None:
            return found
        cuda, before, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        context = _context(index)
        _check(cuda.cuCtxGetCurrent(ctypes.byref(before)), "reading the current context")
        _check(cuda.cuCtxSetCurrent(ctypes.c_void_p(context)), "entering the device's context")
        try:
            _check(cuda.cuModuleLoadData(ctypes.byref(module), code.cubin), "loading GPU code")
            _check(
                cuda.cuModuleGetFunction(ctypes.byref(function), module, code.symbol.encode()),
                "finding a kernel",
            )
            if code.shared > _STATIC_LIMIT:
                status = cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, code.shared)
                _check(status, f"asking for {code.shared} bytes of shared memory")
        finally:
            if before.value:
                cuda.cuCtxSetCurrent(before)
        _functions[key] = function.value or 0
        return _functions[key]


def make_gpu_kernel(
    job: TritonJob,
    code: GpuCode,
    device: torch.device,
    grid: int,
    n_tensors: int,
    numbers: tuple[int, ...],
    other: tuple[TritonJob, int] | None = None,
) -> Callable[..., None]:
    """A callable of `n_tensors` tensors on `device` and a stream. With `job.scratch` the last tensor is the
    kernel's own memory.

    Code built for aligned pointers hands calls with others to a second kernel, which is built when it is
    first needed: the same text, or `other` (with its grid), which needs no memory of its own.
    """
    function = _load(code, device.index)
    given = n_tensors - 1 if job.scratch else n_tensors
    other_job, other_grid = other or (job, grid)
    unaligned = _Unaligned(other_job, device, other_grid, given, numbers) if job.aligned and given else None
    arguments = (
        _address("cuLaunchKernelEx" if job.overlaps else "cuLaunchKernel"),
        _address("cuCtxSetCurrent"),
        _context(device.index),
        function,
        grid,
        32 * code.warps,
        code.shared,
        n_tensors,
        numbers,
        code.extra,
        unaligned,
        None,
        bool(job.scratch),
        job.overlaps,
    )
    return _C.GpuKernel(*arguments)


class _Unaligned:
    """The same kernel for pointers of any alignment. It leaves out the memory that only the first one
    needs.
    """

    def __init__(
        self, job: TritonJob, device: torch.device, grid: int, n_tensors: int, numbers: tuple[int, ...]
    ) -> None:
        self._job, self._rest = job, (device, grid, n_tensors, numbers)
        self._n_tensors = n_tensors
        self._kernel: Callable[..., None] | None = None

    def __call__(self, *arguments: object) -> None:
        arguments = (*arguments[: self._n_tensors], arguments[-1])
        if self._kernel is None:
            job = replace(self._job, aligned=False)
            self._kernel = make_gpu_kernel(job, start_kernel(job).result(), *self._rest)
        self._kernel(*arguments)
