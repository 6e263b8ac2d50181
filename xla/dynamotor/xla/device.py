"""Makes `xla` a device of PyTorch: the device guard, `torch.xla`, and one lane for each device that jax has.

>>> xla_devices()
[device(type='xla', index=0)]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from jax._src import xla_bridge  # jax has no public way to ask whether it has started

from dynamotor.extension_api import BuildError, load_library

from . import autograd_threads, compat, replication, rng
from .errors import require
from .ir import Lane, XlaError, lock

# PyTorch's builds have no device guard for XLA, and the autograd engine aborts the process without one; nor
# generators, which here hold a seed and how often they were drawn from.
_GUARD = """
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/XLAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
namespace {
struct XlaGenerator final : c10::GeneratorImpl {
  explicit XlaGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::XLA, index < 0 ? 0 : index),
                           c10::DispatchKeySet(c10::DispatchKey::XLA)) {}
  uint64_t state[2] = {c10::default_rng_seed_val, 0};
  void set_current_seed(uint64_t seed) override { state[0] = seed; state[1] = 0; }
  uint64_t current_seed() const override { return state[0]; }
  void set_offset(uint64_t offset) override { state[1] = offset; }
  uint64_t get_offset() const override { return state[1]; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return state[0]; }
  void set_state(const c10::TensorImpl& given) override {
    at::detail::check_rng_state(given);
    TORCH_CHECK(given.numel() == sizeof(state), "an XLA generator's state has ", sizeof(state), " bytes");
    std::memcpy(state, given.data(), sizeof(state));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto held = at::detail::empty_cpu({sizeof(state)}, c10::ScalarType::Byte);
    std::memcpy(held.data_ptr(), state, sizeof(state));
    return held.getIntrusivePtr();
  }
  XlaGenerator* clone_impl() const override {
    auto copy = new XlaGenerator(device().index());
    std::memcpy(copy->state, state, sizeof(state));
    return copy;
  }
};
struct XlaHooks final : at::XLAHooksInterface {
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<XlaGenerator>(index);
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
int64_t count = 1, current = 0;
struct XlaGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XLA> {
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count); }
  // Meaning of "xla" without an index: `x.to("xla")` is `x` where x is there.
  c10::Device getDevice() const override {
    return {c10::DeviceType::XLA, static_cast<c10::DeviceIndex>(current)};
  }
};
}
namespace c10::impl { C10_REGISTER_GUARD_IMPL(XLA, XlaGuard) }
// The name that PyTorch asks for.
const bool hooked = (at::XLAHooksRegistry()->Register("torch_xla::detail::XLAHooks", [](auto&&...) {
  return std::unique_ptr<at::XLAHooksInterface>(new XlaHooks());
}), true);
extern "C" void set_device_count(int64_t n) { count = n; }
extern "C" void set_current_device(int64_t index) { current = index; }
"""
_FOLDER = Path(torch.__file__).parent
_XLA_SLOT, _PRIVATE_SLOT, _SLOTS = 9, 20, 22  # c10::DeviceType values


class _PythonGuard(compat.DeviceGuard):
    """PyTorch's Python device guard, said to be XLA's: used where there is no C++ compiler."""

    def type_(self) -> Any:
        return compat.DeviceType.XLA


def _install_guard() -> Any:
    """Register the guard once; returns what must stay alive. The number of devices is told to it at their
    first use.
    """
    try:
        library = load_library(_GUARD, _flags())
    except BuildError:
        return _install_python_guard(_FOLDER)
    return library


def _flags() -> tuple[str, ...]:
    """The compiler's, for sources that include PyTorch's headers."""
    include = _FOLDER / "include"
    return (
        "-O1",
        "-std=c++20",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
        f"-L{_FOLDER / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(compat.cxx11_abi)}",
    )


def _install_python_guard(folder: Path) -> Any:
    """Put PyTorch's Python guard object, which it only registers for PrivateUse1, into XLA's slot of c10's
    table.
    """
    table = (ctypes.c_void_p * _SLOTS).in_dll(
        ctypes.CDLL(str(folder / "lib/libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = list(table)
    guard = _PythonGuard()
    compat.register_device_guard(guard)
    changed = [i for i in range(_SLOTS) if table[i] != before[i]]
    require(
        changed == [_PRIVATE_SLOT],
        "DM606",
        "the device guard of XLA cannot be registered",
        why=f"slots {changed} of c10's table changed, not {_PRIVATE_SLOT}",
        cure="install a C++ compiler (g++): the guard is then built and registered by PyTorch's own macro",
    )
    table[_XLA_SLOT], table[_PRIVATE_SLOT] = table[_PRIVATE_SLOT], before[_PRIVATE_SLOT]
    return guard


_installed: list[Any] = []
_lanes: dict[Any, Lane] = {}


_started: list[jax.Device] = []


def local_devices() -> list[jax.Device]:
    """jax's devices of this process. The first call joins the other replicas, if there are any, and starts
    XLA: importing does not."""
    if not _started:
        replication.start()
        _make_virtual_cpus()
        _started.extend(jax.local_devices())
        _tell_guard("set_device_count", len(_started))
        autograd_threads.add(len(_started), _flags())
    return _started


def has_started() -> bool:
    """Whether the devices were asked for."""
    return bool(_started)


def _make_virtual_cpus() -> None:
    """CPU_NUM_DEVICES devices, where this process is no replica (one has one) and jax was not told
    otherwise."""
    count = int(os.environ.get("CPU_NUM_DEVICES", "1"))
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > 1 and replication.size() == 1 and not told and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", count)


def platform() -> str:
    """The kind of the devices: "CPU", "CUDA" or "TPU"."""
    name = local_devices()[0].platform
    return {"gpu": "CUDA", "cuda": "CUDA"}.get(name, name.upper())


def device_count() -> int:
    """The number of devices of this process."""
    return len(local_devices())


def xla_devices() -> list[torch.device]:
    """The devices of this process."""
    return [torch.device("xla", index) for index in range(len(local_devices()))]


def jax_device(device: Any) -> jax.Device:
    """jax's device behind `xla:i`; XlaError DM607 when there are not so many."""
    index = torch.device(device).index or 0
    found = local_devices()
    if index < len(found):
        return found[index]
    raise XlaError(
        "DM607",
        f"there is no device xla:{index}",
        why=f"jax has {len(found)} {platform()} device(s) in this process",
        cure="use a lower index; CPU devices are added with "
        "XLA_FLAGS=--xla_force_host_platform_device_count=N",
    )


