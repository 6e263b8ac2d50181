"""The loops of `bench --shapes`: models and functions whose sizes change from call to call.

>>> case = case_of("bert-infer")           # also "model:NAME" and "model:NAME:train", of the model list
>>> for result in case.steps(case.model): ...
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import models, numerics, torchvision_stub
from .model_configs import HUGGING_FACE, TIMM_IMAGE


@dataclass
class Case:
    """The compiled function, and a loop over it: `steps(call)` gives the results of one call after another, the
    same at each run.

    single(n)(call) makes the call with the n-th sizes alone; count: how many there are. exact(): the results
    of the same loop in float64.
    """

    model: Any
    steps: Callable[[Any], Iterable[torch.Tensor]]
    single: Callable[[int], Callable[[Any], torch.Tensor]] | None = None
    count: int = 0
    exact: Callable[[], list[torch.Tensor]] | None = None


def _bert(train: bool) -> Case:
    transformers, large = _transformers(), torch.get_default_device().type != "cpu"
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=768 if large else 128,
        num_hidden_layers=6 if large else 2,
        num_attention_heads=12 if large else 4,
        intermediate_size=3072 if large else 512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, pick = transformers.BertForMaskedLM(config).train(train), random.Random(0)
    most = 4 if large else 1
    sizes = [(pick.randint(2, 12 * most), pick.randint(8, 64 * most)) for _ in range(20 if train else 40)]
    batches = [torch.randint(0, 1000, size) for size in sizes]
    return _batches(model, batches, train, lambda call, ids: call(input_ids=ids).logits)


def _batches(
    model: nn.Module,
    batches: Sequence[Any],
    train: bool,
    forward: Callable[[Any, Any], torch.Tensor],
) -> Case:
    """A model over batches: its results, in training all gradients' norms."""

    def one(call: Any, batch: Any, owner: nn.Module = model) -> torch.Tensor:
        if not train:
            with torch.no_grad():
                return forward(call, batch)
        loss = forward(call, batch).square().mean()
        loss.backward()
        norms = torch.stack([p.grad.norm() for p in owner.parameters() if p.grad is not None])
        owner.zero_grad(set_to_none=True)
        return torch.cat([norms, loss.detach()[None]])

    def exact() -> list[torch.Tensor]:
        double, before = copy.deepcopy(model).double(), torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)  # models make constants of the default type
            return [one(double, _doubled(batch), double).detach() for batch in batches]
        finally:
            torch.set_default_dtype(before)

    def single(n: int) -> Callable[[Any], torch.Tensor]:
        return lambda call: one(call, batches[n])

    return Case(model, lambda call: (one(call, batch) for batch in batches), single, len(batches), exact)


def _doubled(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


def _generated(
    model: nn.Module,
    texts: Sequence[torch.Tensor],
    tokens: int,
    begin: Callable[[torch.Tensor], Any],
    arguments: Callable[[torch.Tensor, Any], dict[str, Any]],
    go_on: Callable[[torch.Tensor, Any, Any], tuple[torch.Tensor, Any]],
) -> Case:
    """A text after another, a token after another. A text's state is what `begin` gives; a call takes
    `arguments(ids, state)`, and `go_on(ids, state, result)` gives the next."""

    def steps(call: Any) -> Iterable[torch.Tensor]:
        for ids in texts:
            state = begin(ids)
            for _ in range(tokens):
                with torch.no_grad():
                    out = call(**arguments(ids, state))
                yield out.logits
                ids, state = go_on(ids, state, out)

    return Case(model.eval(), steps)


def _prompts(config: Any, prompts: Sequence[int] = (5, 9, 14), copies: int = 1) -> list[torch.Tensor]:
    return [torch.randint(0, config.vocab_size, (1, n)).repeat(copies, 1) for n in prompts]


def _decode(config: Any, prompts: Sequence[int] = (5, 9, 14), tokens: int = 24) -> Case:
    """Greedy decoding with a cache that grows by a token at each step."""
    transformers = _transformers()
    return _generated(
        transformers.AutoModelForCausalLM.from_config(config),
        _prompts(config, prompts),
        tokens,
        lambda ids: transformers.DynamicCache(config=config),
        lambda ids, cache: {"input_ids": ids, "past_key_values": cache, "use_cache": True},
        lambda ids, cache, out: (out.logits[:, -1:].argmax(-1), out.past_key_values),
    )


def _gpt2() -> Case:
    return _decode(
        _transformers().GPT2Config(vocab_size=1000, n_embd=128, n_layer=2, n_head=4, n_positions=128)
    )


def _llama_config(places: int = 128) -> Any:
    return _transformers().LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=places,
    )


