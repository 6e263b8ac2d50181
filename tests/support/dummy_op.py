"""Ops of their own library, with a kernel and nothing else: `torch.ops.dummy.gate`, `twice` and `halve`."""

import torch

library = torch.library.Library("dummy", "DEF")
library.define("gate(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pointwise,))
library.impl("gate", lambda x, y: x * y.sigmoid(), "CompositeExplicitAutograd")

for name, number in (("twice", 2), ("halve", 0.5)):
    library.define(f"{name}(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl(name, lambda x, number=number: x * number, "CompositeExplicitAutograd")
