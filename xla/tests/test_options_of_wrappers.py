"""Options and names that programs for torch_xla use: they take effect, or are refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla as torch_xla  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.core import functions as xf, xla_model as xm  # noqa: E402
from dynamotor.xla.debug import metrics  # noqa: E402
from dynamotor.xla.distributed.fsdp import XlaFullyShardedDataParallel  # noqa: E402
from dynamotor.xla.distributed.spmd.debugging import construct_v1_sharding_str  # noqa: E402
from dynamotor.xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer  # noqa: E402
from dynamotor.xla.experimental import custom_kernel  # noqa: E402


def test_zero_redundancy_options_take_effect() -> None:
    model = torch.nn.Linear(4, 4).to("xla").bfloat16()
    options = {
        "optimizer_dtype": torch.float32,
        "save_master_weights": True,
        "sharding_groups": [[0]],
        "max_norm": 0.5,
    }
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)
    assert optimizer.grad_norm is None
    model(torch.ones(2, 4, device="xla", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm.item() > 0.5
    state = optimizer.state_dict()
    assert "base_state" in state and state["sharded_master_weights"][0].dtype is torch.float32
    assert state["shape_info"] == {0: (4, 4), 1: (4,)} and state["base_state"] == {}
    expected = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        model.weight.zero_()
    optimizer.load_state_dict(state)  # the parameters follow the saved parts
    torch.testing.assert_close(list(model.parameters()), expected)
    with pytest.raises(DynamotorError, match="DM681"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, sharding_groups=[[0], [1]])


def test_zero_redundancy_steps_from_the_parameters_that_were_loaded() -> None:
    model = torch.nn.Linear(2, 2).to("xla")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0, grad_clipping=False)
    with torch.no_grad():
        model.weight.fill_(3)
    optimizer.load_state_dict(optimizer.state_dict())
    model(torch.ones(1, 2, device="xla")).sum().backward()
    optimizer.step()
    assert (model.weight == 3).all()


def test_zero_redundancy_adds_gradients_up_in_its_own_dtype() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, device="xla", dtype=torch.bfloat16))
    options = {"use_grad_acc_hook": True, "higher_cc_precision": True, "lazy_init": True, "lr": 1.0}
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, grad_clipping=False, **options)
    optimizer.init_zero()
    for scale in (256.0, 1.0):  # 257 is no bfloat16
        (weight * scale).sum().backward()
    assert weight.grad is None and weight.main_grad.tolist() == [257.0] * 3
    optimizer.step()
    assert optimizer.base_optimizer.param_groups[0]["params"][0].tolist() == [-257.0] * 3
    optimizer.zero_grad()
    assert not hasattr(weight, "main_grad")


def test_fsdp_wrappers_have_torch_xlas_methods() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.config = torch.nn.Linear(4, 4), 5
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * self.scale

    model = XlaFullyShardedDataParallel(Model(), True, buffer_dtype=torch.bfloat16)
    assert model.config == 5 and model.scale.dtype is torch.bfloat16
    x = torch.ones(2, 4, device="xla")
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    assert len(model.params_with_grad()) == 2
    assert model.clip_grad_norm_(1.0, groups=[[0]]).item() > 1
    parts = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"), torch.nn.LayerNorm(4, device="meta"))
    norm = XlaFullyShardedDataParallel(parts)[1]
    assert parts[0].weight.device.type == "xla" and norm.weight.tolist() == [1.0] * 4
    with pytest.raises(TypeError, match="no_such_option"):
        XlaFullyShardedDataParallel(Model(), no_such_option=1)


@pytest.mark.parametrize("values", [[2.0, 3.0], [2.0, 0.0], [0.0, 0.0]])
def test_the_gradient_of_a_product_over_one_replica_is_one(values: list[float]) -> None:
    x = torch.tensor(values, device="xla", requires_grad=True)
    xf.all_reduce(xm.REDUCE_MUL, x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_errors_of_asynchronous_step_closures_are_raised_at_the_next_barrier() -> None:
    def closure() -> None:
        raise KeyError("from the closure")

    xm.add_step_closure(closure, run_async=True)
    with pytest.raises(KeyError, match="from the closure"):  # it may have ended by the first barrier
        torch_xla.sync()
        xm.wait_device_ops()
    torch_xla.sync(wait=True)


@pytest.mark.parametrize("offs", [[3, 8], [0, 8], [8, 8]])
def test_grouped_products_run_on_the_device(offs: list[int]) -> None:
    a, b = torch.randn(8, 16), torch.randn(2, 16, 16)
    ends = torch.tensor(offs, dtype=torch.int32)
    metrics.clear_all()
    got = torch._grouped_mm(a.to("xla"), b.to("xla"), offs=ends.to("xla")).cpu()
    starts = [0, *offs[:-1]]
    want = torch.cat([a[i:j] @ w for i, j, w in zip(starts, offs, b)])
    assert torch.allclose(got, want, atol=1e-4) and not metrics.executed_fallback_ops()


def test_grouped_products_of_many_weights_and_their_gradients_are_the_cpu_s() -> None:
    """Of more elements than the CPU's kernel is asked with whole; transposed, as mixtures of experts call it."""

    def products(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, weight = (torch.randn(shape).to(device).requires_grad_() for shape in ((8, 48), (2, 96, 48)))
        ends = torch.tensor([3, 8], dtype=torch.int32).to(device)
        out = torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return [t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), (x, weight)))]

    torch.testing.assert_close(products("xla"), products("cpu"), rtol=1e-5, atol=1e-3)


