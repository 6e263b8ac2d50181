"""Operations that have no lowering of their own, since PyTorch's tables decompose them: values and gradients are the CPU's."""

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla import metrics  # noqa: E402

F = torch.nn.functional
CASES = {
    "col2im": lambda x: F.fold(x.view(1,12,4)[:, :8],(3,3),2),
    "im2col": lambda x: F.unfold(x.view(1, 3, 4, 4), (2, 1), dilation=(2, 1), padding=(1, 2), stride=(1, 3)),
    "chunk_cat": lambda x: torch._chunk_cat([x,x],0,2),
    "block_diag": lambda x: torch.block_diag(x[:2],x[:1]),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.view(1,3,4,4),2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(1,4,3,4),2),
    "roll": lambda x: x.roll((1,2),(0,1)),
    "roll of the flat tensor": lambda x: x.roll(3),
    "rot90": lambda x: x.rot90(),
    "channel_shuffle": lambda x: F.channel_shuffle(x.view(1,4,3,4),2),
    "nan_to_num": lambda x: (x/0).nan_to_num(1.,2.,3.)+x.nan_to_num(),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs()+2,2),
    "rsub": lambda x: torch.rsub(x,2),
    "rsub of a number": lambda x: 3-x,
    "heaviside": lambda x: torch.heaviside(x,x*0+.5),
    "diag_embed": lambda x: torch.diag_embed(x,1),
    "trace": lambda x: x.trace(),
    "take_along_dim": lambda x: torch.take_along_dim(x,torch.zeros(6,1,dtype=torch.long,device=x.device),1),
    "bicubic": lambda x: F.interpolate(x.view(1,3,4,4),scale_factor=2,mode="bicubic"),
    "index_fill": lambda x: x.index_fill(0,torch.tensor([1,3],device=x.device),2.),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "logit clamped": lambda x: torch.logit(x.sigmoid(),0.3),
    "mish": lambda x: F.mish(x),
    "hardswish": lambda x: F.hardswish(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "hardtanh": lambda x: F.hardtanh(x),
    "celu": lambda x: F.celu(x,0.7),
    "cross": lambda x: torch.linalg.cross(x[:,:3],x[:,3:6]),
    "renorm": lambda x: x.renorm(2,0,1.),
    "nansum": lambda x: x.nansum(0),
    "count_nonzero": lambda x: torch.count_nonzero(x>0,0).float()+x.sum(),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(x,torch.tensor([[0,2,-1,0,0,0,0,0]]*6,device=x.device)),
    "multi_margin": lambda x: F.multi_margin_loss(x,torch.tensor([0,1,2,3,4,5],device=x.device)),
    "multi_margin squared": lambda x: F.multi_margin_loss(x,torch.tensor([0,1,2,3,4,5],device=x.device),p=2),
    "addr": lambda x: torch.addr(x,x[:,0],x[0],beta=.5,alpha=2.),
    "isin": lambda x: torch.isin((x*2).long(),torch.tensor([1,0],device=x.device)).float()+x,
    "weight_norm": lambda x: torch._weight_norm(x,x[:,:1]*0+2,0),
    "logspace": lambda x: torch.logspace(0,2,5,device=x.device)+x.sum(),
    "logspace of integers": lambda x: torch.logspace(0,2,5,dtype=torch.int32,device=x.device)+x.sum(),
    "new_full": lambda x: x.new_full((2,),3.)+x.sum(),
    "nan_to_num of half": lambda x: (x.half()/0).nan_to_num()+x,
}
WITHOUT_GRADIENT = ("chunk_cat", "heaviside")


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_cpus(name):
    found = {}
    metrics.clear()
    for device in ("cpu", "xla"):
        torch.manual_seed(1)
        x = torch.randn(6, 8).to(device).requires_grad_(name not in WITHOUT_GRADIENT)
        y = CASES[name](x)
        if y.requires_grad:
            y.float().nansum().backward()
        found[device] = (y.detach().cpu(), None if x.grad is None else x.grad.cpu())
    torch.testing.assert_close(found["xla"], found["cpu"], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not [name for name in metrics.all_counters() if name.startswith("aten::")], "it ran on the CPU"
