"""Programs of libraries that people run over PyTorch, one decorated function each, for `python -m bench
libraries` and `make test-libraries`. Small models, random weights; imports are inside, so that one absent
library stops its own cases only.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import models
from .beside import Tensors, Way, named, state_of


@dataclass(frozen=True)
class Case:
    """A program, whether float64 can be its reference, and why it takes more graphs than with torch.compile."""

    run: Callable[[Way], Tensors]
    exact: bool = True
    reason: str = ""


CASES: dict[str, Case] = {}


def case(name: str, *, exact: bool = True, reason: str = "") -> Callable[[Any], Any]:
    """Register a program under `library: what`."""

    def register(run: Callable[[Way], Tensors]) -> Callable[[Way], Tensors]:
        CASES[name] = Case(run, exact, reason)
        return run

    return register


def bert(kind: str = "BertForMaskedLM") -> tuple[nn.Module, dict[str, Tensor]]:
    """A small transformers model without dropout, and inputs with labels."""
    found = models.load(kind, small=True, dropout=False)
    return found.model, found.make_inputs(train=True)[1]


def trainer_arguments(folder: str, way: Way, **more: Any) -> Any:
    from transformers import TrainingArguments

    compiled = {"torch_compile": True, "torch_compile_backend": way.backend} if way.backend else {}
    return TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True, logging_steps=1,
        save_strategy="no", optim="sgd", learning_rate=1e-2, disable_tqdm=True, dataloader_pin_memory=False, **compiled, **more,
    )  # fmt: skip


@case("transformers: Trainer, torch_compile=True", exact=False)
def trainer(way: Way) -> Tensors:
    from transformers import Trainer

    model, inputs = bert()
    data = [{k: v[0] for k, v in inputs.items()}] * 8
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, trainer_arguments(folder, way), train_dataset=data).train()
    return state_of(model)


@case("transformers: Trainer, accumulation and clipping", exact=False)
def trainer_accumulates(way: Way) -> Tensors:
    from transformers import Trainer

    model, inputs = bert("GPT2LMHeadModel")
    data = [{k: v[n] for k, v in inputs.items()} for n in (0, 1)] * 8
    with tempfile.TemporaryDirectory() as folder:
        more = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
        Trainer(model, trainer_arguments(folder, way, **more), train_dataset=data).train()
    return state_of(model)


@case("peft: LoRA")
def lora(way: Way) -> Tensors:
    from peft import LoraConfig, get_peft_model

    model, inputs = bert()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0))
    return way.training(Called(model, inputs))


@case("peft: LoRA merged, inference")
def merged(way: Way) -> Tensors:
    from peft import LoraConfig, get_peft_model

    model, inputs = bert()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["query"], init_lora_weights=False))
    return way.inference(Called(model.merge_and_unload(), inputs))


@case("peft: IA3")
def ia3(way: Way) -> Tensors:
    from peft import IA3Config, get_peft_model

    model, inputs = bert()
    names = {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}
    return way.training(Called(get_peft_model(model, IA3Config(**names)), inputs))


@case("peft: prompt tuning")
def prompts(way: Way) -> Tensors:
    from peft import PromptTuningConfig, get_peft_model

    model, inputs = bert("GPT2LMHeadModel")
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    return way.training(Called(model, inputs))


class Called(nn.Module):
    """A transformers model called with inputs by name."""

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self) -> Any:
        out = self.model(**self.inputs)
        return out.loss if out.loss is not None else out


@case("accelerate: prepare, backward, unwrap")
def accelerated(way: Way) -> Tensors:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = way.cast(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    inner, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled, optimizer = accelerator.prepare(way.compile(model), optimizer)
    x, losses = way.randn(6, 8), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(compiled(x).square().mean())
        accelerator.backward(losses[-1])
        accelerator.clip_grad_norm_(compiled.parameters(), 0.5)
        optimizer.step()
    plain = accelerator.unwrap_model(compiled, keep_torch_compile=False)
    assert (
        getattr(plain, "_orig_mod", plain) is inner
    )  # it knows torch.compile's class alone: ours stays wrapped
    return named(loss=losses) | state_of(inner)


@case("accelerate: regional compilation")
def regional(way: Way) -> Tensors:
    from accelerate.utils import compile_regions

    model, inputs = bert()
    model = way.cast(model)
    regions = compile_regions(model, backend=way.backend) if way.backend else model
    losses = []
    for _ in range(2):
        losses.append(regions(**inputs).loss)
        losses[-1].backward()
    return named(loss=losses, grad=[p.grad for p in model.parameters() if p.grad is not None])


def lightning_module(way: Way, inner: bool) -> Any:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(
                way.dtype
            )
            self.net = way.compile(net) if inner else net

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Lit()


def fit(way: Way, module: Any, plain: nn.Module) -> Tensors:
    import lightning

    data = torch.utils.data.TensorDataset(way.randn(12, 8), torch.arange(12) % 3)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    run = lightning.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet)
    run.fit(module, loader, loader)
    state = {k.replace("_orig_mod.", ""): v for k, v in state_of(plain).items()}
    return state | named(**{k: [v] for k, v in run.callback_metrics.items()})


@case(
    "lightning: the whole module compiled",
    reason="Lightning calls `training_step` of a module, of which only the call is compiled; compile the network inside",
)
def lightning_whole(way: Way) -> Tensors:
    module = lightning_module(way, inner=False)
    return fit(way, torch.compile(module, backend=way.backend) if way.backend else module, module)


@case("lightning: a network inside the module")
def lightning_inner(way: Way) -> Tensors:
    module = lightning_module(way, inner=True)
    return fit(way, module, module)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip


@case("diffusers: loop of denoising (DDIM)")
def denoise(way: Way) -> Tensors:
    from diffusers import DDIMScheduler

    model = way.compile(way.cast(unet()).eval())
    scheduler, x = DDIMScheduler(num_train_timesteps=100), way.randn(1, 3, 8, 8)
    scheduler.set_timesteps(4)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(model(x, t).sample, t, x).prev_sample.to(way.dtype)
    return {"x": x}


@case("diffusers: training of the noise")
def noise(way: Way) -> Tensors:
    x, t = way.randn(2, 3, 8, 8), torch.tensor([3, 50])
    return way.training(unet(), x, t, loss=lambda out: F.mse_loss(out.sample, x), steps=2)


@case("diffusers: conditional UNet")
def conditional(way: Way) -> Tensors:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(16, 32), cross_attention_dim=16, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    return way.inference(model, way.randn(2, 4, 8, 8), torch.tensor(7), way.randn(2, 5, 16))


@case("diffusers: AutoencoderKL")
def autoencoder(way: Way) -> Tensors:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16)
    return way.training(model, way.randn(1, 3, 16, 16), steps=2)


IMAGE = (2, 3, 12, 14)
KORNIA: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "filters.gaussian_blur2d": ({"kernel_size": (3, 5), "sigma": (1.5, 1.5)}, (IMAGE,)),
    "filters.sobel": ({}, (IMAGE,)),
    "filters.unsharp_mask": ({"kernel_size": (3, 3), "sigma": (1.5, 1.5)}, (IMAGE,)),
    "filters.bilateral_blur": (
        {"kernel_size": (3, 3), "sigma_color": 0.1, "sigma_space": (1.5, 1.5)},
        (IMAGE,),
    ),
    "color.rgb_to_hsv": ({}, (IMAGE,)),
    "color.rgb_to_lab": ({}, (IMAGE,)),
    "enhance.adjust_gamma": ({"gamma": 1.3}, (IMAGE,)),
    "enhance.equalize_clahe": ({"slow_and_differentiable": True}, ((1, 1, 16, 16),)),
    "losses.ssim_loss": ({"window_size": 5}, (IMAGE, IMAGE)),
    "losses.total_variation": ({}, (IMAGE,)),
    "morphology.dilation": ({"kernel": torch.ones(3, 3)}, (IMAGE,)),
    "feature.gftt_response": ({}, (IMAGE,)),
    "geometry.transform.resize": ({"size": (7, 9)}, (IMAGE,)),
    "geometry.transform.pyrdown": ({}, (IMAGE,)),
    "geometry.conversions.axis_angle_to_rotation_matrix": ({}, ((5, 3),)),
}


def _register_kornia() -> None:
    def program(path: str) -> Callable[[Way], Tensors]:
        def run(way: Way) -> Tensors:
            module, _, name = path.rpartition(".")
            function = getattr(importlib.import_module(f"kornia.{module}"), name)
            options, shapes = KORNIA[path]
            options = {k: way.cast(v) if isinstance(v, Tensor) else v for k, v in options.items()}
            inputs = (way.randn(*shape).sigmoid() for shape in shapes)
            return way.gradients(lambda *args: function(*args, **options), *inputs)

        return run

    for path in KORNIA:
        case(f"kornia: {path}")(program(path))


_register_kornia()

MASKED = "data decides the size of an index by a mask, which breaks the graph of a backend of the caller's"
EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 0, 5], [1, 0, 2, 1, 4, 3, 0, 4, 5]])
SELECT_EDGES = "GCNConv", "GATConv", "GATv2Conv", "ChebConv"  # they drop those from a node to itself
LAYERS: dict[str, tuple[Any, ...]] = {
    "GCNConv": (8, 6),
    "SAGEConv": (8, 6),
    "GATConv": (8, 3, 2),
    "GATv2Conv": (8, 3, 2),
    "TransformerConv": (8, 3, 2),
    "GraphConv": (8, 6),
    "ChebConv": (8, 6, 2),
    "TAGConv": (8, 6),
}


def _register_layers() -> None:
    def program(name: str) -> Callable[[Way], Tensors]:
        def run(way: Way) -> Tensors:
            import torch_geometric.nn as layers

            return way.training(getattr(layers, name)(*LAYERS[name]), way.randn(6, 8), EDGES)

        return run

    for name in LAYERS:
        reason = MASKED if name in SELECT_EDGES else ""
        case(f"torch_geometric: {name}", reason=reason)(program(name))


_register_layers()


@case("torch_geometric: GIN of two layers, pooled")
def gin(way: Way) -> Tensors:
    from torch_geometric.nn import GIN, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gin, self.head = GIN(8, 16, 2), nn.Linear(16, 3)

        def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
            return self.head(global_mean_pool(self.gin(x, edges), batch, size=2))

    return way.training(Net(), way.randn(6, 8), EDGES, torch.tensor([0, 0, 0, 1, 1, 1]))


@case("einops: rearrange, reduce, repeat, einsum")
def einops_functions(way: Way) -> Tensors:
    from einops import einsum, rearrange, reduce, repeat

    def heads(x: Tensor, w: Tensor) -> Tensor:
        x = einsum(rearrange(x, "b n (h d) -> b h n d", h=2), w, "b h n d, d e -> b h n e")
        return repeat(reduce(x, "b h n e -> b n e", "max"), "b n e -> b (n r) e", r=2)

    return way.gradients(heads, way.randn(2, 3, 8), way.randn(4, 5))


@case("einops: layers and pack")
def einops_layers(way: Way) -> Tensors:
    from einops import pack, unpack
    from einops.layers.torch import Rearrange, Reduce

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                Rearrange("b c h w -> b (h w) c"), nn.Linear(3, 8), Reduce("b n c -> b c", "mean")
            )
            self.token = nn.Parameter(torch.randn(2, 1, 8))

        def forward(self, x: Tensor) -> Any:
            packed, shapes = pack([self.token, self.body(x)[:, None]], "b * c")
            return unpack(packed * 2, shapes, "b * c")

    return way.training(Net(), way.randn(2, 3, 4, 4))


VIT = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2}


@case("vit-pytorch: ViT")
def vit(way: Way) -> Tensors:
    from vit_pytorch import ViT

    return way.training(ViT(**VIT, mlp_dim=32), way.randn(2, 3, 16, 16))


@case("vit-pytorch: SimpleViT")
def simple_vit(way: Way) -> Tensors:
    from vit_pytorch import SimpleViT

    return way.training(SimpleViT(**VIT, mlp_dim=32), way.randn(2, 3, 16, 16))


@case("x-transformers: decoder with rotary and ALiBi")
def decoder(way: Way) -> Tensors:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, ff_glu=True)
    model = TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    return way.training(model, torch.randint(0, 50, (2, 12)))


@case(
    "x-transformers: generation with a cache",
    exact=False,
    reason="the length of the cache becomes a symbol one call before the size of its tensors",
)
def x_generates(way: Way) -> Tensors:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
    model = TransformerWrapper(num_tokens=40, max_seq_len=32, attn_layers=layers)
    model.forward = way.compile(model.forward)
    tokens = torch.randint(0, 40, (1, 4))
    return {"tokens": AutoregressiveWrapper(model).generate(tokens, 5, temperature=0.0)}


@case("x-transformers: AutoregressiveWrapper")
def autoregressive(way: Way) -> Tensors:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=1, heads=2, attn_dim_head=16, alibi_pos_bias=True, attn_flash=False)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers))
    return way.training(model, torch.randint(0, 50, (2, 12)))


@case(
    "torchmetrics: a collection updated in a compiled step",
    reason="data decides the length of `bincount` and the answer of `allclose`",
)
def metrics(way: Way) -> Tensors:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    model = way.cast(nn.Linear(8, 3))
    found = MetricCollection([MulticlassAccuracy(num_classes=3), MulticlassF1Score(num_classes=3)])
    mean = MeanMetric()

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        found.update(logits, y)
        mean.update(logits.detach().abs().mean())
        return logits

    compiled, outs = way.compile(step), []
    for _ in range(3):
        outs.append(compiled(way.randn(9, 8), torch.randint(0, 3, (9,))))
    return named(out=outs, metrics=[*found.compute().values(), mean.compute()])


@case("torchmetrics: functions", reason=MASKED)
def metric_functions(way: Way) -> Tensors:
    from torchmetrics.functional import mean_squared_error, pearson_corrcoef
    from torchmetrics.functional.image import peak_signal_noise_ratio

    def both(a: Tensor, b: Tensor) -> Any:
        return mean_squared_error(a, b), pearson_corrcoef(a, b), peak_signal_noise_ratio(a, b, data_range=1.0)

    return way.gradients(both, way.randn(20), way.randn(20))


@case(
    "gpytorch: exact GP, marginal likelihood", reason="`torch.equal` gives Python a truth that data decides"
)
def gaussian_process(way: Way) -> Tensors:
    import gpytorch

    x, y = torch.linspace(0, 1, 10).to(way.dtype), way.randn(10)

    class GP(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = way.cast(GP()).train()
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    loss = way.compile(lambda: -likelihood(model(x), y))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimizer.step()
    return named(loss=losses) | state_of(model)


@case("gpytorch: kernels", reason="`torch.equal` gives Python a truth that data decides")
def kernels(way: Way) -> Tensors:
    from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

    kernel = way.cast(ScaleKernel(MaternKernel(nu=1.5) + RBFKernel()))
    return way.gradients(lambda a, b: kernel(a, b).to_dense(), way.randn(5, 2), way.randn(4, 2))


class Field(nn.Module):
    """A small vector field."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y**3) * (1 + t)


