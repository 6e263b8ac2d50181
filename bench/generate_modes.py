"""The modes of transformers' `generate`, by families of models and by the function that is compiled: tokens beside
eager's, and graphs beside torch.compile's capture.

    python -m bench generate_modes --families llama,gpt2 --modes greedy,beams --ways forward,generate,auto
    python -m bench generate_modes --json FILE [--no-torch] [--rounds 5]

A mode is a function of a model and of the `generate` to call; its results must be equal to eager's. Each cell runs in a
forked process. Random numbers are drawn as eager draws them (`fallback_random`). With rounds, warm calls of eager's and
of the compiled program take turns; the least process times count.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import dynamotor
from bench.tool import read_json, write_json
from dynamotor.base.events import counters

from . import models
from .beside import apart, told

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mamba": "MambaForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
}
WAYS = ("forward", "generate", "auto")
Model = Any
Generate = Callable[..., Any]
Mode = Callable[[Model, Generate], list[Any]]
MODES: dict[str, Mode] = {}
GREEDY = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
STATIC = {"cache_implementation": "static"}


def _mode(function: Mode) -> Mode:
    MODES[function.__name__.lstrip("_")] = function
    return function


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(
        5, 250, (batch, length), generator=torch.Generator().manual_seed(100 * length + seed)
    )


def _each(generate: Generate, *calls: dict[str, Any], lengths: tuple[int, ...] = (7, 10, 13)) -> list[Any]:
    """Results of prompts of some lengths, two of them for two sequences; of each call a seed."""
    found = []
    for n, length in enumerate(lengths):
        for settings in calls:
            torch.manual_seed(n)
            ids = prompt(1 + n % 2, length, n)
            found.append(generate(ids, attention_mask=torch.ones_like(ids), **settings))
            found.append(torch.rand(1))  # as many random numbers were drawn
    return found


@_mode
def greedy(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY)


@_mode
def greedy_static(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY | STATIC)


@_mode
def no_cache(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY | {"use_cache": False})


def _sampled(**settings: Any) -> dict[str, Any]:
    return {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8, "top_k": 0, **settings}


@_mode
def temperature(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(temperature=0.7), _sampled(temperature=1.3))


@_mode
def top_k(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(top_k=20))


@_mode
def top_p(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(top_p=0.8))


@_mode
def min_p(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(min_p=0.3))


@_mode
def typical_p(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(typical_p=0.7), _sampled(epsilon_cutoff=3e-3, eta_cutoff=3e-3))


@_mode
def repetition(model: Model, generate: Generate) -> list[Any]:
    return _each(
        generate,
        _sampled(repetition_penalty=1.3),
        GREEDY | {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    )


@_mode
def sample_static(model: Model, generate: Generate) -> list[Any]:
    return _each(
        generate, _sampled(temperature=0.8, top_k=30, top_p=0.9, min_p=0.05, repetition_penalty=1.1) | STATIC
    )


@_mode
def several(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(num_return_sequences=3), _sampled(num_return_sequences=3) | STATIC)


@_mode
def beams(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY | {"num_beams": 3}, lengths=(7, 10))


@_mode
def beams_static(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY | {"num_beams": 3, "num_return_sequences": 2} | STATIC, lengths=(7, 10))


@_mode
def beam_sample(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, _sampled(num_beams=3, temperature=0.9), lengths=(7, 10))


@_mode
def assisted(model: Model, generate: Generate) -> list[Any]:
    helper = copy.deepcopy(model)
    helper.forward = type(helper).forward.__get__(helper)
    with torch.no_grad():
        for p in helper.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    found = []
    for length in (7, 10):
        for settings in (GREEDY, _sampled()):
            torch.manual_seed(0)
            found.append(generate(prompt(1, length), assistant_model=helper, **settings))
    return found


@_mode
def prompt_lookup(model: Model, generate: Generate) -> list[Any]:
    found = []
    for length in (5, 7):
        ids = prompt(1, length).repeat(1, 3)
        found.append(generate(ids, prompt_lookup_num_tokens=3, **GREEDY))
    return found


@functools.cache
def _classes() -> tuple[Any, Any, Any]:
    """A streamer, a stopping criterion and a processor, as a program would define them once."""
    from transformers import LogitsProcessor, StoppingCriteria
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        def __init__(self, seen: list[torch.Tensor]) -> None:
            self.seen = seen

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.clone())

        def end(self) -> None:
            self.seen.append(torch.tensor(-1))

    class After(StoppingCriteria):
        def __init__(self, count: int) -> None:
            self.count = count

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.count -= 1
            return torch.full((input_ids.shape[0],), self.count <= 0, dtype=torch.bool)

    class Odd(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            scores[:, ::2] = -torch.inf
            return scores

    return Streamer, After, Odd


@_mode
def streaming(model: Model, generate: Generate) -> list[Any]:
    seen: list[torch.Tensor] = []
    return [*(generate(prompt(1, n), streamer=_classes()[0](seen), **GREEDY) for n in (7, 10)), *seen]


@_mode
def stopping(model: Model, generate: Generate) -> list[Any]:
    from transformers import StoppingCriteriaList

    after = _classes()[1](4)
    calls = [
        {"stopping_criteria": StoppingCriteriaList([after]), "do_sample": False, "max_new_tokens": 9},
        {"eos_token_id": list(range(0, 250, 3)), "do_sample": False, "max_new_tokens": 9},
        {"max_time": 60.0, "do_sample": False, "max_new_tokens": 5},
    ]
    return [generate(prompt(2, 7), **one) for one in calls]


@_mode
def processors(model: Model, generate: Generate) -> list[Any]:
    from transformers import LogitsProcessorList

    return _each(
        generate,
        GREEDY | {"logits_processor": LogitsProcessorList([_classes()[2]()])},
        GREEDY | {"bad_words_ids": [[7], [9, 11]], "suppress_tokens": [12, 13]},
        GREEDY | {"sequence_bias": {(15,): 5.0, (16, 17): -3.0}},
        lengths=(7, 10),
    )


@_mode
def guidance(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY | {"guidance_scale": 1.5}, lengths=(7, 10))


@_mode
def scores(model: Model, generate: Generate) -> list[Any]:
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return [
        value
        for length in (7, 10)
        for value in generate(prompt(2, length), **GREEDY, **settings, output_hidden_states=True).values()
    ]


def _padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, length in enumerate(lengths):
        ids[n, ids.shape[1] - length :] = prompt(1, length)[0]
        mask[n, ids.shape[1] - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@_mode
def left_padding(model: Model, generate: Generate) -> list[Any]:
    return [generate(**_padded(n), **GREEDY) for n in ((7, 4, 9), (5, 12), (8, 8), (11, 3, 6))]


@_mode
def left_padding_static(model: Model, generate: Generate) -> list[Any]:
    return [generate(**_padded(n), **GREEDY, **STATIC) for n in ((7, 4, 9), (5, 12), (8, 8), (11, 3, 6))]


@_mode
def lengths(model: Model, generate: Generate) -> list[Any]:
    return [generate(prompt(1, n), **GREEDY) for n in (3, 5, 4, 16, 9, 1, 2, 20)]


@_mode
def lengths_static(model: Model, generate: Generate) -> list[Any]:
    return [generate(prompt(1, n), **GREEDY, **STATIC) for n in (3, 5, 4, 16, 9, 1, 2, 20)]


@_mode
def chunked_prefill(model: Model, generate: Generate) -> list[Any]:
    return [generate(prompt(1, n), prefill_chunk_size=4, **GREEDY) for n in (9, 12, 8)]


@_mode
def embeddings(model: Model, generate: Generate) -> list[Any]:
    with torch.no_grad():
        found = [model.get_input_embeddings()(prompt(2, n)).detach() for n in (7, 10)]
    return [generate(inputs_embeds=one, **GREEDY) for one in found]


@_mode
def continued(model: Model, generate: Generate) -> list[Any]:
    """A conversation: the cache of the last answer and a longer prompt."""
    found, ids, cache = [], prompt(1, 6), None
    for n in range(3):
        result = generate(ids, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
        cache = result.past_key_values
        found.append(result.sequences)
        ids = torch.cat([result.sequences, prompt(1, 3, n)], 1)
    return found


@_mode
def offloaded(model: Model, generate: Generate) -> list[Any]:
    return _each(generate, GREEDY | {"cache_implementation": "offloaded"}, lengths=(7, 10))


@_mode
def sliding_static(model: Model, generate: Generate) -> list[Any]:
    """A window shorter than the text."""
    return _each(generate, GREEDY | STATIC, GREEDY, lengths=(7, 10))


@_mode
def two_models(model: Model, generate: Generate) -> list[Any]:
    found = []
    for _ in range(2):
        found += _each(generate, GREEDY, GREEDY | STATIC, lengths=(7, 10))
        with torch.no_grad():
            for p in model.parameters():  # new weights in the place of the old ones
                p.mul_(0.9)
    return found


@_mode
def changed_settings(model: Model, generate: Generate) -> list[Any]:
    found = []
    for name, value in (
        ("temperature", 0.5),
        ("top_p", 0.7),
        ("repetition_penalty", 1.4),
        ("do_sample", True),
        ("num_beams", 2),
    ):
        setattr(model.generation_config, name, value)
        torch.manual_seed(0)
        found.append(generate(prompt(2, 7), max_new_tokens=5, min_new_tokens=5))
    return found


@_mode
def attention_maps(model: Model, generate: Generate) -> list[Any]:
    model.set_attn_implementation("eager")
    settings = {"return_dict_in_generate": True, "output_attentions": True}
    return [v for n in (7, 10) for v in generate(prompt(2, n), **GREEDY, **settings).values()]


@_mode
def batches(model: Model, generate: Generate) -> list[Any]:
    """Continuous batching."""
    import transformers

    settings = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
    found = []
    for sizes in ((5, 9, 17, 3), (4, 21), (30, 2, 7)):
        inputs = [prompt(1, n)[0].tolist() for n in sizes]
        results = model.generate_batch(
            inputs=inputs, generation_config=settings, continuous_batching_config=pages, progress_bar=False
        )
        found += [torch.tensor(one.generated_tokens) for one in results.values()]
    return found


@dataclass
class Cell:
    """A mode of a family, compiled one way."""

    family: str
    mode: str
    way: str
    right: bool = False
    graphs: int = 0
    breaks: int = 0
    torch_graphs: int | None = None
    torch_breaks: int | None = None
    seconds: float = 0.0
    eager_ms: float | None = None
    ours_ms: float | None = None
    why: dict[str, int] | None = None
    error: str = ""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, in order; caches are left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def prepared(family: str, way: str, compile_: Callable[..., Any]) -> tuple[Model, Generate]:
    """A model and its `generate`; `compile_` compiles the function that the way names."""
    model = models.load(FAMILIES[family], small=True, dropout=False).model.eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.disable_compile = way != "auto"
    generate = model.generate
    if way == "forward":
        model.forward = compile_(model.forward)
    elif way == "generate":
        generate = compile_(model.generate)
    elif way == "auto":
        from transformers import CompileConfig

        settings = CompileConfig(fullgraph=False, mode="default")
        settings._compile_all_devices = True
        model.generation_config.compile_config = settings
    return model, generate


def run(family: str, mode: str, way: str, compile_: Callable[..., Any]) -> list[torch.Tensor]:
    """A mode's results, from seed 0."""
    model, generate = prepared(family, way, compile_)
    torch.manual_seed(0)
    return [t.detach().clone() for t in tensors(MODES[mode](model, generate))]


