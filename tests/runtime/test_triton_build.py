"""Triton builds in worker processes, their cache, and the launcher: none of it needs a GPU."""

import sys
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from dynamotor import _C
from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import counters
from dynamotor.runtime import cpp_build, triton_build, triton_launch
from dynamotor.runtime.triton_build import GpuCode, TritonJob, job_key, start_kernel

SOURCE = """
@triton.jit
def double(p0, p1, s0):
    x = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(p1 + x, tl.load(p0 + x) * 2 + s0.to(tl.float32))
"""
JOB = TritonJob(SOURCE, "double", ("*fp32", "*fp32", "i64"), warps=4, arch=90)
LAUNCH = r"""
static long long seen[32];
extern "C" long long* record() { return seen; }
extern "C" long long calls = 0, contexts = 0, refuse = 0;
extern "C" int launch(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                      void* stream, void** parameters, void** extra) {
  if (refuse == 201 && contexts) refuse = 0;  // a context was set meanwhile
  if (refuse) return (int)refuse;
  long long values[] = {(long long)f, gx, bx, shared, (long long)stream};
  for (int i = 0; i < 5; i++) seen[i] = values[i];
  for (int i = 0; i < 5; i++) seen[5 + i] = *(long long*)parameters[i];
  calls++;
  return 0;
}
extern "C" int set_context(void* context) { contexts++; return 0; }
struct Attribute { int id; char pad[4]; union { char room[64]; int allowed; }; };
struct Config { unsigned gx, gy, gz, bx, by, bz, shared; void* stream; Attribute* attributes; unsigned n; };
extern "C" int launch_ex(const Config* c, void* f, void** parameters, void** extra) {
  if (c->gy * c->gz * c->by * c->bz != 1 || c->n != 1 || c->attributes->id != 6 || c->attributes->allowed != 1) return 1;
  return launch(f, c->gx, 1, 1, c->bx, 1, 1, c->shared, c->stream, parameters, extra);
}
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    with config.patch(cache_dir=str(tmp_path)):
        triton_build._pending.clear()
        yield
    triton_build._pending.clear()


@pytest.fixture(scope="module", autouse=True)
def _no_workers_left():
    yield
    triton_build.stop_workers()


@pytest.mark.skipif(not triton_build.triton_version(), reason="triton is not installed")
def test_a_kernel_is_built_for_a_gpu_that_is_not_there_and_found_again():
    before = counters["build"]["triton"]
    code = start_kernel(JOB).result()
    assert code.cubin[:4] == b"\x7fELF" and code.symbol == "double" and code.warps == 4 and code.extra == 2
    triton_build._pending.clear()
    assert start_kernel(JOB).result() == code and counters["build"]["triton"] == before + 1
    assert cache.entry_path("triton", job_key(JOB)).exists()
    assert "triton" not in sys.modules or type(sys.modules["triton"]).__name__ == "module"


@pytest.mark.skipif(not triton_build.triton_version(), reason="triton is not installed")
def test_a_kernel_that_does_not_build_says_why():
    job = TritonJob(
        "@triton.jit\ndef bad(p0):\n    tl.store(p0, no_such_name)\n", "bad", ("*fp32",), warps=1, arch=90
    )
    with pytest.raises(BuildError, match="DM305(.|\n)*no_such_name"):
        start_kernel(job).result()


def test_without_triton_the_error_names_the_cure(monkeypatch):
    monkeypatch.setattr(triton_build, "triton_version", lambda: "")
    with pytest.raises(BuildError, match="DM304(.|\n)*pip install triton"):
        start_kernel(JOB).result()


def test_a_worker_that_dies_is_an_error_not_a_hang(monkeypatch):
    if not triton_build.triton_version():
        pytest.skip("triton is not installed")
    monkeypatch.setattr(triton_build._Worker, "ask", lambda self, job: None)
    with pytest.raises(BuildError, match="a worker process died"):
        start_kernel(JOB).result()


@pytest.mark.skipif(not triton_build.triton_version(), reason="triton is not installed")
def test_workers_are_forked_by_one_process_that_is_started_again_when_it_was_killed():
    start_kernel(JOB).result()
    pool = triton_build._workers()
    first = pool.forks
    pool.idle.get_nowait()  # the next kernel needs a worker of its own
    start_kernel(replace(JOB, warps=2)).result()
    assert pool.forks is first
    first.kill()
    first.wait(10)
    start_kernel(replace(JOB, warps=8)).result()  # by the worker that is idle
    pool.idle.get_nowait()
    assert start_kernel(replace(JOB, warps=1)).result().warps == 1 and pool.forks is not first


@pytest.fixture(scope="module")
def library():
    return cpp_build.load_library(LAUNCH)


def kernel_of(library, unaligned=None, function=77):
    return _C.GpuKernel(
        library.address("launch"),
        library.address("set_context"),
        5,
        function,
        3,
        128,
        4096,
        2,
        (9,),
        2,
        unaligned,
        library,
    )


def seen_by(library):
    import ctypes

    record = library.handle.record
    record.restype = ctypes.POINTER(ctypes.c_longlong)
    return record()[:10]


def test_a_launch_passes_pointers_numbers_and_nulls(library):
    x, y = torch.zeros(8), torch.zeros(8)
    kernel_of(library)(x, y, 1234)
    assert seen_by(library) == [77, 3, 128, 4096, 1234, x.data_ptr(), y.data_ptr(), 9, 0, 0]


def test_a_launch_that_may_overlap_the_one_before_it_says_so(library):
    x, y = torch.zeros(8), torch.zeros(8)
    places = library.address("launch_ex"), library.address("set_context")
    kernel = _C.GpuKernel(*places, 5, 77, 3, 128, 4096, 2, (9,), 2, None, library, False, True)
    kernel(x, y, 1234)
    assert seen_by(library) == [77, 3, 128, 4096, 1234, x.data_ptr(), y.data_ptr(), 9, 0, 0]


def test_a_kernels_own_memory_takes_the_place_of_the_first_null(library):
    x, own = torch.zeros(8), torch.zeros(256, dtype=torch.uint8)
    places = library.address("launch"), library.address("set_context")
    kernel = _C.GpuKernel(*places, 5, 77, 3, 128, 4096, 2, (9,), 3, None, library, True)
    for start in (0, 1, 64):
        kernel(x, own[start:], 1234)
        rounded = -(-own[start:].data_ptr() // 128) * 128
        assert seen_by(library) == [77, 3, 128, 4096, 1234, x.data_ptr(), 9, rounded, 0, 0]


def test_unaligned_calls_of_a_kernel_with_memory_of_its_own_take_the_one_without(library, monkeypatch):
    places = {"cuLaunchKernel": library.address("launch"), "cuCtxSetCurrent": library.address("set_context")}
    code = GpuCode(b"", "double", 0, 4, 2)
    monkeypatch.setattr(triton_launch, "_address", places.__getitem__)
    monkeypatch.setattr(triton_launch, "_context", lambda index: 5)
    monkeypatch.setattr(triton_launch, "_load", lambda code, index: 77 if code.symbol == "double" else 78)
    asked = []

    def start(job):
        asked.append(job)
        future = Future()
        future.set_result(replace(code, symbol="other"))
        return future

    monkeypatch.setattr(triton_launch, "start_kernel", start)
    job, other = replace(JOB, scratch=128), replace(JOB, name="other")
    kernel = triton_launch.make_gpu_kernel(job, code, torch.device("cuda", 0), 3, 3, (9,), (other, 7))
    x, own = torch.zeros(9), torch.zeros(256, dtype=torch.uint8)
    kernel(x, x, own, 1234)
    start_of_own = -(-own.data_ptr() // 128) * 128
    assert (
        seen_by(library) == [77, 3, 128, 0, 1234, x.data_ptr(), x.data_ptr(), 9, start_of_own, 0]
        and not asked
    )
    kernel(x, x[1:], own, 1234)
    assert seen_by(library) == [78, 7, 128, 0, 1234, x.data_ptr(), x.data_ptr() + 4, 9, 0, 0]
    assert asked == [replace(other, aligned=False)]


def test_pointers_that_are_not_aligned_go_to_the_other_kernel(library):
    calls = []
    kernel = kernel_of(library, lambda *arguments: calls.append(arguments))
    x = torch.zeros(9)
    kernel(x, x, 0)
    assert not calls
    kernel(x, x[1:], 0)
    assert len(calls) == 1 and calls[0][1].data_ptr() == x.data_ptr() + 4


def test_a_thread_without_a_context_gets_one_and_other_errors_are_raised(library):
    x = torch.zeros(8)
    library.number("refuse").value, library.number("contexts").value = 201, 0
    kernel_of(library)(x, x, 0)
    assert library.number("contexts").value == 1
    library.number("refuse").value = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        kernel_of(library)(x, x, 0)
    library.number("refuse").value = 0
    with pytest.raises(TypeError, match="2 tensors and a stream"):
        kernel_of(library)(x, 0)
