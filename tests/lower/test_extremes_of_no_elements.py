"""An extreme of no elements whose values were unread was left out as dead code: eager raises."""

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

EXTREMES = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max along": lambda x: x.max(0)[0],
    "min along": lambda x: x.min(0)[1],
    "median along": lambda x: x.median(0)[0],
    "nanmedian along": lambda x: x.nanmedian(0)[0],
    "mode along": lambda x: x.mode(0)[0],
    "amax": lambda x: x.amax(0),
    "argmin": lambda x: x.argmin(0),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_eager_raises(name, backend):
    dynamotor.reset()
    fn = lambda x: torch.zeros_like(EXTREMES[name](x))  # noqa: E731
    compiled = dynamotor.compile(fn, backend=backend)
    for rows in (4, 0, 5, 0):
        x = torch.ones(rows, 3)
        if rows:
            assert torch.equal(compiled(x), fn(x))
        else:
            with pytest.raises((RuntimeError, IndexError)) as wanted:
                fn(x)
            with pytest.raises(wanted.type):
                compiled(x)
    x = torch.ones(0, 3)
    for along in (torch.max, torch.median, torch.mode):  # each row has elements: there are no rows
        assert dynamotor.compile(along, backend=backend)(x, 1)[0].shape == (0,)