def solve(way: Way, solver: str, whole: bool) -> Tensors:
    from torchdiffeq import odeint, odeint_adjoint

    field, y0 = way.cast(Field()), way.randn(3, 2).requires_grad_()
    t = torch.linspace(0, 0.5, 4).to(way.dtype)
    inner = field if whole else way.compile(field)

    def program(y: Tensor, t: Tensor) -> Tensor:
        if solver == "adjoint":
            return odeint_adjoint(inner, y, t, method="rk4", adjoint_params=tuple(field.parameters()))
        return odeint(inner, y, t, method=solver)

    out = (way.compile(program) if whole else program)(y0, t)
    out.square().sum().backward()
    return named(out=[out], grad=[y0.grad, *(p.grad for p in field.parameters())])


@case(
    "torchdiffeq: rk4, the whole solver compiled",
    reason="loops whose conditions are tensors: each breaks, and the rest of a round is captured here, eager there",
)
def rk4(way: Way) -> Tensors:
    return solve(way, "rk4", whole=True)


@case("torchdiffeq: dopri5, the field compiled", exact=False)
def dopri5(way: Way) -> Tensors:
    return solve(way, "dopri5", whole=False)


@case(
    "torchdiffeq: dopri5, the whole solver compiled",
    exact=False,
    reason="as rk4; data accepts steps; a custom function breaks that writes its argument through `.data`: `view_as` is autograd's call for it",
)
def dopri5_whole(way: Way) -> Tensors:
    return solve(way, "dopri5", whole=True)


