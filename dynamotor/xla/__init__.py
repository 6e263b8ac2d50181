"""XLA for PyTorch: the lazy `xla` device, the bridge from captured graphs, and the API that users of torch_xla know.

>>> import dynamotor.xla
>>> model = MNIST().to("xla")
"""

from . import environment

environment.apply()  # before anything starts jax

from . import device, regions, start, step, sync, toplevel  # noqa: E402, F401
from .callable_module import make_callable  # noqa: E402
from .install import install_as_torch_xla  # noqa: E402
from .persistent_cache import initialize_cache, initialize_from_environment  # noqa: E402
from .regions import compile  # noqa: E402
from .step import compile_step  # noqa: E402
from .toplevel import device_count, devices, launch, manual_seed, real_devices  # noqa: E402

from . import amp, core, debug, distributed, experimental, runtime, utils  # noqa: E402, F401, I001
from .debug import analysis, metrics as _report, profiler  # noqa: E402, F401

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

make_callable(device, toplevel.device)
make_callable(step, regions.step)
make_callable(sync, toplevel.sync)
analysis.start_from_environment()
initialize_from_environment()