class _Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
        )
        self.norm_a, self.norm_b = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_b(self.b(self.norm_a(self.a(x)).relu()))
        return (y + self.short(x)).relu()


def _residual_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        _Block(16, 16, 1),
        _Block(16, 32, 2),
        _Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 100),
    )


def _resnet() -> Case:
    images = [torch.randn(4, 3, n, n + 16 * (k % 3)) for k, n in enumerate(range(64, 160, 8))]
    return _batches(_residual_network().eval(), images, False, lambda call, x: call(x))


def _last_batch() -> Case:
    """Three epochs of full batches, each with a smaller last one."""
    images = [torch.randn(n, 3, 48, 48) for n in (16, 16, 16, 16, 7) * 3]
    return _batches(_residual_network().train(), images, True, lambda call, x: call(x))


def _function() -> Case:
    def attention(x: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.transpose(-1, -2)) / 8 + torch.arange(x.shape[1], device=x.device)
        return torch.nn.functional.gelu(scores.softmax(-1) @ x).mean(1)

    given = [torch.randn(4, n, 64) for n in range(10, 70)]
    return Case(
        attention, lambda call: (call(x) for x in given), lambda n: lambda call: call(given[n]), len(given)
    )


def _static_cache() -> Case:
    """Greedy decoding with a cache of fixed length: a prompt, then one token after another."""
    transformers, config = _transformers(), _llama_config()

    def arguments(ids: torch.Tensor, state: tuple[Any, int]) -> dict[str, Any]:
        cache, at = state
        places = torch.arange(at, at + ids.shape[1], device=ids.device)
        more = {"cache_position": places, "position_ids": places[None]}
        return {"input_ids": ids, "past_key_values": cache, **more}

    return _generated(
        transformers.AutoModelForCausalLM.from_config(config),
        _prompts(config),
        24,
        lambda ids: (transformers.StaticCache(config=config, max_cache_len=64), 0),
        arguments,
        lambda ids, state, out: (out.logits[:, -1:].argmax(-1), (state[0], state[1] + ids.shape[1])),
    )


