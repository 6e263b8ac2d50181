"""aten's products of groups of rows become `dynamotor::grouped_product` on a GPU, where aten has no kernel
for all groups at once: it would read their ends on the host and call one product after the other.

    _grouped_mm(x, w, offs)    →    grouped_product(x, w, offs)
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.nodes import arguments_of, spec_of, take_place
from ..graph.shapes import call
from ..graph.spec import GraphInfo, TensorSpec, aten

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_OWN_KERNEL = (9, 10)  # major numbers of GPUs for which aten has a kernel of bfloat16


def group_products(gm: fx.GraphModule, info: GraphInfo) -> None:
    """aten's grouped products of float32 and halves → grouped_product."""
    for node in [node for node in gm.graph.nodes if node.target is aten._grouped_mm.default]:
        a, b, offs, bias, _ = arguments_of(node).values()
        if offs is None or bias is not None or not _serves(spec_of(a), spec_of(b), spec_of(node)):
            continue
        with gm.graph.inserting_before(node):
            found = call(gm.graph, torch.ops.dynamotor.grouped_product.default, a, b, offs)
        take_place(found, node)


def _serves(a: TensorSpec, b: TensorSpec, result: TensorSpec) -> bool:
    if not a.dtype == b.dtype == result.dtype or a.dtype not in _TYPES:
        return False
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        return torch.cuda.get_device_capability(a.device)[0] not in _OWN_KERNEL
    return True
