"""Views, joins, pads and factories against aten's CPU kernels, forward and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("jax", reason="the XLA rules need jax")

from lowering_harness import FEW_OR_MORE, check, check_opinfo, company  # noqa: E402

from dynamotor.xla import (  # noqa: E402, F401
    ops_create,
    ops_index,
    ops_view,
    start as _start,  # noqa: E402, F401
)

aten = torch.ops.aten
VIEWS = [
    "as_strided_scatter",
    "diagonal",
    "diagonal_copy",
    "diagonal_scatter",
    "expand",
    "permute",
    "select",
    "select_scatter",
    "slice",
    "slice_scatter",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "movedim",
    "tensor_split",
]
SHAPES = [
    "cat",
    "stack",
    "block_diag",
    "repeat",
    "roll",
    "rot90",
    "flip",
    "tril",
    "triu",
    "diag_embed",
    "trace",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "nn.functional.channel_shuffle",
    "nn.functional.unfold",
    "nn.functional.pad",
    "kron",
    "meshgrid",
]
FACTORIES = [
    "arange",
    "linspace",
    "logspace",
    "eye",
    "full",
    "full_like",
    "new_ones",
    "new_zeros",
    "ones",
    "zeros",
    "scalar_tensor",
    "fill",
    "complex",
    "polar",
    "float",
    "half",
    "int",
    "bool",
    "byte",
]


@pytest.mark.parametrize("samples", FEW_OR_MORE)
@pytest.mark.parametrize("name", VIEWS + SHAPES + FACTORIES)
def test_float_ops_and_their_gradients_equal_aten(request, name: str, samples: int) -> None:
    mode = company(request, lambda name, samples: check_opinfo(name, torch.float32, samples))
    assert not mode.refused
    assert mode.right


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "cat",
        "slice_scatter",
        "diagonal_scatter",
        "linspace",
        "arange",
        "full",
        "triu",
        "constant_pad_nd",
        "roll",
    ],
)
def test_other_dtypes_equal_aten(request, name: str, dtype: torch.dtype) -> None:
    mode = company(request, lambda name, dtype: check_opinfo(name, dtype, samples=4, gradient=False))
    assert not mode.refused


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["tril_indices", "triu_indices"])
def test_indices_of_triangles(name: str, dtype: torch.dtype) -> None:
    assert check_opinfo(name, dtype).right


def test_complex_numbers_as_pairs() -> None:
    x = torch.randn(3, 2, dtype=torch.complex128, requires_grad=True)
    assert {"aten.view_as_real.default", "aten.view_as_complex.default"} <= check(
        lambda: torch.view_as_complex(torch.view_as_real(x))
    ).right


STRIDED = [
    ((3, 4), (4, 1), 0), ((4, 3), (1, 4), 0), ((2, 2), (5, 2), 1), ((3, 1, 2), (4, 9, 1), 2), ((3, 3), (0, 1), 2), ((), (), 5),
    ((2, 3), (1, 1), 0), ((3,), (5,), 1), ((2, 2, 2), (6, 3, 1), 0), ((0, 3), (1, 1), 0), ((12,), (1,), 0),
]  # fmt: skip


@pytest.mark.parametrize(("size", "stride", "offset"), STRIDED)
def test_as_strided_reads_the_flat_value(size, stride, offset) -> None:
    mode = check(lambda x: aten.as_strided(x, size, stride, offset), torch.randn(3, 4))
    assert mode.right and not mode.refused


@pytest.mark.parametrize(
    ("size", "stride", "offset"), [s for s in STRIDED if 0 not in s[1] and s[1] != (1, 1)]
)
def test_as_strided_scatter_writes_the_flat_value(size, stride, offset) -> None:
    mode = check(
        lambda x: aten.as_strided_scatter(x, torch.randn(size), size, stride, offset), torch.randn(3, 4)
    )
    assert "aten.as_strided_scatter.default" in mode.right


@pytest.mark.parametrize(
    "to", [torch.int32, torch.uint8, torch.float64, torch.complex64, torch.bfloat16, torch.int64], ids=str
)
@pytest.mark.parametrize("source", [torch.float32, torch.int16, torch.complex64, torch.uint8], ids=str)
def test_view_as_another_dtype_keeps_the_bytes(source: torch.dtype, to: torch.dtype) -> None:
    x = torch.randint(-99, 99, (3, 8)).to(source)
    mode = check(lambda x: torch.view_copy(x, dtype=to), x)
    assert "aten.view_copy.dtype" in mode.right


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("step", [1, 2, 50])
def test_windows_and_their_gradient(size: int, step: int) -> None:
    x = torch.randn(2, 100, dtype=torch.float64, requires_grad=True)
    mode = check(lambda: x.unfold(1, size, step).square().sum().backward())
    assert {"aten.unfold.default", "aten.unfold_backward.default"} <= mode.right


@pytest.mark.parametrize("mode_name", ["reflect", "replicate"])
@pytest.mark.parametrize("pad", [(1, 2), (1, 0, 2, 1), (1, 1, 0, 2, 2, 1), (-1, 2), (2, -1, -1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_pads_and_their_gradients(mode_name: str, pad: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn((2, 3) + (4,) * (len(pad) // 2), dtype=dtype, requires_grad=True)
    mode = check(lambda: torch.nn.functional.pad(x, pad, mode=mode_name).sum().backward())
    kind = {"reflect": "reflection", "replicate": "replication"}[mode_name] + f"_pad{len(pad) // 2}d"
    assert {f"aten.{kind}.default", f"aten.{kind}_backward.default"} <= mode.right


def test_conversions_wrap_as_aten_does() -> None:
    x = torch.tensor([-1.5, 300.7, 0.3, -129.0, 40000.0])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.bool, torch.int64):
        assert check(lambda dtype=dtype: aten._to_copy(x, dtype=dtype)).right
    assert check(lambda: aten._to_copy(torch.tensor([1j, 0, 2]), dtype=torch.bool)).right


@pytest.mark.parametrize("arguments", [(5,), (1, 7, 2), (0.5, 5.5, 0.7), (5, 0, -1), (0, 1, 0.1), (-3, 3)])
@pytest.mark.parametrize("dtype", [None, torch.int32, torch.float16, torch.float64], ids=str)
def test_arange(arguments, dtype) -> None:
    if dtype is torch.int32 and any(0 < abs(a) < 1 for a in arguments[2:]):
        pytest.skip("aten refuses a step that truncates to zero")
    mode = check(lambda: torch.arange(*arguments, dtype=dtype))
    assert mode.right


def test_empty_pieces_join_with_anything() -> None:
    assert check(
        lambda: torch.cat([torch.zeros(0), torch.ones(2, 3), torch.ones(2, 1, dtype=torch.int64)], 1)
    ).right
    assert check(lambda: torch.cat([torch.zeros(0), torch.zeros(0)])).right


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.split(-1),
        lambda x: x.split(0),
        lambda x: x.split(3, 5),
        lambda x: x.split([7, -1]),
        lambda x: x.split([2, 3]),
        lambda x: x.unbind(4),
    ],
)
def test_views_that_come_at_once_are_refused_as_the_cpu_refuses_them(call: Callable) -> None:
    with pytest.raises((RuntimeError, IndexError)) as wanted:
        call(torch.ones(6, 8))
    with pytest.raises(wanted.type) as found:
        call(torch.ones(6, 8, device="xla"))
    assert str(found.value) == str(wanted.value)
