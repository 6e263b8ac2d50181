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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.config import config
from ..base.errors import BuildError
from ..base.events import counters, fall_back
from ..graph.kernel_checks import tf32
from ..graph.sizes import Size, hint
from ..graph.spec import GraphInfo, TensorSpec, copy_as
from ..lower.lowering import Decline, decline_if
from ..lower.program import ExternStep, LoopStep, Program, refs
from ..runtime import device_memory, memory, triton_build, triton_launch
from . import autotune, triton, triton_gemm_choice
from .call_program import CallInstance, CallProgram, Writer, nbytes_of
from .cpp import structure
from .gpu_kernels import interpreted, job_of
from .triton_batch import batched
from .triton_family import ROOM, Chosen, Family, Variant
from .triton_kernel import TritonFunction
from .triton_ops import HELPERS
from .triton_plan import is_map

MOST_SIZES = 1024  # that a program knows to be built
Launch = tuple[
    TritonFunction, int, tuple[int, ...]
]  # a function, how many tensors it is given, random streams


class GpuWriter(Writer):
    """Writes launches; `launches` says what their names stand for."""

    def __init__(self, program: Program, info: GraphInfo, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.launches: dict[str, Launch] = {}
        self.facts: dict[
            str, dict[str, Any]
        ] = {}  # function -> fused ops, bytes of its arguments, launch: for reports
        self.families: dict[str, tuple[Family, tuple[int, ...]]] = {}  # name -> kernel of sizes, its streams
        self._known: dict[str, Family] = {}
        self.hints = tuple(
            symbol.hint
            for name in program.inputs
            if name not in program.buffers
            for symbol in (program.env.symbols if program.env is not None else ())
            if symbol.name == name
        )
        super().__init__(program, info, device)
        self.numbers = [
            n
            for n in program.inputs
            if self.on_gpu and n in program.buffers and program.buffers[n].spec.device.type == "cpu"
        ]
        self.static -= set(self.numbers)

    def loop(self, step: LoopStep) -> Iterator[str]:
        """The line that launches one kernel."""
        if not isinstance(step, triton.TritonStep):
            yield from self._general(step)
            return
        assert isinstance(step, triton.TritonStep) and step.function is not None
        row = (step.function, len(step.args), step.ints)
        name = self.named(self.launches, row, f"dynamotor::{step.function.name}")
        self._note(step, step.function)
        arguments = (
            [*step.args, "stream"] if self.on_gpu else step.args[:-1] if step.function.scratch else step.args
        )
        yield f"{name}({', '.join(arguments)})" + (f"  # {step.note}" if step.note else "")

    def _note(self, step: LoopStep, function: TritonFunction) -> None:
        """What reports say of a kernel."""
        self.called.append(function)
        if function.name not in self.facts:
            given = step.args[:-1] if function.scratch else step.args
            specs = [self.program.buffers[n].spec for n in dict.fromkeys(given)]
            nbytes = sum(hint(nbytes_of(spec)) for spec in specs)
            launch = {"grid": function.grid, "warps": function.warps}
            self.facts[function.name] = {"note": step.note, "bytes": nbytes, **launch}

    def _general(self, step: LoopStep) -> Iterator[str]:
        """The line of a kernel whose variants are chosen by the sizes of a call."""
        names = [name for name in self.program.inputs if name not in self.program.buffers]
        family = self._known.setdefault(structure(step.kernel), Family(step.kernel, names))
        name = self.named(self.families, (family, step.ints), family.title)
        variant, at = family.at(self.hints)
        self._note(step, replace(variant.launches[0].function, grid=at.grids[0]))
        self.seen.update(step.args)
        arguments = [*step.args, "stream"] if self.on_gpu else step.args
        yield f"{name}({', '.join(arguments)})" + (f"  # {step.note}" if step.note else "")

    def own_kernel(self, step: ExternStep) -> None:
        """None: an op's kernels are launched by the function that is called for it."""

    def extern(self, step: ExternStep) -> Iterator[str]:
        """The lines of an aten call; its results must be on the device if kernels read them."""
        reads_tensors = any(True for _ in refs((step.args, step.kwargs)))
        made_on = torch.device(step.kwargs.get("device") or ("cuda" if reads_tensors else "cpu"))
        decline_if(
            self.on_gpu and made_on.type != "cuda",
            f"{step.target} makes a tensor on the CPU among those of a GPU",
        )
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


def to_device(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """A number of the CPU on a GPU, without waiting for it: the driver has copied pageable memory when the
    call returns, but reads pinned memory later, when the program may have written there.
    """
    return number.to(device, non_blocking=not number.is_pinned())


def _placed(program: Program, device: torch.device) -> Program:
    """The program with all buffers on the device: intermediates, which a trial is given as inputs, do not say
    their places.
    """
    buffers = {name: replace(b, spec=replace(b.spec, device=device)) for name, b in program.buffers.items()}
    return replace(program, buffers=buffers)


def _in_any_variant(step: LoopStep | ExternStep) -> LoopStep | ExternStep:
    """A step whose result may reuse an operand's memory only if each variant of it is one launch: a map."""
    return step if isinstance(step, ExternStep) or is_map(step.kernel) else replace(step, inplace=())


class Meanwhile:
    """A graph run op by op, with results laid out as the compiled graph's: the other half of a training
    step relies on it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._written = gm, False
        nodes = list(gm.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._symbols = [
            (n, symbol)
            for n, node in enumerate(placeholders)
            if type(node.meta["val"]) is Size
            for symbol in node.meta["val"].symbols
        ]
        self._strides = [
            (n, node.meta["val"].stride)
            for n, node in enumerate(nodes[-1].args[0])
            if isinstance(node, fx.Node) and type(node.meta.get("val")) is TensorSpec
        ]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if not self._written:  # fx writes the code of a graph that is run, and of no other
            self._gm.recompile()
            self._written = True
        with compat.BelowViews():
            results = list(self._gm.forward(*inputs))
        of = {symbol: inputs[n] for n, symbol in self._symbols}
        given = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        for n, strides in self._strides:
            x = results[n]
            wanted = tuple([s.value(of) if type(s) is Size else s for s in strides])
            if x.numel() and x.stride() != wanted and x.untyped_storage().data_ptr() not in given:
                results[n] = copy_as(x, wanted)
        return tuple(results)


class _NoVariant(Exception):
    """A kernel has no form for the sizes of a call that is about to begin."""

    def __init__(self, error: BuildError) -> None:
        super().__init__(str(error))
        self.error = error


class _InTurn:
    """Launches one after the other, each with some of the arguments and of the buffers between them."""

    def __init__(
        self,
        kernels: Sequence[tuple[Callable[..., None], tuple[int, ...]]],
        parts: Sequence[torch.Tensor],
        streams: bool,
    ) -> None:
        self.kernels, self.parts, self.streams = kernels, parts, streams

    def __call__(self, *args: Any) -> None:
        tensors, stream = (args[:-1], args[-1:]) if self.streams else (args, ())
        tensors = (*tensors, *self.parts)
        for kernel, picked in self.kernels:
            kernel(*[tensors[n] for n in picked], *stream)


def _rounds_operands(step: Any) -> bool:
    """Whether a step is a generated product that rounds float32 operands to TF32."""
    return (
        isinstance(step, triton.TritonStep) and step.function is not None and "tf32" in step.function.source
    )


def _raise(error: BuildError) -> Callable[..., Any]:
    raise error


class GpuProgram(CallProgram):
    """A compiled graph whose kernels are Triton's, on one device. Kernels are built in worker processes
    meanwhile.

    expanded: the program's loops are launches already, and nothing in it is to be replaced by a template (a
    trial). meanwhile: what serves calls while the kernels for them are built; None: such calls wait.
    """

    _writer: GpuWriter
    _meanwhile: Meanwhile | None = None
    _variants: tuple[tuple[int, ...], dict[str, Any]] | None = None  # of the latest sizes

    def __init__(
        self,
        program: Program,
        info: GraphInfo,
        device: torch.device,
        on_build_error: Callable[[BuildError], Callable[..., Any]],
        expanded: bool = False,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        self.device = device
        self._meanwhile = meanwhile
        self._ready: set[tuple[int, ...]] = set()  # sizes whose kernels are built
        self.rounds = False  # a template rounds float32 operands to TF32
        if program.env is not None:
            program = replace(program, steps=[_in_any_variant(step) for step in program.steps])
        elif not expanded:
            launches = triton.expand(program)
            program = self._with_templates(launches, info)
            if program is not launches:
                given, on_build_error = on_build_error, self._leave_templates
                self._without_templates = functools.cache(
                    lambda: GpuProgram(launches, info, device, given, expanded=True)
                )
                self.rounds = any(_rounds_operands(step) for step in program.steps)
        program = batched(program)
        for name, buffer in program.buffers.items():
            if buffer.value is not None and buffer.value.device != device:
                program.buffers[name] = replace(buffer, value=buffer.value.to(device))
        super().__init__(program, info, on_build_error)
        rows = (*self._writer.families.values(), *self._writer.launches.values())
        if any(streams for *_, streams in rows):
            self._meanwhile = None  # PyTorch draws other numbers than the kernels that may run the other half

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
        fall_back(
            f"template.{error.code}", what="template", name=self.name, reason=str(error), code=error.code
        )
        return self._without_templates()

    def _time(
        self, info: GraphInfo, programs: Sequence[Program], rounds: int = autotune.ROUNDS
    ) -> list[float]:
        """Milliseconds of programs with the same inputs; their kernels are built side by side before any is
        timed.
        """
        plain = replace(info, static_inputs=frozenset())
        placed = [_placed(program, self.device) for program in programs]
        calls = [GpuProgram(program, plain, self.device, _raise, expanded=True) for program in placed]
        try:
            inputs = autotune.random_inputs([placed[0].buffers[name].spec for name in placed[0].inputs])
            return autotune.time_calls(calls, inputs, self.device, rounds)
        except torch.OutOfMemoryError:
            return [float("inf")] * len(programs)

    def _write(self, program: Program, info: GraphInfo) -> GpuWriter:
        return GpuWriter(program, info, self.device)

    def _memory(self) -> memory.Arena:
        return device_memory.arena_of(self.device) if self.device.type == "cuda" else memory.arena

    def _start_builds(self) -> dict[str, Any]:
        functions = {f.name: f for f, _, _ in self._writer.launches.values()}
        variants = (variant for family, _ in self._writer.families.values() for variant in family.variants)
        functions |= {launch.function.name: launch.function for v in variants for launch in v.launches}
        self.triton_source = HELPERS + "".join(f.source for f in functions.values())
        self.builds = {}
        for f in functions.values():
            self._start(f)
        return {"triton": self.triton_source, "kernels": self._writer.facts}

    def _start(self, f: TritonFunction) -> None:
        """Start to build a function, once."""
        if self.device.type == "cuda" and f.name not in self.builds:
            job = job_of(f, triton_launch.arch(self.device.index))
            self.builds[f.name] = (job, triton_build.start_kernel(job))

    def _built(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "new": compat.empty_strided_cuda if self.device.type == "cuda" else memory.new_tensor,
            "on_device": functools.partial(to_device, self.device),
        }
        if self.device.type == "cuda":
            found["current_stream"] = functools.partial(compat.current_raw_stream, self.device.index)
        for name, (f, n_tensors, ints) in self.launches().items():
            found[name] = self._kernel(f, n_tensors, ints, int(f.grid))
        return found

    def launches(self) -> Mapping[str, Launch]:
        """The meaning of the text's launches."""
        return self._writer.launches

    def _kernel(
        self, f: TritonFunction, n_tensors: int, ints: tuple[int, ...], grid: int
    ) -> Callable[..., None]:
        """A function as a callable, of so many programs."""
        if self.device.type != "cuda":
            return interpreted(replace(f, grid=grid), ints)
        job, pending = self.builds[f.name]
        second = f.fallback
        other = (job_of(second, job.arch), int(second.grid)) if second is not None else None
        code = pending.result()
        return triton_launch.make_gpu_kernel(job, code, self.device, grid, n_tensors, ints, other)

    # -- sizes that differ between calls ---------------------------------------------------------------------
    def _laid_out(self, sizes: tuple[int, ...]) -> Any:
        """Behind the planned memory is room for what launches of one step leave for the next."""
        nbytes, places, results = super()._laid_out(sizes)
        most = max((at.nbytes for (_, at), _ in self._chosen(sizes).values()), default=0)
        return -(-nbytes // ROOM) * ROOM + most, places, results

    def _chosen(self, sizes: tuple[int, ...]) -> dict[str, tuple[tuple[Variant, Chosen], tuple[int, ...]]]:
        """The variants of a call's kernels, being built if they are new, and their random streams."""
        latest = self._variants
        if latest is not None and latest[0] == sizes:
            return latest[1]
        try:
            found = {name: (family.at(sizes), ints) for name, (family, ints) in self._writer.families.items()}
        except Decline as why:
            cure = "report it; the graph runs on aten kernels from now on"
            what = f"a kernel has no Triton form for the sizes {sizes}"
            raise _NoVariant(BuildError("DM309", what, why=str(why), cure=cure)) from why
        for (variant, _), _ in found.values():
            for launch in variant.launches:
                self._start(launch.function)
        self._variants = sizes, found
        return found

    def build_all(self) -> None:
        """Wait for the variants that are being built, too."""
        for _, pending in tuple(self.builds.values()):
            pending.exception()
        super().build_all()

    def _run_meanwhile(self, inputs: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> tuple[Any, ...]:
        assert self._meanwhile is not None
        return self._meanwhile(*inputs)

    def _serves_meanwhile(self, inputs: Sequence[Any]) -> bool:
        """Whether kernels for a call's sizes are still being built."""
        sizes = self._sizes(inputs)
        if sizes in self._ready:
            return False
        self._chosen(sizes)
        if not all(pending.done() for _, pending in tuple(self.builds.values())):
            counters["kernels"]["calls while they are built"] += 1
            return True
        if not sizes:
            self._meanwhile = None  # there are no others
        if len(self._ready) >= MOST_SIZES:
            self._ready.clear()
        self._ready.add(sizes)
        return False

    def _instance(self, block: memory.Block, sizes: tuple[int, ...]) -> CallInstance:
        instance = super()._instance(block, sizes)
        start = -(-super()._laid_out(sizes)[0] // ROOM) * ROOM if sizes else 0
        for name, ((variant, at), ints) in self._chosen(sizes).items():
            parts = [
                block.tensor(start + offset, (n,), (1,), dtype)
                for (offset, n), dtype in zip(at.parts, variant.parts, strict=True)
            ]
            n_tensors = len(self._writer.families[name][0].kernel.params)
            instance.scope[name] = self._launches(variant, at, parts, ints, n_tensors)
        return instance

    def _is_shared(self) -> bool:
        """No: which device is the current one is looked at before each call."""
        return False

    def _launches(
        self, variant: Variant, at: Chosen, parts: list[torch.Tensor], ints: tuple[int, ...], n_tensors: int
    ) -> Callable[..., None]:
        """The launches of a kernel at some sizes as one callable of its step's `n_tensors` (and a stream)."""
        found: list[tuple[Callable[..., None], tuple[int, ...]]] = []
        for launch, grid, numbers in zip(variant.launches, at.grids, at.numbers, strict=True):
            if grid:
                given = (*(ints[n] for n in launch.streams), *numbers)
                try:
                    kernel = self._kernel(launch.function, len(launch.tensors), given, grid)
                except BuildError as error:
                    raise _NoVariant(error) from error
                found.append((kernel, launch.tensors))
        if len(found) == 1 and not parts and found[0][1] == tuple(range(n_tensors)):
            return found[0][0]
        return _InTurn(found, parts, self.device.type == "cuda")

    def _run(self, inputs: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> tuple[Any, ...]:
        if self.rounds and not tf32():  # it was when this was compiled
            return self._without_templates()(*inputs)
        try:
            run = super()._run
            if self._meanwhile is not None and self._serves_meanwhile(inputs):
                run = self._run_meanwhile
            if self.device.type != "cuda" or compat.current_gpu() == self.device.index:
                return run(inputs)
            with torch.cuda.device(self.device):
                return run(inputs)
        except _NoVariant as why:  # the call has not begun
            replacement: Callable[..., tuple[Any, ...]] = self._on_build_error(why.error)
            self._replacement = replacement
            return replacement(*inputs)
        except torch.OutOfMemoryError as error:
            raise device_memory.OutOfDeviceMemory(self.name, self.device, str(error)) from error
