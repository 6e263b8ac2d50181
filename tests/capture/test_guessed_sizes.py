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