_current = 0


def current_device() -> int:
    """The index that `device="xla"` without one means."""
    return _current


def _set_current(index: int) -> None:
    global _current
    _current = index
    _tell_guard("set_current_device", index)


def _tell_guard(what: str, number: int) -> None:
    if _installed and hasattr(_installed[0], "handle"):
        getattr(_installed[0].handle, what)(ctypes.c_int64(number))


def lane_of(device: Any) -> Lane:
    """The lane of a device; `xla` without an index is the current one. A thread that asks while another one
    records apart (`using_lane`) waits for the device's own."""
    with lock:
        lane = _lanes.get(device)
        if lane is None:
            index = torch.device(device).index
            device = torch.device("xla", _current if index is None else index)
            lane = _lanes.get(device)
            if lane is None:
                jax_device(device)
                lane = _lanes[device] = Lane(device)
        return lane


def lanes(device: Any = None) -> list[Lane]:
    """The lane of one device, or of all that were used."""
    with lock:
        return list(_lanes.values()) if device is None else [lane_of(torch.device(device))]


@contextlib.contextmanager
def using_lane(lane: Lane) -> Iterator[None]:
    """Record work on the lane's device into this lane: how the bridge traces apart from the running
    program, whose random state stays."""
    # A backward pass must run in this thread: others wait for the lock.
    with lock, torch.autograd.set_multithreading_enabled(False):
        before, state = _lanes.get(lane.device), rng.get_state(lane.device)
        _lanes[lane.device] = lane
        if lane.before is None:
            lane.before = lane.after = state
        rng.set_state(lane.after, lane.device)
        try:
            yield
        finally:
            lane.after = rng.get_state(lane.device)
            rng.set_state(state, lane.device)
            if before is None:
                del _lanes[lane.device]
            else:
                _lanes[lane.device] = before


class _DeviceContext:
    """`with torch.xla.device(1):` makes `device="xla"` mean `xla:1`."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index or 0

    def __enter__(self) -> None:
        self.before = _current
        _set_current(self.index)

    def __exit__(self, *exc: object) -> None:
        _set_current(self.before)


class XlaStream:
    """The one order in which a device executes its work: libraries that overlap work ask for streams."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = torch.device(
            "xla", _DeviceContext(current_device() if device is None else device).index
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, XlaStream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    def __enter__(self) -> XlaStream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Everything has the same order, inside and outside."""

    def wait_stream(self, stream: Any) -> None:
        """Earlier records come first."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """There is nothing to wait for: who reads a value waits for it."""

    def record_event(self, event: XlaEvent | None = None) -> XlaEvent:
        return event or XlaEvent()


class XlaEvent:
    """A place in that order, which is over for all that is recorded later."""

    def __init__(self, *options: Any, **more: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """There is nothing to mark."""

    wait = record

    def synchronize(self) -> None:
        """There is nothing to wait for: who reads a value waits for it."""

    def query(self) -> bool:
        return True


def module(**functions: Any) -> types.ModuleType:
    """The module registered as `torch.xla`: what generic PyTorch code asks of a device."""
    made = types.ModuleType("torch.xla")
    made.__dict__.update(
        is_available=lambda: True,
        init=lambda: None,
        is_initialized=lambda: True,
        _initialized=True,  # what activation checkpointing asks, before it looks after the random state
        device_count=device_count,
        current_device=current_device,
        set_device=lambda device: _DeviceContext(device).__enter__(),
        device=_DeviceContext,
        Stream=XlaStream,
        Event=XlaEvent,
        stream=lambda stream: XlaStream() if stream is None else stream,
        current_stream=XlaStream,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
        is_bf16_supported=lambda: True,
        **functions,
    )
    return made


def install(**functions: Any) -> None:
    """Register the guard and `torch.xla`, once a process. XlaError DM608 when the real torch_xla is
    loaded.
    """
    if _installed:
        return
    compat.require_names()
    require(
        not hasattr(torch, "_XLAC") and "_XLAC" not in sys.modules,
        "DM608",
        "torch_xla is already loaded in this process",
        cure="use either torch_xla or dynamotor.xla, not both",
    )
    _installed.append(_install_guard())
    compat.register_device_module("xla", module(**functions))