def least_times(family: str, mode: str, way: str, rounds: int) -> list[float]:
    """Process times of a mode in eager and compiled, ms; two rounds go before."""
    sides = [prepared(family, "eager", lambda f: f), prepared(family, way, dynamotor.compile)]
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 2):
        for (model, generate), found in zip(sides, times):
            torch.manual_seed(0)
            start = time.process_time()
            MODES[mode](model, generate)
            found.append(1e3 * (time.process_time() - start))
    return [min(found[2:]) for found in times]


def same(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Equal integers, near floating-point numbers."""
    if len(ours) != len(wanted) or any(
        a.shape != b.shape or a.dtype != b.dtype for a, b in zip(ours, wanted)
    ):
        return False
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4) if b.is_floating_point() else torch.equal(a, b)
        for a, b in zip(ours, wanted)
    )


def measured(family: str, mode: str, way: str, beside_torch: bool, rounds: int = 0) -> Cell:
    """One cell."""
    cell = Cell(family, mode, way)
    try:
        wanted = run(family, mode, "eager", lambda f: f)
    except Exception as e:
        cell.error = "eager: " + told(e)
        return cell
    start = time.perf_counter()
    try:
        with dynamotor.replace_torch_compile():
            ours = run(family, mode, way, dynamotor.compile)
        cell.right = same(ours, wanted)
    except Exception as e:
        cell.error = told(e)
    cell.seconds = time.perf_counter() - start
    cell.graphs, cell.breaks = counters["capture"]["graphs"], sum(counters["breaks"].values())
    cell.why = (
        dict(counters["breaks"])
        | dict(counters["frames"])
        | {"fallback " + k: v for k, v in counters["fallback"].items()}
    )
    if rounds and cell.right:
        with dynamotor.replace_torch_compile():
            cell.eager_ms, cell.ours_ms = least_times(family, mode, way, rounds)
    dynamotor.reset()
    if beside_torch:
        cell.torch_graphs, cell.torch_breaks = torch_counts(family, mode, way)
    return cell


def torch_counts(family: str, mode: str, way: str) -> tuple[int | None, int | None]:
    """Graphs and breaks of torch.compile's capture; nothing where it fails."""
    stock = torch.compile

    def compile_(fn: Any = None, **options: Any) -> Any:
        return stock(fn, backend="eager")

    torch.compile = compile_
    try:
        run(family, mode, way, compile_)
    except Exception as e:
        print("torch.compile:", told(e), flush=True)
        return None, None
    finally:
        torch.compile = stock
    found = torch._dynamo.utils.counters
    return found["stats"]["unique_graphs"], sum(found["graph_break"].values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--no-torch", action="store_true", help="without torch.compile's counts")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of warm calls that are timed")
    parser.add_argument("--timeout", type=float, default=300.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dynamotor.config.fallback_random = True
    found = read_json(options.json)
    models.load("LlamaForCausalLM", small=True)
    for family in options.families.split(","):
        for mode in options.modes.split(","):
            for way in options.ways.split(","):
                work = partial(measured, family, mode, way, not options.no_torch, options.rounds)
                cell = apart(work, options.timeout)
                if isinstance(cell, str):
                    cell = Cell(family, mode, way, error=cell)
                found[f"{family} {mode} {way}"] = asdict(cell)
                state = "right" if cell.right else "WRONG"
                print(
                    f"{family} {mode} {way}: {state} {cell.graphs}, {cell.breaks} "
                    f"({cell.torch_graphs}, {cell.torch_breaks}) {cell.seconds:.1f} s, warm {cell.ours_ms} ms "
                    f"(eager {cell.eager_ms}) {cell.error} {cell.why}",
                    flush=True,
                )
                write_json(options.json, found)


if __name__ == "__main__":
    main()
