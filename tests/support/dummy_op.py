"""An op of its own library: `torch.ops.dummy.gate`, with a kernel and nothing else."""

import torch

library = torch.library.Library("dummy", "DEF")
library.define("gate(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pointwise,))
library.impl("gate", lambda x, y: x * y.sigmoid(), "CompositeExplicitAutograd")
