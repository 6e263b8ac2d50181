"""Compiled graphs as plain data, and back: the disk cache's form of a call program, so that no process writes
it again.

>>> # None when a library of its kernels is gone
>>> again = restore(json.loads(json.dumps(describe(compiled))), "graph0")
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..base import cache
from ..base.config import config
from ..base.errors import BuildError
from ..graph.op_facts import is_custom
from ..graph.plain_data import NotPlain, decode, decode_graph, encode, encode_graph, plain
from ..graph.spec import Compiled
from ..runtime import cpp_build, triton_build
from ..runtime.cuda_graphs import GraphedCall
from .call_program import CallProgram, Expected, Listing
from .externs import Callee
from .folded import FoldedCall, FoldedOnce, Part
from .gpu_program import GpuProgram, Launch
from .triton_kernel import TritonFunction


def describe(call: Compiled | None) -> Any:
    """Plain data of what `compile_aten` gave. NotPlain where it holds something that no text can stand
    for.
    """
    if call is None:
        return None
    if type(call) is FoldedCall:
        part = call.part
        return {
            "folded": [
                describe(call.program),
                encode_graph(part.gm),
                encode(part.sources),
                encode(part.specs),
            ]
        }
    if type(call) is GraphedCall:
        return {
            "graphed": [describe(call.call), sorted(call.static), sorted(call.mutated), call.n_copied],
        }
    if not isinstance(call, CallProgram) or type(call) not in (CallProgram, GpuProgram):
        raise NotPlain(f"a {type(call).__qualname__}")
    text = [
        encode(call.listing),
        {name: _constant(name, value) for name, value in call.described().items()},
    ]
    if type(call) is GpuProgram:
        NotPlain.when(call.listing.layout, "a GPU's program of sizes that differ between calls")
        return {"gpu": [*text, kernels_of(call), encode(gpu_of(call.device))]}
    return {"program": [*text, [[cpp_build.build_key(s, flags), names] for s, flags, names in call.units()]]}


def _constant(name: str, value: Any) -> Any:
    NotPlain.when(
        type(value) not in (Callee, Expected) or is_custom(value.target), f"the constant {name} of a program"
    )
    return encode(value)


def library_keys(data: Any) -> list[str]:
    """The keys of the libraries that `restore` needs."""
    program = data["folded"][0] if "folded" in data else data
    return [key for key, _ in program["program"][2]]


def restore(
    data: Any, name: str, find: Callable[[str], cpp_build.Library | None] | None = None, fixed: bool = False
) -> Compiled | None:
    """The compiled graph of which `describe` wrote this; None when a library of its kernels is not there.

    find: gives a library by key (default: from the disk cache). fixed: its static inputs never
    changes.
    """
    find = find or cpp_build.stored_library
    if "folded" in data:
        program, graph, sources, specs = data["folded"]
        call = restore(program, name, find)
        kind = FoldedOnce if fixed else FoldedCall
        return None if call is None else kind(call, Part(decode_graph(graph), decode(sources), decode(specs)))
    if "graphed" in data:
        program, static, mutated, n_copied = data["graphed"]
        of_gpu: Any = restore(program, name)
        return of_gpu and GraphedCall(of_gpu, frozenset(static), frozenset(mutated), of_gpu.device, n_copied)
    if "gpu" in data:
        listing, constants, kernels, gpu = data["gpu"]
        stored = {known: decode(value) for known, value in constants.items()}
        return restored_gpu(name, decode(listing), stored, kernels, decode(gpu))
    listing, constants, units = data["program"]
    place: dict[str, cpp_build.Library] = {}
    for key, names in units:
        library = find(key)
        if library is None:
            return None
        place.update(dict.fromkeys(names, library))
    return StoredProgram(
        name, decode(listing), {known: decode(value) for known, value in constants.items()}, place
    )


class StoredProgram(CallProgram):
    """A call program whose text and kernels were there already."""

    def __init__(
        self,
        name: str,
        listing: Listing,
        constants: Mapping[str, Callee | Expected],
        place: Mapping[str, cpp_build.Library],
    ) -> None:
        self._constants, self._place = globals_of(constants), place
        self._set_up(name, listing)

    def _built(self) -> dict[str, Any]:
        return self._kernels(self._place)


# -- dependencies of a stored program besides its graph ------------------------------------------------------
_PACKAGE = Path(__file__).resolve().parents[1]
_APART = ("xla", "distributed", "tools")  # rooms that have no part in a program that is kept
_NOT_READ = {
    "auto_seconds",
    "build_seconds",
    "cache_dir",
    "cache_size_limit",
    "debug",
    "log",
    "disk_cache",
    "trace",
    "report",
}  # settings that change no program


def environment() -> tuple[str, ...]:
    """The settings, versions and machine that programs are compiled for. NotPlain where the package has no
    files to compare.
    """
    settings = sorted(
        (name, value) for name, value in asdict(config.snapshot()).items() if name not in _NOT_READ
    )
    return (
        repr(settings),
        *_versions(),
        cpp_build.cpu_model(),
        torch.backends.cpu.get_cpu_capability(),
        str(os.cpu_count()),
        *_compiler(config.cxx or os.environ.get("CXX", "")),
    )


_LIBC = "CS_GNU_LIBC_VERSION"


@functools.cache
def _versions() -> tuple[str, ...]:
    return (
        sys.version,
        *platform.uname()[:5:2],  # not `platform.platform()`, which starts a process to ask for the processor
        str(_LIBC in os.confstr_names and os.confstr(_LIBC)),
        torch.__version__,
        str(torch.version.git_version),
        hash_of_package(),
    )


def hash_of_package(package: Path = _PACKAGE) -> str:
    """What stands in the package's files, read once for each state of them on disk: reading them all is a
    tenth of a small model's first call. NotPlain where it has none.
    """
    files = list(_files(str(package)))
    NotPlain.when(len(files) < 50, "a package without its source files")
    states = ((file.path, file.stat()) for file in files)
    state = cache.digest(*(f"{p} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}" for p, s in states))
    known = cache.load("package", state)
    if known is None:
        found, here = hashlib.sha256(), f"{package}{os.sep}"
        for file in files:
            with open(file.path, "rb", buffering=0) as opened:
                content = opened.read()
            found.update(f"{file.path.removeprefix(here)} {len(content)}\n".encode())
            found.update(content)
        known = found.hexdigest().encode()
        cache.store("package", state, known)
    return known.decode()


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name not in _APART and entry.name != "__pycache__":
                yield from _files(entry.path)
        elif entry.name.endswith((".py", ".h", ".json", ".so")):
            yield entry


def _compiler(asked: str) -> tuple[str, ...]:
    """Which compiler built the kernels: its path, size and time."""
    found = []
    for word in asked.split() or ["g++", "clang++"]:
        path = shutil.which(word)
        if path:
            status = os.stat(path)
            found.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return (asked, *found)


# -- programs of a GPU ---------------------------------------------------------------------------------------


plain(TritonFunction)
Constants = Mapping[str, Any]  # each a Callee or an Expected


def gpu_of(device: torch.device) -> tuple[Any, ...]:
    """The facts that the plan of kernels depends on: the device (the interpreter's is a CPU) and the triton
    that builds
    for it.
    """
    on_gpu = device.type == "cuda"
    return device, torch.cuda.get_device_name(device) if on_gpu else "", triton_build.triton_version()


def kernels_of(call: GpuProgram) -> Any:
    """The launches of a program. NotPlain where another program has to stand by for other settings."""
    NotPlain.when(call.rounds, "a program with matrix products in TF32")
    return {name: encode(launch) for name, launch in call.launches().items()}


def restored_gpu(
    name: str, listing: Listing, constants: Constants, launches: Mapping[str, Any], made_for: tuple[Any, ...]
) -> GpuProgram | None:
    """The program again; None on another GPU, and where its kernels cannot be built or loaded (the caller
    compiles the graph, which knows what to do then).
    """
    device = made_for[0]
    if device.type == "cuda" and device.index >= torch.cuda.device_count() or made_for != gpu_of(device):
        return None
    call = StoredGpuProgram(name, listing, constants, launches, device)
    try:
        call.prepare()
    except BuildError:
        return None
    return call


def globals_of(constants: Constants) -> dict[str, Any]:
    """The meaning of a stored program's constants in its text."""
    return {
        name: value.function if type(value) is Callee else value.sized(value.spec.shape, value.spec.stride)
        for name, value in constants.items()
    }


class StoredGpuProgram(GpuProgram):
    """A GPU's program whose text was there already."""

    def __init__(
        self,
        name: str,
        listing: Listing,
        constants: Constants,
        launches: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.device, self.rounds = device, False
        self._constants = globals_of(constants)
        self._launches_stored: dict[str, Launch] = {k: decode(row) for k, row in launches.items()}
        self.builds: dict[str, Any] = {}
        for function, _, _ in self._launches_stored.values():
            self._start(function)
        self._set_up(name, listing)

    def launches(self) -> Mapping[str, Launch]:
        return self._launches_stored

    def _chosen(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        return {}  # its sizes are fixed

    def _on_build_error(self, error: BuildError) -> Any:  # an attribute elsewhere
        raise error