@case("torchdiffeq: adjoint of rk4, the field compiled")
def adjoint(way: Way) -> Tensors:
    return solve(way, "adjoint", whole=False)


@case("e3nn: linear, tensor product, spherical harmonics")
def equivariant(way: Way) -> Tensors:
    import e3nn
    from e3nn import o3

    e3nn.set_optimization_defaults(jit_mode="eager")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sh, mid = o3.Irreps.spherical_harmonics(2), o3.Irreps("4x0e+2x1o+1x2e")
            self.product, self.linear = (
                o3.FullyConnectedTensorProduct(mid, sh, mid),
                o3.Linear(mid, "3x0e+1x1o"),
            )
            self.sh = o3.SphericalHarmonics(sh, normalize=True)

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            return self.linear(self.product(x, self.sh(r)))

    return way.training(Net(), way.randn(6, 15), way.randn(6, 3))


@case("ultralytics: YOLOv8n, inference")
def yolo(way: Way) -> Tensors:
    from ultralytics.nn.tasks import DetectionModel

    return way.inference(DetectionModel("yolov8n.yaml", verbose=False), way.randn(1, 3, 64, 64).sigmoid())


@case("ultralytics: YOLOv8n, a step of training")
def yolo_training(way: Way) -> Tensors:
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolov8n.yaml", verbose=False)
    return way.training(model, way.randn(2, 3, 64, 64).sigmoid(), steps=1)


