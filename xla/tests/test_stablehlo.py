"""Models exported as StableHLO give the model's results, from a folder and without its code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla.core.xla_model as xm  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.stablehlo import (  # noqa: E402
    StableHLOExportOptions,
    StableHLOGraphModule,
    exported_program_to_stablehlo,
    save_torch_model_as_stablehlo,
)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.norm.running_mean += 0.5
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x, scale):
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3)) + torch.arange(4.0)
        return {"logits": self.out(y * 1.7), "scaled": (y * scale, x.shape[0] * scale)}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def inputs():
    return torch.randn(2, 3, 8, 8), torch.randn(4)


def same(a, b):
    torch.testing.assert_close(a["logits"], b["logits"])
    torch.testing.assert_close(a["scaled"], b["scaled"])


def test_checks_of_dtypes_in_an_exported_program_are_left_out():
    class Casts(torch.nn.Module):
        def forward(self, x):
            return x.double() * 2

    exported = torch.export.export(Casts(), (torch.ones(3),))
    assert any("_assert_tensor_metadata" in str(node.target) for node in exported.graph.nodes)
    program = exported_program_to_stablehlo(exported)
    assert torch.equal(program(torch.ones(3)), torch.full((3,), 2.0, dtype=torch.float64))
    with pytest.raises(DynamotorError, match="DM672"):
        program(torch.ones(3, dtype=torch.int32))


def test_an_exported_program_computes_what_the_model_computes(net):
    program = exported_program_to_stablehlo(torch.export.export(net, inputs()))
    x = inputs()
    same(program(*x), net(*x))
    assert (
        "stablehlo.convolution" in program.get_stablehlo_text()
        and program.get_stablehlo_bytecode()[:4] == b"ML\xefR"
    )
    with pytest.raises(DynamotorError, match="DM672"):
        program(torch.randn(5, 3, 8, 8), x[1])
    with pytest.raises(DynamotorError, match="DM672"):
        program(x[0])
    with pytest.raises(DynamotorError, match="DM672"):
        program.get_stablehlo_text("backward")


def test_a_folder_is_enough(net, tmp_path):
    pytest.importorskip("flatbuffers")
    save_torch_model_as_stablehlo(net, inputs(), str(tmp_path / "m"))
    x = inputs()
    same(StableHLOGraphModule.load(str(tmp_path / "m"))(*x), net(*x))
    (tmp_path / "m/functions/forward.meta").write_text("{")
    with pytest.raises(DynamotorError, match="DM654"):
        StableHLOGraphModule.load(str(tmp_path / "m"))


def test_options(net, tmp_path):
    pytest.importorskip("flatbuffers")
    options = StableHLOExportOptions(include_human_readable_text=False, save_weights=False)
    exported_program_to_stablehlo(torch.export.export(net, inputs()), options).save(str(tmp_path), options)
    assert not (tmp_path / "functions/forward.mlir").exists() and not (tmp_path / "data/weights.pt").exists()


def test_a_model_that_changes_its_buffers_keeps_them():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.tensor(2.0))

        def forward(self, x):
            self.n.add_(1)
            return x * self.n

    program = exported_program_to_stablehlo(torch.export.export(Counting(), (torch.ones(3),)))
    assert program(torch.ones(3)).tolist() == program(torch.ones(3)).tolist() == [3.0] * 3


def test_the_pending_program():
    xm.mark_step()
    x = torch.rand(3, 4).to("xla")
    y, z = torch.tanh(x @ x.T) * 1.3, torch.rand(2, device="xla")
    text = xm.get_stablehlo([y])
    assert "stablehlo.tanh" in text and "stablehlo.dot_general" in text and "tensor<3x3xf32>" in text
    assert xm.get_stablehlo_bytecode()[:4] == b"ML\xefR"
    xm.mark_step()
    assert y.shape == (3, 3) and z.shape == (2,)
    assert "tanh" not in xm.get_stablehlo([y])  # computed: the program returns its input
    with pytest.raises(DynamotorError, match="DM672"):
        xm.get_stablehlo()


def test_random_models_are_refused():
    model = torch.nn.Dropout(0.5).train()
    with pytest.raises(DynamotorError, match="DM672"):
        exported_program_to_stablehlo(torch.export.export(model, (torch.randn(4),)))


def test_sizes_that_torch_export_marks_as_dynamic_may_change():
    model = torch.nn.Linear(2, 2)
    batch = torch.export.Dim("b", min=2, max=8)
    program = torch.export.export(model, (torch.ones(3, 2),), dynamic_shapes=({0: batch},))
    exported = exported_program_to_stablehlo(program)
    for rows in (3, 5, 8, 5):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(exported(x), model(x).detach())
    for shape in ((9, 2), (3, 4), (3,)):
        with pytest.raises(DynamotorError, match="DM672"):
            exported(torch.ones(shape))