def test_histograms_of_integers_have_their_type_as_on_gpus() -> None:
    x = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device="xla")
    counts = torch.histc(x, bins=3, min=0, max=2)
    assert counts.tolist() == [1, 0, 2] and counts.dtype is torch.int32


def test_changing_exponents_and_learning_rates_compile_once() -> None:
    x = torch.rand(3, device="xla")
    w = torch.ones(3, device="xla")
    for rate in (0.7, 0.8, 0.9):
        (x ** (rate + 0.3)).cpu()
        w = w.add(x, alpha=-rate)
        w.cpu()
    before = metrics.metric_data("CompileTime")[0]
    for k in range(4):
        assert torch.allclose((x ** (1.1 + k / 10)).cpu(), x.cpu() ** (1.1 + k / 10))
    for rate in (0.0, 0.5, 1.0, 2.0, 0.3):
        w = w.add(x, alpha=-rate)
        w.cpu()
    assert metrics.metric_data("CompileTime")[0] == before


def test_exponents_with_kernels_of_their_own_stay_exact() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    for exponent in (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5):
        torch.testing.assert_close((x.to("xla") ** exponent).cpu(), x**exponent, equal_nan=True)


def test_names_that_libraries_call() -> None:
    xm.set_replication("xla:0", ["xla:0"])
    with pytest.raises(DynamotorError, match="DM641"):
        xm.set_replication("xla:0", ["xla:1"])
    model = torch.nn.Linear(2, 2).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2, device="xla")).sum().backward()
    assert len(xm._fetch_gradients(optimizer)) == 2
    assert xm._maybe_convert_to_cpu(model.state_dict())["weight"].device.type == "cpu"
    assert xm._maybe_convert_to_cpu({"a": model.weight}, convert=False)["a"] is model.weight
    assert construct_v1_sharding_str("{devices=[2,2]<=[4]}") == "{devices=[2,2]0,1,2,3}"
    assert construct_v1_sharding_str("{devices=[2,2]<=[2,2]T(1,0)}") == "{devices=[2,2]0,2,1,3}"
    rows = custom_kernel.repeat_with_fixed_output_size(
        torch.tensor([1, 2], device="xla"), torch.tensor([1, 2], device="xla"), 3
    )
    assert rows.tolist() == [1, 2, 2]