@case("monai: UNet and Dice loss")
def monai_unet(way: Way) -> Tensors:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1
    )
    target, dice = torch.randint(0, 2, (2, 1, 16, 16)), DiceLoss(to_onehot_y=True, softmax=True)
    return way.training(model, way.randn(2, 1, 16, 16), loss=lambda out: dice(out, target))


@case("monai: SwinUNETR")
def swin_unetr(way: Way) -> Tensors:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(
        in_channels=1,
        out_channels=2,
        feature_size=12,
        spatial_dims=2,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 2),
    )
    return way.inference(model, way.randn(1, 1, 64, 64))


@case("monai: losses")
def monai_losses(way: Way) -> Tensors:
    from monai.losses import DiceFocalLoss, TverskyLoss

    focal, tversky = DiceFocalLoss(sigmoid=True), TverskyLoss(sigmoid=True)
    target = torch.randint(0, 2, (2, 3, 8, 8)).to(way.dtype)
    return way.gradients(lambda x: focal(x, target) + tversky(x, target), way.randn(2, 3, 8, 8))


@case("entmax: sparsemax, entmax15, bisection")
def sparse_maps(way: Way) -> Tensors:
    from entmax import entmax15, entmax_bisect, sparsemax

    def maps(x: Tensor) -> Any:
        return sparsemax(x, dim=-1), entmax15(x, dim=-1), entmax_bisect(x, alpha=1.4, dim=-1)

    return way.gradients(maps, way.randn(4, 10))


