"""XLA for PyTorch: the lazy `xla` device, the bridge from captured graphs, and the API that users of torch_xla know.

>>> import dynamotor.xla
>>> model = MNIST().to("xla")
"""

import torch

from . import environment  # noqa: F401  (what it says comes before anything starts jax)

# isort: split
from . import amp, core, debug, device, distributed, experimental, regions, runtime, start, step, sync, toplevel, utils  # noqa: F401
from .callable_module import make_callable
from .debug import analysis
from .install import install_as_torch_xla
from .persistent_cache import initialize_cache, initialize_from_environment
from .regions import compile
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
    "step",
    "sync",
]

# Libraries ask which torch_xla this is: the one for this PyTorch.
__version__ = torch.__version__.partition("+")[0]
make_callable(device, toplevel.device)
make_callable(step, regions.step)
make_callable(sync, toplevel.sync)
analysis.start_from_environment()
initialize_from_environment()
