"""What PyTorch finds in the place of its `torch._dynamo.backends.torchxla` where torch_xla is this package.

>>> torch.compile(model, backend="openxla")     # the bridge, loaded before anything is captured

PyTorch's own module asks torch_xla for the executables of graphs that it captured as a tensor subclass's.
"""

from __future__ import annotations

from dynamotor.extension_api import answer

answer("openxla", "dynamotor.xla.torch_compile:xla_backend")