@case("entmax: losses")
def sparse_losses(way: Way) -> Tensors:
    from entmax import Entmax15Loss, SparsemaxLoss

    first, second, target = SparsemaxLoss(), Entmax15Loss(), torch.tensor([1, 3, 0, 2])
    return way.gradients(lambda x: (first(x, target), second(x, target)), way.randn(4, 10))


@case("performer-pytorch: causal attention")
def performer(way: Way) -> Tensors:
    from performer_pytorch import SelfAttention

    model = SelfAttention(dim=16, heads=2, dim_head=8, causal=True, nb_features=8)
    return way.training(model, way.randn(2, 16, 16))


@case("vector-quantize-pytorch: FSQ and LFQ")
def quantizers(way: Way) -> Tensors:
    from vector_quantize_pytorch import FSQ, LFQ

    found = {}
    for name, layer in (("fsq", FSQ(levels=[5, 4, 3], dim=16)), ("lfq", LFQ(codebook_size=16, dim=16))):
        for key, value in way.training(layer, way.randn(2, 10, 16)).items():
            found[f"{key} of {name}"] = value
    return found


@case("segmentation-models-pytorch: Unet and Dice loss")
def segmentation(way: Way) -> Tensors:
    from segmentation_models_pytorch import Unet
    from segmentation_models_pytorch.losses import DiceLoss

    sizes = {"encoder_depth": 3, "decoder_channels": (32, 16, 8), "classes": 2}
    model, target = Unet("resnet18", encoder_weights=None, **sizes), torch.randint(0, 2, (2, 32, 32))
    dice = DiceLoss("multiclass")
    return way.training(model, way.randn(2, 3, 32, 32), loss=lambda out: dice(out, target), steps=2)


