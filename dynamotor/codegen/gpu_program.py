"""The call program of a GPU: the CPU's, with Triton launches in place of C functions and memory of the device.

    def call(arg0, arg1):
        stream = current_stream()
        mm(arg0, arg1_v0, out=buf1)
        out0 = new((32, 768), (768, 1), torch.bfloat16)
        k0(buf1, out0, stream)
        return (out0,)

On CPU tensors the same program runs its kernels in Triton's interpreter: that is how it is tested without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..base.errors import BuildError
from ..graph.info import GraphInfo
from ..lower.program import ExternStep, LoopStep, Program
from ..runtime import device_memory, memory, triton_build, triton_interpret, triton_launch
from . import triton
from .program import CallProgram, Writer, refs
from .triton_kernel import TritonFunction
from .triton_ops import HELPERS
from .triton_plan import CannotPlan


class GpuWriter(Writer):
    """Writes launches; `launches` says what their names stand for."""

    def __init__(self, program: Program, info: GraphInfo, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.launches: dict[str, tuple[TritonFunction, int, tuple[int, ...]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}  # function -> what it fuses, the bytes it is given, its launch: for reports
        super().__init__(program, info)
        self.numbers = [n for n in program.inputs if self.on_gpu and program.buffers[n].spec.device.type == "cpu"]
        self.static -= set(self.numbers)

    def loop(self, step: LoopStep) -> Iterator[str]:
        """The line that launches one kernel."""
        assert isinstance(step, triton.TritonStep) and step.function is not None
        row = (step.function, len(step.args), step.ints)
        name = next((known for known, other in self.launches.items() if other == row), None) or f"k{len(self.launches)}"
        self.launches[name] = row
        if step.function.name not in self.facts:
            nbytes = sum(s.extent * s.dtype.itemsize for s in (self.program.buffers[n].spec for n in dict.fromkeys(step.args)))
            self.facts[step.function.name] = {"note": step.note, "bytes": nbytes, "grid": step.function.grid,
                                              "warps": step.function.warps}
        arguments = [*step.args, "stream"] if self.on_gpu else step.args
        yield f"{name}({', '.join(arguments)})" + (f"  # {step.note}" if step.note else "")

    def extern(self, step: ExternStep) -> Iterator[str]:
        """The lines of an aten call; what it makes must lie on the device, where kernels read it."""
        reads_tensors = any(True for _ in refs((step.args, step.kwargs)))
        if self.on_gpu and torch.device(step.kwargs.get("device") or ("cuda" if reads_tensors else "cpu")).type != "cuda":
            raise CannotPlan(f"{step.target} makes a tensor on the CPU amid what a GPU computes")
        return super().extern(step)

    def new_result(self, name: str) -> str:
        """Results come from PyTorch's allocator, which is fast on a GPU."""
        spec = self.program.buffers[name].spec
        return f"{name} = new({spec.shape}, {spec.stride}, {spec.dtype})"

    def write(self) -> str:
        """The source text of the program."""
        self.lines += [f"{name} = on_device({name})" for name in self.numbers]
        if self.on_gpu and any(isinstance(step, LoopStep) for step in self.program.steps):
            self.lines.append("stream = current_stream()")
        return super().write()


def _new(device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class GpuProgram(CallProgram):
    """A compiled graph whose kernels are Triton's, on one device. Kernels are built in worker processes meanwhile."""

    def __init__(self, program: Program, info: GraphInfo, device: torch.device,
                 on_build_error: Callable[[BuildError], Callable[..., Any]]) -> None:
        self.device = device
        program = triton.expand(program)
        for name, buffer in program.buffers.items():
            if buffer.value is not None and buffer.value.device != device:
                program.buffers[name] = replace(buffer, value=buffer.value.to(device))
        super().__init__(program, info, on_build_error)

    def _write(self, program: Program, info: GraphInfo) -> Writer:
        return GpuWriter(program, info, self.device)

    def _memory(self) -> memory.Arena:
        return device_memory.arena_of(self.device) if self.device.type == "cuda" else memory.arena

    def _start_builds(self) -> dict[str, Any]:
        functions = {f.name: f for f, _, _ in self._writer.launches.values()}
        self.triton_source = HELPERS + "".join(f.source for f in functions.values())
        self.builds = {}
        if self.device.type == "cuda":
            arch = triton_launch.arch(self.device.index)
            for f in functions.values():
                job = triton_build.TritonJob(HELPERS + f.source, f.name, f.signature, f.warps, arch, debug=f.checks)
                self.builds[f.name] = (job, triton_build.start_kernel(job))
        return {"triton": self.triton_source, "kernels": self._writer.facts}

    def _built(self) -> dict[str, Any]:
        found: dict[str, Any] = {"new": functools.partial(_new, self.device),
                                 "on_device": functools.partial(torch.Tensor.to, device=self.device)}
        if self.device.type == "cuda":
            found["current_stream"] = functools.partial(torch._C._cuda_getCurrentRawStream, self.device.index)
        for name, (f, n_tensors, ints) in self._writer.launches.items():
            if self.device.type == "cuda":
                job, pending = self.builds[f.name]
                found[name] = triton_launch.make_gpu_kernel(job, pending.result(), self.device, f.grid, n_tensors, ints)
            else:
                found[name] = triton_interpret.make_interpreted(HELPERS + f.source, f.name, f.grid, ints)
        return found

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        if self.device.type != "cuda" or torch._C._cuda_getDevice() == self.device.index:
            return super().__call__(*inputs)
        with torch.cuda.device(self.device):
            return super().__call__(*inputs)
