"""Sizes as arguments of kernels: built once for further shapes."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.events import collect

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
R = torch.randn


def kernels_of(call, x):
    with collect("code") as events:
        call(x).sum().backward()
    return {name for e in events for name in e.data["kernels"]}


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_further_shapes_of_a_callable_build_nothing(dynamic):
    def fn(x):
        return torch.nn.functional.gelu(x) * torch.softmax(x, -1)

    call, seen, new = dynamotor.compile(fn, dynamic=dynamic, options={"target": "triton"}), set(), []
    for columns in (34, 42, 50, 58):
        found = kernels_of(call, R(32, columns, requires_grad=True))
        new.append(len(found - seen))
        seen |= found
    assert (
        new[0]
        and [bool(n) for n in new[1:]]
        == {None: [True, False, False], True: [False] * 3, False: [True] * 3}[dynamic]
    )


def test_a_callable_of_one_shape_keeps_literals():
    with collect("code") as events:
        for _ in range(3):
            dynamotor.compile(lambda x: x.exp() + 1, options={"target": "triton"})(R(100, 30))
            dynamotor.reset()  # functions of one code share programs
    assert len(events) == 3 and all("n0" not in e.data["triton"].split("def dm_")[1] for e in events)