@case("segmentation-models-pytorch: FPN, inference")
def pyramid(way: Way) -> Tensors:
    from segmentation_models_pytorch import FPN

    return way.inference(FPN("mobilenet_v2", encoder_weights=None, classes=2), way.randn(1, 3, 64, 64))


@case("open_clip: ViT, text and the contrastive loss")
def contrastive(way: Way) -> Tensors:
    from open_clip import ClipLoss
    from open_clip.model import CLIP

    image = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
    text = {"context_length": 8, "vocab_size": 40, "width": 32, "heads": 2, "layers": 2}
    loss = ClipLoss()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = CLIP(embed_dim=16, vision_cfg=image, text_cfg=text)

        def forward(self, images: Tensor, texts: Tensor) -> Tensor:
            return loss(*self.model(images, texts)[:3])

    return way.training(Both(), way.randn(2, 3, 16, 16), torch.randint(1, 40, (2, 8)))


@case("conformer: two blocks")
def conformer(way: Way) -> Tensors:
    from conformer import Conformer

    sizes = {"ff_mult": 2, "conv_expansion_factor": 2, "conv_kernel_size": 5}
    return way.training(Conformer(dim=16, depth=2, dim_head=8, heads=2, **sizes), way.randn(2, 12, 16))


def _register_flows() -> None:
    def program(name: str) -> Callable[[Way], Tensors]:
        def run(way: Way) -> Tensors:
            import zuko

            class Likelihood(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.flow = getattr(zuko.flows, name)(features=3, context=2, hidden_features=(16,))

                def forward(self, x: Tensor, context: Tensor) -> Tensor:
                    return -self.flow(context).log_prob(x).mean()

            return way.training(Likelihood(), way.randn(4, 3), way.randn(4, 2), steps=2)

        return run

    for name in ("MAF", "NSF"):
        case(f"zuko: {name}")(program(name))


_register_flows()


@case(
    "pyro: densities",
    reason="the check of a matrix returns early where data says so; `torch.compile` leaves the checks of arguments out",
)
def densities(way: Way) -> Tensors:
    import pyro.distributions as dist

    def log_probs(x: Tensor, s: Tensor) -> Any:
        s = s.exp()
        return (
            dist.Normal(x, s).log_prob(x * 2), dist.Gamma(s, s + 1).log_prob(s + 0.5),
            dist.MultivariateNormal(x, torch.diag_embed(s)).log_prob(x + 1), dist.LogNormal(x, s).log_prob(s),
            dist.Dirichlet(s).log_prob(torch.softmax(x, -1)), dist.StudentT(s + 1, x, s).log_prob(x + 1),
        )  # fmt: skip

    return way.gradients(log_probs, way.randn(3, 4), way.randn(3, 4))


@case("pytorch-metric-learning: SoftTripleLoss")
def soft_triple(way: Way) -> Tensors:
    from pytorch_metric_learning.losses import SoftTripleLoss

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = SoftTripleLoss(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(x, torch.tensor([0, 0, 1, 1, 2, 2, 0, 1]))

    return way.training(Loss(), way.randn(8, 5))


@case("lion-pytorch: a compiled step")
def lion(way: Way) -> Tensors:
    from lion_pytorch import Lion

    model, losses = way.cast(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))), []
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=1e-2)
    compiled, step, x = way.compile(model), way.compile(optimizer.step), way.randn(6, 8)
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(compiled(x).square().mean())
        losses[-1].backward()
        step()
    return named(loss=losses) | state_of(model)
