"""Compiles common ops, each with its backward, in one process on a CPU, and prints the first that imports a
heavy module: `python imports_of_ops.py`.
"""

import sys

import torch
import torch.nn.functional as F  # noqa: F401

import dynamotor

HEAVY = ("sympy", "triton", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
ZEROS = torch.zeros(8, 8, dtype=torch.int64)
OF_DATA = "x[x>0]", "nonzero", "unique", "bincount", "one_hot", "repeat_interleave"  # sizes that data decides
OPS = """
x.std() x.std(0) torch.std_mean(x)[0] x.var(1) torch.var_mean(x,0)[1] x.sum() x.mean(0) x.prod() x.amax(1) x.max(1)[0] x.argmax(1)
x.detach().aminmax()[0] x.norm() torch.linalg.vector_norm(x,dim=1) x.logsumexp(1) x.count_nonzero() (x>0).all() (x>0).any(1) x.median()
x.softmax(-1) x.log_softmax(1) x.cumsum(0) x.cumprod(0) x.logcumsumexp(0) x.cummax(0)[0] x.diff() x.sort(0)[0] x.argsort() x.topk(3)[0] x.detach().unique()
x@x.T torch.bmm(x[None],x[None]) torch.addmm(x[0],x,x) torch.baddbmm(x[None],x[None],x[None]) torch.einsum("ij,jk->ik",x,x) torch.cdist(x,x)
torch.linalg.inv(x+torch.eye(8)) torch.linalg.svdvals(x) torch.fft.fft(x).abs()
F.gelu(x) F.silu(x) F.mish(x) F.hardswish(x) F.glu(x) F.prelu(x,torch.ones(1)) x.sigmoid() x.tanh() x.erf() x**2.5 x.clamp(0,1)
x.lerp(x+1,0.3) x.addcmul(x,x) torch.where(x>0,x,0) x.isnan() x.double() torch.complex(x,x).abs()
torch.cat([x,x]) torch.stack([x,x]) x.chunk(2)[0] x.roll(1) x.flip(0) x.tril() F.pad(x,(1,1)) x.unfold(0,2,1) x.repeat_interleave(2,0)
x.gather(0,ZEROS) x.scatter_add(0,ZEROS,x) x[torch.tensor([1,2])] x[x>0] x.nonzero() torch.searchsorted(torch.tensor([0.,1.]),x)
torch.bucketize(x,torch.tensor([0.,1.])) torch.bincount(ZEROS[0]) F.one_hot(ZEROS[0]) torch.arange(8)+x torch.rand(8)+x torch.randn_like(x)
F.dropout(x) F.embedding(ZEROS,x) F.linear(x,x) F.layer_norm(x,(8,)) F.rms_norm(x,(8,)) F.batch_norm(x,None,None,training=True)
F.group_norm(x[None],4) F.normalize(x) F.cosine_similarity(x,x+1) F.scaled_dot_product_attention(x[None],x[None],x[None])
F.cross_entropy(x,ZEROS[0]) F.nll_loss(x,ZEROS[0]) F.mse_loss(x,x+1) F.l1_loss(x,x) F.smooth_l1_loss(x,x) F.kl_div(x,x.softmax(1))
F.binary_cross_entropy_with_logits(x,x.detach())
F.conv1d(x[None],torch.ones(4,8,3)) F.conv2d(x[None,None],torch.ones(1,1,3,3)) F.conv_transpose2d(x[None,None],torch.ones(1,1,3,3))
F.max_pool2d(x[None,None],2) F.avg_pool2d(x[None,None],2) F.adaptive_avg_pool2d(x[None,None],2)
F.interpolate(x[None,None],scale_factor=2,mode="bilinear") F.pixel_shuffle(x.view(1,4,4,4),2) F.grid_sample(x[None,None],torch.zeros(1,2,2,2))
"""


def compiled(text: str) -> None:
    """Compile and run `text`, a function of x, and its backward."""
    print(text, file=sys.stderr)
    x = torch.rand(8, 8, requires_grad=True)
    whole = not any(part in text for part in OF_DATA)
    result = dynamotor.compile(eval(f"lambda x: {text}"), backend="aot_eager", fullgraph=whole)(x)
    if result.requires_grad:
        result.sum().backward()


for text in OPS.split():
    loaded = set(sys.modules)
    compiled(text)
    if found := [name for name in HEAVY if name in sys.modules and name not in loaded]:
        print(text, found)
