"""Functions that are made of pieces: their values and gradients where two pieces meet, which random numbers
never hit. `hardswish` had other gradients than eager's at -3 and 3.
"""

import pytest
import torch
from piecewise import check

pytestmark = pytest.mark.regression


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_pieces_meet_as_in_eager(dtype):
    check("native", dtype)
