"""The tests of the lowerings again, their kernels written in Triton and run in its interpreter on CPU
tensors.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from harness import check
from test_activations import *  # noqa: E402, F403
from test_index import *  # noqa: E402, F403
from test_ops_loss import *  # noqa: E402, F403
from test_pointwise import *  # noqa: E402, F403
from test_pointwise_functions import LEFT, OPS, operands, test_bessel_functions_are_as_in_eager  # noqa: E402, F401
from test_pool import *  # noqa: E402, F403
from test_random import *  # noqa: E402, F403
from test_reduce import *  # noqa: E402, F403
from test_scans import *  # noqa: E402, F403
from test_scatter import *  # noqa: E402, F403
from test_upsample import *  # noqa: E402, F403
from test_view import *  # noqa: E402, F403

from bench.triton_interpret import available
from dynamotor.base.config import config

pytestmark = [
    pytest.mark.sweep(8),
    pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def _in_triton():
    with config.patch(target="triton"):
        yield


@pytest.mark.parametrize("op", [op for op in OPS if op not in LEFT])
def test_rare_functions_are_as_in_eager(op):
    check(OPS[op], *operands(torch.float32))
