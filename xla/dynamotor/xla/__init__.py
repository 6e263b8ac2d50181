"""XLA for PyTorch: the lazy `xla` device, the bridge from captured graphs, and the API that users of
torch_xla know.

>>> import dynamotor.xla
>>> model = MNIST().to("xla")

## Contract 7: the xla device and the bridge (`xla/`)

Needs jax (`pip install dynamotor[xla]`); nothing below `xla/` imports it. `import dynamotor.xla` registers
the device, XLA itself starts at the first use.
* **Recording** (`ir.py`). An op on xla tensors becomes a `Node` of its device's `Lane`. An `Instruction` is
  an op with the shapes and dtypes of its tensors and its constants; it is interned once, when aten's meta
  kernel gave its result's shape and the lowering was evaluated abstractly (`jax.eval_shape`), so what cannot
  be lowered is known before anything runs. The lane's key is a list of instruction numbers and positions:
  exact, no hashes, no object ids. Floats that a program may change from step to step are inputs (`lift=True`
  in the lowering), not part of the key.
* **Tensors** (`tensor.py`, `ops_view.py`). `XLATensor` is a wrapper subclass that holds an `Alias`: a root
  (one piece of memory with a version), or a view, a replayable chain of view ops over its parent. An in-place
  op records the functional op and scatters back along the chain (`ops_view.py`: one inverse rule a view op).
  Memory that a root's owner count and references leave free is donated. Tensors report the CPU's strides
  (`layout.py`),
  which are no part of a key; what addresses a storage (`as_strided`) is in `storage.py`.
* **Dispatch** (`dispatch.py`). Each overload is classified once, from its schema and the registries:
  recorded, view, in place, `out=`, decomposed (ours, then torch's tables, then composites), or run on the CPU
  (`fallback.py`, counted as `aten::op`). `specials.py` holds what schemas do not say.
* **Lowering** (`lowering.py`, `ops_*.py`): one `@op` function an op on jax arrays; docs/xla-op-lowering.md.
* **Flush** (`sync.py`, `execute.py`). Live roots (by reference count) are the outputs; the executable is
  found by key or compiled. The device's random state moves on when a draw is recorded; the keys of a trace's
  draws are an input of its graph (`rng.py`), in every mode.
* **Bridge** (`bridge.py`, `partition.py`): the backends `xla` and `xla_trace_everytime` take aten graphs from
  `autograd.aot`; a graph is recorded once, on leaves without data, through the same recorder; `Program` keeps
  the order of its inputs and an output plan (`Result`, `Input`, `Plain`). `step.py` records whole
  training steps in the same way. `torch_compile.py` offers the backends to `torch.compile`.
* **Replicas** (`replication.py`, `replicated.py`, `collectives.py`): collectives are ops; a graph that has
  one is compiled with `shard_map` over all processes' devices and run by all of them. SPMD is `jax.sharding`
  on leaves (`distributed/spmd`).
* **API tree**: `core/`, `distributed/`, `utils/`, `debug/`, `runtime.py`, ... as `torch_xla` has it;
  docs/xla-api.md is generated from the code.
"""

import functools
import importlib

import torch

from . import environment  # noqa: F401  (its settings come before anything starts jax)

# isort: split
from . import (  # noqa: F401
    _XLAC,
    amp,
    control_flow,
    core,
    debug,
    device,
    distributed,
    experimental,
    regions,
    runtime,
    start,
    step,
    sync,
    toplevel,
    utils,
)
from .core import xla_model as xm  # noqa: F401  (programs say torch_xla.xm, too)
from .debug import analysis
from .distributed import xla_backend  # noqa: F401  (makes the backend and `xla://` known)
from .install import install_as_torch_xla, make_callable
from .persistent_cache import initialize_cache, initialize_from_environment
from .regions import compile
from .stablehlo import save_as_stablehlo, save_torch_model_as_stablehlo
from .step import compile_step
from .toplevel import device_count, devices, launch, manual_seed, real_devices

__all__ = [
    "compile",
    "compile_step",
    "device",
    "device_count",
    "devices",
    "initialize_cache",
    "install_as_torch_xla",
    "launch",
    "manual_seed",
    "real_devices",
    "runtime",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
    "step",
    "sync",
]

# Libraries ask which torch_xla this is: the one for this PyTorch.
__version__ = torch.__version__.partition("+")[0]
make_callable(device, toplevel.device)
make_callable(step, regions.step)
make_callable(sync, toplevel.sync)
control_flow.install(functools.partial(importlib.import_module, "dynamotor.xla.torch_compile"))
analysis.start_from_environment()
initialize_from_environment()
