"""Continuous batching of transformers: requests come and go, and each step has as many tokens as are there."""

import copy

import pytest
import torch

import dynamotor
from bench import torchvision_stub
from bench.llm_rows import SMALL, model_of
from dynamotor.base.events import counters

transformers = pytest.importorskip("transformers")
torchvision_stub.prepare()


def generated(model, lengths, count):
    """The tokens that requests of these lengths get, in their order."""
    prompts = [
        torch.randint(1, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths
    ]
    settings = transformers.GenerationConfig(
        max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
    found = model.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=pages, progress_bar=False
    )
    assert len(found) == len(prompts)
    return [one.generated_tokens for one in found.values()]


@pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"), reason="this transformers has no such batching"
)
def test_requests_get_eagers_tokens_and_later_steps_capture_nothing():
    """transformers turns compilation off in the update of its cache, so each layer's graph is cut there."""
    torch.manual_seed(0)
    _, model = model_of("llama-125m", 512, SMALL)
    model = model.eval()
    model.config.use_cache = True
    plain = copy.deepcopy(model)
    model.forward = dynamotor.compile(model.forward)
    raised = counters["frames"]["graph raised"]
    for n, (lengths, count) in enumerate(
        [((5, 9, 17, 3, 12), 12), ((4, 21, 8), 20), ((30, 2), 9), ((7, 7, 7, 7), 5)]
    ):
        before = counters["frames"]["captured"]
        assert generated(model, lengths, count) == generated(plain, lengths, count)
        assert n < 2 or counters["frames"]["captured"] == before, lengths
    assert before and counters["frames"]["graph raised"] == raised
