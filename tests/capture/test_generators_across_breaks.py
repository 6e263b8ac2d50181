"""A generator that has not started when the graph breaks is made again by its call: `with` blocks go on
captured.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dynamotor

log = []


@contextlib.contextmanager
def region(a, *rest, k=1, **more):
    print(end="")
    log.append((a, rest, k, sorted(more.items())))
    try:
        yield a + k
    finally:
        log.append("out")
        print(end="")


def in_a_region(x):
    with region(1, 2, 3, k=4, z=5) as v:
        y = (x * v).sin()
    return y + 1


def steps(n, scale=2):
    for i in range(n):
        yield i * scale


def made_before_a_break(x):
    made = steps(3)
    print(end="")
    for i in made:
        x = x + i
    return x


def attention(x):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def check(function, x):
    log.clear()
    expected = function(x)
    once = list(log)
    compiled = dynamotor.compile(function)
    for _ in range(2):
        log.clear()
        torch.testing.assert_close(compiled(x), expected)
        assert log == once
    return dynamotor.explain(function)(x).graph_count


def test_a_region_whose_entry_breaks():
    assert check(in_a_region, torch.randn(3)) == 2


def test_a_generator_made_before_a_break():
    check(made_before_a_break, torch.randn(3))


def test_the_choice_of_attention_kernels():
    assert check(attention, torch.randn(1, 2, 4, 8)) == 1
