"""Images at other sizes: upsampling, grid sampling, and channels as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layouts import (
    as_argument,
    dense,
    row_major,
    with_stride,
)
from ..op_definition import (
    PASS,
    Shape,
    contiguous,
    define,
    layout,
    require,
    require_equal,
    requires,
    shape,
    shape_of_argument,
    shapes_of,
)
from ..result_strides import (
    suggested_stride,
)
from ..shapes import (
    infer_by_meta_kernel,
)
from ..sizes import equal
from ..spec import TensorSpec, aten
from .pool import is_plain_image

define(
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default,
    shape=lambda x, size, *args: (*x.shape[:2], *size),
)


@layout(aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default)
def _upsample_layout(x: TensorSpec, size: Sequence[int], *more: Any) -> Any:
    plain = is_plain_image(x) and len(size) == 2 and min(size) > 0
    return dense((*x.shape[:2], *size), x) if plain else PASS


define(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    shape=lambda grad, size, input_size, *args: tuple(input_size),
)


@layout(aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default)
def _upsample_backward_layout(grad: TensorSpec, size: Sequence[int], shape: Sequence[int], *more: Any) -> Any:
    plain = is_plain_image(grad) and equal(grad.shape, (*shape[:2], *size)) and min(shape) > 0
    return dense(tuple(shape), grad) if plain else PASS


# Grids ------------------------------------------------------------------------------------------------------


@requires(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    shape=lambda x, grid, *how: (*x.shape[:2], *grid.shape[1:-1]),
)
def _grid_sampler_requires(x: TensorSpec, grid: TensorSpec, *how: Any) -> None:
    require_equal((x.shape[0], len(x.shape) - 2), (grid.shape[0], grid.shape[-1]))
    require(all(n > 0 for n in x.shape[2:]))


define(aten.grid_sampler_2d.default, contiguous=row_major)
define(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    shape=lambda grad, x, grid, *how: [x.shape, grid.shape],
)
# Channels as pixels -----------------------------------------------------------------------------------------
define(
    aten.channel_shuffle.default,
    shape=shape_of_argument(0),
    requires=lambda x, groups: require_equal((x.shape[1] % groups,), (0,)),
)
define(aten.pixel_shuffle.default, aten.channel_shuffle.default, layout=with_stride(as_argument(0)))


@contiguous(aten.pixel_shuffle.default)
def _pixel_shuffle_contiguous(x: TensorSpec, factor: int) -> Any:
    if len(x.shape) < 3 or factor < 1 or x.shape[-3] % factor**2:
        return PASS
    *batch, c, h, w = x.shape
    return dense((*batch, c // factor**2, h * factor, w * factor), x)


@shape(
    aten.pixel_unshuffle.default,
    contiguous=lambda x, n: dense(shapes_of(aten.pixel_unshuffle.default, x, n), x),
)
def _pixel_unshuffle_shape(x: TensorSpec, n: int) -> Shape:
    require(len(x.shape) > 2 and n > 0)
    require_equal((x.shape[-2] % n, x.shape[-1] % n), (0, 0))
    return (*x.shape[:-3], x.shape[-3] * n * n, x.shape[-2] // n, x.shape[-1] // n)


@layout(aten.pixel_unshuffle.default)
def _pixel_unshuffle_layout(x: TensorSpec, factor: int) -> TensorSpec:
    """A tensor without elements comes back as it is."""
    if 0 in x.shape:
        return TensorSpec.dense(x.shape, x.dtype, x.device)
    out = infer_by_meta_kernel(aten.pixel_unshuffle.default, (x, factor), {})
    return out.with_stride(suggested_stride(x, out.shape))
