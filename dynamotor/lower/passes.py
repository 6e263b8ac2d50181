"""The native compiler's passes over an aten graph: one function lists them, in order.

>>> optimised = optimise(gm, info)          # gm is rewritten in place
>>> optimised.fold                          # the part that is computed once, or None

Each pass is `(gm, info) -> None` and keeps the graph runnable: `gm(*inputs, *constants)` gives the same
results as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from ..base.config import config
from ..graph.pass_manager import run_passes
from ..graph.spec import GraphInfo
from ..graph.verify_graph import verify_aten_graph
from .channels_last import assign_layouts
from .convolutions import (
    fuse_convolutions,
    multiply_weight_gradients,
    prepack_convolutions,
    split_convolution_bias,
)
from .decode_attention import attend_few_queries
from .embedding import add_embedding_rows
from .few_rows import part_products_of_few_rows
from .fold import Fold, fold_batch_norm, split_constants
from .gemm import copy_as_it_lies, split_bias
from .grouped_products import group_products
from .one_matrix import multiply_by_one_matrix
from .product_padding import pad_products
from .row_products import sum_row_products

Pass = Callable[[fx.GraphModule, GraphInfo], None]
added: list[tuple[str, Pass]] = []  # of rooms above: they run last


@dataclass(frozen=True)
class Optimised:
    """The rewritten graph, its info (with more static inputs when constants were split off) and the split-off
    part.
    """

    gm: fx.GraphModule
    info: GraphInfo
    fold: Fold | None


def pipeline(info: GraphInfo, on_gpu: bool = False) -> list[tuple[str, Pass]]:
    """The passes that run for this kind of graph under the current settings; most of them serve oneDNN and
    MKL.
    """
    if on_gpu:
        layout = [("channels-last layout", assign_layouts)] if config.layout_opt else []
        return [
            ("attention of few queries", attend_few_queries),
            ("products of groups", group_products),
            ("multiply by one matrix", multiply_by_one_matrix),
            ("part products of few rows", part_products_of_few_rows),
            ("sum products of few rows", partial(sum_row_products, on_gpu=True)),
            ("pad products", pad_products),
            ("add embedding rows", partial(add_embedding_rows, on_gpu=True)),
            ("split bias off convolutions", split_convolution_bias),
            ("copy operands in their layout", copy_as_it_lies),
            *layout,
            *added,
        ]
    inference = info.kind == "inference"
    passes: list[tuple[str, Pass, bool]] = [
        ("fold batch norm into convolutions", fold_batch_norm, inference and config.fold_constants),
        ("attention of few queries", attend_few_queries, True),
        ("multiply by one matrix", multiply_by_one_matrix, True),
        ("split bias off matrix products", split_bias, True),
        ("sum products of few rows", sum_row_products, True),
        ("add embedding rows in place", add_embedding_rows, True),
        ("weight gradients as products", multiply_weight_gradients, config.layout_opt),
        ("channels-last layout", assign_layouts, config.layout_opt),
        (
            "prepack convolutions",
            prepack_convolutions,
            inference and config.layout_opt and config.fold_constants,
        ),
        ("fuse convolutions", fuse_convolutions, inference and config.layout_opt and config.fold_constants),
    ]
    return [(name, function) for name, function, on in passes if on] + added


def optimise(gm: fx.GraphModule, info: GraphInfo, on_gpu: bool = False) -> Optimised:
    """Run the pipeline on an aten graph, in place, and split off what depends on static inputs only.

    Nothing is split off on a GPU: to see whether parameters have changed, the host would have to wait for it.
    """
    bound = [(name, partial(_apply, function, info)) for name, function in pipeline(info, on_gpu)]
    run_passes(gm, bound, stage="native", verify=verify_aten_graph)
    fold = None
    if info.kind == "inference" and config.fold_constants and not on_gpu:
        fold, info = split_constants(gm, info)
    return Optimised(gm, info, fold)


def _apply(function: Pass, info: GraphInfo, gm: fx.GraphModule) -> Any:
    return function(gm, info)
