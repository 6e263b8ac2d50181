"""Results of a graph are in memory of their own, as eager's are."""

import pytest
import torch

import dynamotor


def a_window_beside_the_whole(x):
    whole = torch.zeros_like(x)
    window = whole.as_strided((4,), (1,), 5)
    window.index_fill_(0, torch.tensor([3]), 1)
    return torch.empty_like(window).copy_(window), whole


def the_whole_before_the_window(x):
    window, whole = a_window_beside_the_whole(x)
    return whole, window


def a_view_of_a_result(x):
    whole = x * 2
    return whole, whole[2:6]


@pytest.mark.parametrize(
    "function, shared",
    [(a_window_beside_the_whole, False), (the_whole_before_the_window, False), (a_view_of_a_result, True)],
)
def test_results_share_memory_where_eager_s_do(function, shared):
    x = torch.randn(10)
    found, want = dynamotor.compile(function)(x), function(x)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
    first, second = (result.untyped_storage().data_ptr() for result in found)
    assert (first == second) is shared
