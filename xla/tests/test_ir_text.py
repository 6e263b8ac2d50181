"""Recorded graphs as text, and their programs with their parameters."""

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

from dynamotor.xla import _XLAC, sync  # noqa: E402


def test_recorded_operations_are_lines_of_text():
    sync()
    x = torch.tensor([1.0, 2.0]).to("xla")
    unrelated = torch.ones(3, device="xla") * 2
    largest, where = torch.max((x * 3).reshape(1, 2), dim=1)
    lines = _XLAC._get_xla_tensors_text([where, largest]).splitlines()
    assert lines[0] == "IR {" and lines[1] == "  %0 = f32[2]{0} xla::device_data(), device=xla:0"
    assert "f32[2]{0} aten::mul(%0, " in lines[2] and lines[-1] == "}"
    assert "(f32[1]{0}, s64[1]{0}) aten::max(" in lines[-2] and lines[-2].endswith(", ROOT=0, ROOT=1")
    sync()
    assert "aten::" not in _XLAC._get_xla_tensors_text([largest]) and unrelated.shape == (3,)


def test_equal_computations_have_one_graph_hash():
    x = torch.ones(3).to("xla")
    first = _XLAC._get_graph_hash([x * 2.5 + 1])
    assert first == _XLAC._get_graph_hash([x * 3.5 + 1]) != _XLAC._get_graph_hash([x * 2.5 - x])


def test_a_tensor_tells_its_shape_and_its_operation():
    assert _XLAC._get_xla_tensor_debug_info(torch.ones(1)) == "Not a XLATensor\n"
    x = torch.view_as_real(torch.zeros(4, dtype=torch.complex128, device="xla") + 1)
    before = _XLAC._get_xla_tensor_debug_info(x)
    assert "XLA Shape: f64[4,2]{1,0}" in before and "aten::view_as_real" in before
    assert "XLAData: None" in before
    sync()
    after = _XLAC._get_xla_tensor_debug_info(torch.ones(2).to("xla"))
    assert "IR: None" in after and "Data Shape: f32[2]{0}" in after
    kinds = [torch.half, torch.bfloat16, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
    names = [_XLAC._get_xla_tensor_shape_type(torch.zeros(1, dtype=kind, device="xla")) for kind in kinds]
    assert names == ["f16", "bf16", "pred", "u8", "c64", "f8e4m3fn"]


def test_a_program_has_its_parameters_by_number():
    a, b = torch.tensor([1.0, 2.0]).to("xla"), torch.tensor([4.0, 5.0]).to("xla")
    unrelated = torch.rand(3).to("xla") * 2
    context = _XLAC.lowering.LoweringContext("Named")
    context.build([(a + b) * 1.7])
    text = context.hlo_text()
    assert "HloModule jit_Named" in text and " multiply(" in text and b"Named" in context.hlo()
    found = context.parameter_id_tensor_mapping()
    assert [found[index].tolist() for index in range(3)] == [[1.0, 2.0], [4.0, 5.0], [1.7]]
    assert context.device_parameter_id_tensor_mapping()[1].device == a.device
    assert [context.tensor_parameter_id(t) for t in (a, b, unrelated)] == [0, 1, -1]


def test_programs_are_shown_as_xla_text():
    x = torch.ones(2, 3).to("xla")
    assert " dot(" in _XLAC._get_xla_tensors_hlo([x @ x.t()])
    assert _XLAC._unsafe_buffer_pointer(x * 2) > 0