def _beam_search() -> Case:
    """Four beams of which the best go on: the cache grows and is gathered anew at each step."""
    transformers, config, beams = _transformers(), _llama_config(), 4

    def begin(ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        scores = torch.tensor([0.0] + [-1e9] * (beams - 1), device=ids.device)
        return transformers.DynamicCache(config=config), scores

    def go_on(ids: torch.Tensor, state: tuple[Any, torch.Tensor], out: Any) -> tuple[torch.Tensor, Any]:
        total = state[1][:, None] + out.logits[:, -1].log_softmax(-1)
        scores, best = total.flatten().topk(beams)
        out.past_key_values.reorder_cache(best // config.vocab_size)
        return (best % config.vocab_size)[:, None], (out.past_key_values, scores)

    return _generated(
        transformers.AutoModelForCausalLM.from_config(config),
        _prompts(config, copies=beams),
        24,
        begin,
        lambda ids, state: {"input_ids": ids, "past_key_values": state[0], "use_cache": True},
        go_on,
    )


def _t5() -> Case:
    """Texts of many lengths, answers that grow without a cache."""
    transformers = _transformers()
    config = transformers.T5Config(
        vocab_size=1000,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _generated(
        transformers.T5ForConditionalGeneration(config),
        [torch.randint(0, 1000, (2, n)) for n in (7, 12, 19, 26)],
        10,
        lambda ids: torch.zeros(2, 1, dtype=torch.int64, device=ids.device),
        lambda ids, answer: {"input_ids": ids, "decoder_input_ids": answer, "use_cache": False},
        lambda ids, answer, out: (ids, torch.cat([answer, out.logits[:, -1:].argmax(-1)], 1)),
    )


class _UNet(nn.Module):
    """Two steps down, two up, each joined with the map of its size from the way down."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.down_a, self.down_b = (
            _Block(3, width, 1),
            _Block(width, 2 * width, 2),
            _Block(2 * width, 4 * width, 2),
        )
        self.up_a, self.up_b = _Block(6 * width, 2 * width, 1), _Block(3 * width, width, 1)
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.down_a(a)
        c = self.down_b(b)
        b = self.up_a(torch.cat([b, nn.functional.interpolate(c, size=b.shape[-2:], mode="nearest")], 1))
        a = self.up_b(torch.cat([a, nn.functional.interpolate(b, size=a.shape[-2:], mode="nearest")], 1))
        return self.last(a)


def _u_net() -> Case:
    images = [torch.randn(2, 3, n, n + 8 * (k % 3)) for k, n in enumerate(range(32, 96, 8))]
    return _batches(_UNet().eval(), images, False, lambda call, x: call(x))


def _packed() -> Case:
    """Texts of changing lengths in one row; a Python loop over their lengths attends within each."""
    embed, mix = nn.Embedding(100, 64), nn.Linear(64, 64)

    def model(ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        x, start, parts = embed(ids), 0, []
        for n in lengths:
            part = mix(x[start : start + n])
            parts.append((part @ part.t() / 8).softmax(-1) @ part)
            start += n
        return torch.cat(parts)

    pick = random.Random(0)
    rows = [[pick.randint(3, 30) for _ in range(4)] for _ in range(20)]
    batches = [torch.randint(0, 100, (sum(row),)) for row in rows]

    def steps(call: Any) -> Iterable[torch.Tensor]:
        for row, ids in zip(rows, batches, strict=True):
            with torch.no_grad():
                yield call(ids, row)

    return Case(model, steps)


def _small_calls(kernels: int) -> Case:
    """A graph of so many tiny kernels: the cost of a call beside them."""

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(kernels // 3):
            x = (x - x.cumsum(0)[-1:]).softmax(-1).softmax(0)
        return x.tanh()

    given = [torch.randn(n, 8) for n in (4, 5, 6, 7)]
    return Case(
        model, lambda call: (call(x) for x in given), lambda n: lambda call: call(given[n]), len(given)
    )


def _listed(name: str, train: bool) -> Case:
    """A model of the list, reduced, at three batch sizes and, where it has them, three lengths or
    resolutions.
    """
    device = torch.get_default_device()
    with torch.device("cpu"):  # where its random numbers are drawn
        model, batches, forward = _model_and_batches(name, train)
    moved = [
        {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}
        for batch in batches
    ]
    return _batches(model, moved, train, forward)


def _model_and_batches(
    name: str, train: bool
) -> tuple[nn.Module, list[dict[str, Any]], Callable[[Any, Any], torch.Tensor]]:
    case = models.load(name, small=True, dropout=False)
    model, generator = case.model.train(train), torch.Generator().manual_seed(0)
    if name in HUGGING_FACE:
        row = HUGGING_FACE[name]
        fixed = name.startswith("Reformer")
        sizes = [(2, 16), (3, 16 if fixed else 11), (5, 16 if fixed else 14)]
        batches = [row.inputs(model.config, b, n, generator, train) for b, n in sizes]
    else:
        (image,), _ = case.make_inputs()
        side = image.shape[-1]
        config = model.default_cfg
        fixed = (
            name in TIMM_IMAGE
            or config.get("fixed_input_size")
            or getattr(model, "patch_embed", None) is not None
        )
        sides = [side] * 3 if fixed else [side, side + 32, side + 64]
        # a batch norm over two values has gradients that no precision gives
        normed = train and any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        counts = (8, 10, 13) if normed else (2, 3, 5)
        batches = [
            {"x": torch.randn(b, 3, n, n, generator=generator)} for b, n in zip(counts, sides, strict=True)
        ]

    def forward(call: Any, batch: Any) -> torch.Tensor:
        out = call(batch["x"]) if "x" in batch else call(**batch)
        return (
            case.loss(out)
            if train
            else next(t for t in numerics.output_tensors(out) if t.is_floating_point())
        )

    return model, batches, forward


def _transformers() -> Any:
    torchvision_stub.prepare()
    import transformers

    return transformers


CASES: dict[str, Callable[[], Case]] = {
    "bert-infer": lambda: _bert(False),
    "bert-train": lambda: _bert(True),
    "decode-gpt2": _gpt2,
    "decode-llama": lambda: _decode(_llama_config()),
    "decode-long": lambda: _decode(_llama_config(512), (6,), 500),
    "static-cache": _static_cache,
    "beam-search": _beam_search,
    "t5": _t5,
    "resnet": _resnet,
    "u-net": _u_net,
    "last-batch": _last_batch,
    "packed": _packed,
    "function": _function,
    "calls-few": lambda: _small_calls(3),
    "calls-many": lambda: _small_calls(36),
}


def names_of(wanted: str) -> list[str]:
    """The cases of `--cases`: all by default; "models" is the model list, in inference and training."""
    names = [name for name in wanted.split(",") if name] or list(CASES)
    listed = [f"model:{name}{phase}" for name in models.names() for phase in ("", ":train")]
    return [each for name in names for each in (listed if name == "models" else [name])]


def case_of(name: str) -> Case:
    """Build a case; KeyError for an unknown one."""
    if name.startswith("model:"):
        _, model, *train = name.split(":")
        return _listed(model, bool(train))
    return CASES[name]()
