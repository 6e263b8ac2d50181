"""Gives autograd a thread for each xla device where a backward ran before they were known.

The autograd engine counts the devices once, at the first backward of a process. One of a CPU model before
`import dynamotor.xla` left xla's without a thread: a backward there failed with an assertion of PyTorch's.

>>> add(4, flags)      # threads for xla:0 to xla:3, those that the engine has are kept
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from dynamotor.extension_api import BuildError, load_library

from . import compat

_SOURCE = """
#include <torch/csrc/autograd/engine.h>
namespace {
// A class derived from the engine may name its protected members.
struct Reach : torch::autograd::Engine {
  static void add(torch::autograd::Engine& engine, size_t devices) {
    if (engine.*(&Reach::thread_pool_shared_) == nullptr) return;  // no backward yet: it will count them
    auto& queues = engine.*(&Reach::device_ready_queues_);
    for (size_t i = queues.size(); i < devices; i++) {
      queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
      std::thread(&Engine::thread_init, &engine, static_cast<int>(i), queues.back(), true).detach();
    }
  }
};
}
extern "C" void add_threads(int64_t devices) {
  Reach::add(torch::autograd::Engine::get_default_engine(), devices);
}
"""


def add(devices: int, flags: Sequence[str]) -> None:
    """Let the engine have threads for so many devices. flags: the compiler's, for PyTorch's headers.

    The source takes seconds to compile, so it is asked for only in a thread that has recorded for a backward.
    Without a compiler nothing changes.
    """
    if compat.recorded_nodes() == 0:
        return
    try:
        library = load_library(_SOURCE, flags)
    except BuildError:
        return
    library.handle.add_threads(ctypes.c_int64(devices))
