"""Names of torch_xla's SPMD module: meshes of hosts, gradients that are laid out, tensors in words;
SyncBatchNorm; metrics.
"""

import copy

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402
from replicas import run_replicas  # noqa: E402

from dynamotor.xla import _XLAC  # noqa: E402
from dynamotor.xla.distributed import spmd as xs  # noqa: E402
from dynamotor.xla.distributed.fsdp import checkpoint_module  # noqa: E402


def test_a_checkpointed_module_runs_to_its_end_again():
    class Counted(torch.nn.Linear):
        ends = 0

        def forward(self, x):
            y = super().forward(x).relu()
            self.ends += 1
            return y

    module = checkpoint_module(Counted(3, 2).to("xla"))
    module(torch.ones(2, 3, device="xla")).sum().backward()
    assert module.ends == 2 and module.weight.grad.shape == (2, 3)


def test_helpers_on_four_devices():
    done = run_forked(
        """
    import torch
    import dynamotor.xla
    import dynamotor.xla.distributed.spmd as xs
    from dynamotor.xla import _XLAC
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), axis_names=("data", "model"))
    assert mesh.size() == 4 and dict(mesh.shape()) == {"data": 2, "model": 2}
    x = torch.arange(16.0).view(4, 4)
    w = x.to("xla").requires_grad_()
    y = xs.mark_sharding_with_gradients(w, mesh, ("data", "model"))
    (y * y).sum().backward()
    torch.testing.assert_close(w.grad.cpu(), 2 * x)
    assert xs.XLAShardedTensor(w.grad).sharding_type == xs.ShardingType.TILED == "TILED"
    t = xs.wrap_as_sharded_tensor(x.to("xla"), mesh, ("data", None))
    assert t.sharding_type is xs.ShardingType.PARTIAL and xs.unwrap_sharded_tensor(t) is t.global_tensor
    assert [s.data.shape for s in t.local_shards] == [(2, 4)] * 4
    torch.testing.assert_close(t.global_tensor.cpu(), x)
    spec = _XLAC._get_xla_sharding_spec(t.global_tensor)
    assert spec.startswith("{devices=[2,1,2]") and "replicate" in spec, spec
    assert xs.clear_sharding(t.global_tensor).sharding_type == "REPLICATED" and t.sharding_spec == ""
    xs.visualize_tensor_sharding(xs.mark_sharding(t.global_tensor, mesh, ("model", None)))
    for words in ("{devices=[2,2]<=[4]}", "{devices=[4,1]0,2,1,3}", "{replicated}", t.sharding_spec):
        xs.visualize_sharding(words)
    print("done")
    """,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert "done" in done.stdout and "CPU" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_patched_linear_layers_multiply_without_reshapes(dtype):
    layer = torch.nn.Linear(3, 6, dtype=dtype)
    ours = xs.apply_xla_patch_to_nn_linear(copy.deepcopy(layer)).to("xla")
    for shape in ((3,), (4, 3), (2, 5, 4, 3)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        moved = x.detach().to("xla").requires_grad_()
        found, want = ours(moved), layer(x)
        grads = [torch.autograd.grad(y.abs().sum(), (given, *made.parameters()))
                 for y, given, made in ((found, moved, ours), (want, x, layer))]  # fmt: skip
        torch.testing.assert_close([t.cpu() for t in (found, *grads[0])], [want, *grads[1]])
    product = xs.XLAPatchedLinear.apply(moved, ours.weight)
    assert "reshape" not in _XLAC._get_xla_tensors_hlo([product])


def test_patched_linear_layers_follow_autocast_and_are_captured():
    layer, x = torch.nn.Linear(3, 2).to("xla"), torch.rand(4, 5, 3).to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert xs.xla_patched_nn_linear_forward(layer, x).dtype is torch.bfloat16
    captured = torch.compile(xs.xla_patched_nn_linear_forward, backend="xla")
    captured(layer, x).sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), x.sum((0, 1)).cpu().expand(2, 3))


@pytest.mark.slow
def test_sync_batch_norm_is_batch_norm_of_the_whole_batch():
    outputs = run_replicas("""
    import copy, torch
    import dynamotor.xla
    from dynamotor.xla.core import functions as xf, xla_model as xm
    torch.manual_seed(0)
    for shape, options in (((6, 3), {}), ((4, 3, 2, 2), {"momentum": None}), ((4, 3, 5), {"affine": False})):
        norm, expected = xf.SyncBatchNorm(3, **options).double(), torch.nn.SyncBatchNorm(3, **options).double()
        for net in (norm, expected):
            if net.affine:
                torch.nn.init.constant_(net.weight, 1.5), torch.nn.init.constant_(net.bias, 0.2)
        expected = torch.nn.modules.batchnorm._BatchNorm.forward.__get__(reference := copy.deepcopy(expected))
        reference._check_input_dim = lambda x: None
        norm = norm.to("xla")
        for _ in range(3):
            x = torch.randn(shape, dtype=torch.float64) * 3 + 5
            half = shape[0] // 2
            mine = x[xm.get_ordinal() * half :][:half].to("xla").requires_grad_()
            theirs = x.clone().requires_grad_()
            y, z = norm(mine), expected(theirs)
            weight = torch.randn(shape, dtype=torch.float64)
            (y * weight[xm.get_ordinal() * half :][:half].to("xla")).sum().backward()
            (z * weight).sum().backward()
            at = slice(xm.get_ordinal() * half, (xm.get_ordinal() + 1) * half)
            torch.testing.assert_close(y.detach().cpu(), z.detach()[at])
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad[at])
        torch.testing.assert_close({k: v.cpu() for k, v in norm.state_dict().items()}, dict(reference.state_dict()))
        norm.eval(), reference.eval()
        torch.testing.assert_close(norm(x.to("xla")).detach().cpu(), expected(x).detach())
    print("done")
    """)
    assert all("done" in text for text in outputs), outputs
