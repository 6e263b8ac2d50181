"""What PyTorch finds in the place of its `torch._dynamo.backends.torchxla` where torch_xla is this package.

>>> torch.compile(model, backend="openxla")     # the bridge, loaded before anything is captured

PyTorch's own module asks torch_xla for the executables of graphs that it captured as a tensor subclass's.
"""

from __future__ import annotations

from .torch_compile_adapter import answer

answer("openxla", "dynamotor.torch_compile_xla:xla_backend")
