"""The call program of a GPU: the CPU's, with Triton launches in place of C functions and memory of the
device.

    def call(arg0, arg1):
        stream = current_stream()
        mm(arg0, arg1_v0, out=buf1)
        out0 = new((32, 768), (768, 1), torch.bfloat16)
        k0(buf1, out0, stream)
        return (out0,)

On CPU tensors the same program runs its kernels in Triton's interpreter: that is how it is tested without a
GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.config import config
from ..base.errors import BuildError
from ..base.events import counters, emit
from ..graph.info import GraphInfo
from ..lower.program import ExternStep, LoopStep, Program
from ..runtime import device_memory, memory, triton_build, triton_interpret, triton_launch
from . import autotune, pad_rows, triton, triton_gemm_choice
from .program import CallProgram, Writer, refs
from .triton_kernel import TritonFunction
from .triton_ops import HELPERS
from .triton_plan import CannotPlan


class GpuWriter(Writer):
    """Writes launches; `launches` says what their names stand for."""

    def __init__(self, program: Program, info: GraphInfo, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.launches: dict[str, tuple[TritonFunction, int, tuple[int, ...]]] = {}
        self.facts: dict[
            str, dict[str, Any]
        ] = {}  # function -> what it fuses, the bytes it is given, its launch: for reports
        super().__init__(program, info, device)
        self.numbers = [
            n for n in program.inputs if self.on_gpu and program.buffers[n].spec.device.type == "cpu"
        ]
        self.static -= set(self.numbers)

    def loop(self, step: LoopStep) -> Iterator[str]:
        """The line that launches one kernel."""
        assert isinstance(step, triton.TritonStep) and step.function is not None
        row = (step.function, len(step.args), step.ints)
        name = next((known for known, other in self.launches.items() if other == row), None)
        name = name or self.unique(f"k{len(self.launches)}")
        self.launches[name], self.labels[name] = row, f"dynamotor::{step.function.name}"
        if step.function.name not in self.facts:
            given = step.args[:-1] if step.function.scratch else step.args
            nbytes = sum(
                s.extent * s.dtype.itemsize
                for s in (self.program.buffers[n].spec for n in dict.fromkeys(given))
            )
            self.facts[step.function.name] = {
                "note": step.note,
                "bytes": nbytes,
                "grid": step.function.grid,
                "warps": step.function.warps,
            }
        self.called.append(step.function)
        arguments = (
            [*step.args, "stream"] if self.on_gpu else step.args[:-1] if step.function.scratch else step.args
        )
        yield f"{name}({', '.join(arguments)})" + (f"  # {step.note}" if step.note else "")

    def extern(self, step: ExternStep) -> Iterator[str]:
        """The lines of an aten call; what it makes must lie on the device, where kernels read it."""
        reads_tensors = any(True for _ in refs((step.args, step.kwargs)))
        if (
            self.on_gpu
            and torch.device(step.kwargs.get("device") or ("cuda" if reads_tensors else "cpu")).type != "cuda"
        ):
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


def _new(
    device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _job(f: TritonFunction, arch: int) -> triton_build.TritonJob:
    """What is built for a function."""
    source = HELPERS + f.source
    return triton_build.TritonJob(
        source, f.name, f.signature, f.warps, arch, debug=f.checks, stages=f.stages, scratch=f.scratch
    )


def _interpreted(f: TritonFunction, ints: tuple[int, ...]) -> Callable[..., None]:
    """The function in the interpreter."""
    kernel = triton_interpret.make_interpreted(HELPERS + f.source, f.name, f.grid, ints)
    other = f.fallback
    return kernel if other is None else triton_interpret.by_alignment(kernel, _interpreted(other, ints))


def _placed(program: Program, device: torch.device) -> Program:
    """The program with all buffers on the device: intermediates, which a trial is given as inputs, do not say
    where they lie.
    """
    buffers = {name: replace(b, spec=replace(b.spec, device=device)) for name, b in program.buffers.items()}
    return replace(program, buffers=buffers)


def _rounds_operands(step: Any) -> bool:
    """Whether a step is a generated product that rounds float32 operands to TF32."""
    return isinstance(step, triton.TritonStep) and "tf32" in step.function.source


def _raise(error: BuildError) -> Callable[..., Any]:
    raise error


class GpuProgram(CallProgram):
    """A compiled graph whose kernels are Triton's, on one device. Kernels are built in worker processes
    meanwhile.

    expanded: the program's loops are launches already, and nothing in it is to be replaced by a template (a
    trial).
    """

    def __init__(
        self,
        program: Program,
        info: GraphInfo,
        device: torch.device,
        on_build_error: Callable[[BuildError], Callable[..., Any]],
        expanded: bool = False,
    ) -> None:
        self.device = device
        self._rounds = False  # a template rounds float32 operands to TF32
        if not expanded:
            launches = triton.expand(pad_rows.pad_rows(program) if _is_gpu(device) else program)
            program = self._with_templates(launches, info)
            if program is not launches:
                given, on_build_error = on_build_error, self._leave_templates
                self._without_templates = functools.cache(
                    lambda: GpuProgram(launches, info, device, given, expanded=True)
                )
                self._rounds = any(_rounds_operands(step) for step in program.steps)
        for name, buffer in program.buffers.items():
            if buffer.value is not None and buffer.value.device != device:
                program.buffers[name] = replace(buffer, value=buffer.value.to(device))
        super().__init__(program, info, on_build_error)

    def _with_templates(self, program: Program, info: GraphInfo) -> Program:
        """The program with generated matrix products where they are known, or found, to be faster than the
        library's.
        """
        if self.device.type != "cuda":
            return triton_gemm_choice.choose(program, "interpreter")
        tune = functools.partial(self._time, info) if config.max_autotune else None
        return triton_gemm_choice.choose(program, torch.cuda.get_device_name(self.device), tune)

    def _leave_templates(self, error: BuildError) -> GpuProgram:
        """What runs where a template cannot be built or loaded: the library's products with their own kernels
        behind them.
        """
        counters["fallback"][f"template.{error.code}"] += 1
        emit("fallback", what="template", name=self.name, reason=str(error), code=error.code)
        return self._without_templates()

    def _time(self, info: GraphInfo, programs: Sequence[Program]) -> list[float]:
        """Milliseconds of programs with the same inputs; their kernels are built side by side before any is
        timed.
        """
        plain = replace(info, static_inputs=frozenset())
        placed = [_placed(program, self.device) for program in programs]
        calls = [GpuProgram(program, plain, self.device, _raise, expanded=True) for program in placed]
        try:
            inputs = autotune.random_inputs([placed[0].buffers[name].spec for name in placed[0].inputs])
            return autotune.time_calls(calls, inputs, self.device)
        except torch.OutOfMemoryError:
            return [float("inf")] * len(programs)

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
                job = _job(f, arch)
                self.builds[f.name] = (job, triton_build.start_kernel(job))
        return {"triton": self.triton_source, "kernels": self._writer.facts}

    def _built(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "new": functools.partial(_new, self.device),
            "on_device": functools.partial(torch.Tensor.to, device=self.device),
        }
        if self.device.type == "cuda":
            found["current_stream"] = functools.partial(torch._C._cuda_getCurrentRawStream, self.device.index)
        for name, (f, n_tensors, ints) in self._writer.launches.items():
            if self.device.type == "cuda":
                job, pending = self.builds[f.name]
                second = f.fallback
                other = (_job(second, job.arch), second.grid) if second is not None else None
                found[name] = triton_launch.make_gpu_kernel(
                    job, pending.result(), self.device, f.grid, n_tensors, ints, other
                )
            else:
                found[name] = _interpreted(f, ints)
        return found

    def _run(self, inputs: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> tuple[Any, ...]:
        if self._rounds and not triton_gemm_choice.tf32_is_allowed():  # it was when this was compiled
            return self._without_templates()(*inputs)
        try:
            if self.device.type != "cuda" or torch._C._cuda_getDevice() == self.device.index:
                return super()._run(inputs)
            with torch.cuda.device(self.device):
                return super()._run(inputs)
        except torch.OutOfMemoryError as error:
            raise device_memory.OutOfDeviceMemory(self.name, self.device, str(error)) from error
