"""Which sizes become symbols beside one that differed between calls."""

import pytest
import torch

import dynamotor


@pytest.mark.parametrize(("mode", "programs"), [(None, 2), ("reduce-overhead", 3)])
def test_modes_that_record_calls_guess_no_sizes(mode, programs):
    """A batch that has not varied stays a number: a program of any batch has a recording for each."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    backend.takes_symbols = True
    compiled = dynamotor.compile(lambda ids: ids + 1, backend=backend, mode=mode)
    for batch, length in ((3, 5), (3, 6), (3, 7), (4, 7)):
        compiled(torch.ones(batch, length, dtype=torch.int64))
    assert len(graphs) == programs


def test_a_cache_that_followed_the_prompt_stays_of_any_length_for_another_batch():
    """The second batch's cache is as long as a prompt whose length was a symbol: no number to compare with."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    backend.takes_symbols = True

    def step(ids, cache):
        new = ids.float().unsqueeze(-1).expand(-1, -1, 4)
        cache["keys"] = torch.cat([cache["keys"], new], 1) if "keys" in cache else new.clone()
        return cache["keys"].sum(1)

    compiled = dynamotor.compile(step, backend=backend)
    for batch, length in ((3, 7), (6, 10), (6, 13)):
        cache, plain = {}, {}
        for n in (length, 1, 1, 1):
            ids = torch.arange(batch * n).view(batch, n)
            torch.testing.assert_close(compiled(ids, cache), step(ids, plain))
    assert len(graphs) == 4, "prompt and step, each for three rows and for more"
