"""What counts as an error of a gradient."""

import pytest
import torch

from bench.numerics import gradient_error


def test_each_gradient_counts_by_its_own_size():
    wanted = {"weight": torch.tensor([1.0, -2.0]), "small": torch.tensor([1e-4])}
    assert gradient_error(
        {"weight": torch.tensor([1.0, -2.0]), "small": torch.tensor([2e-4])}, wanted
    ) == pytest.approx(1.0)


def test_one_that_is_zero_in_float64_counts_by_the_largest():
    wanted = {"weight": torch.tensor([2.0]).double(), "key.bias": torch.tensor([1e-17]).double()}
    found = {"weight": torch.tensor([2.0]), "key.bias": torch.tensor([2e-8])}
    assert gradient_error(found, wanted) == pytest.approx(1e-8)
    assert gradient_error({**found, "key.bias": torch.tensor([0.2])}, wanted) == pytest.approx(0.1)
    assert gradient_error(found, {"weight": torch.zeros(1), "key.bias": torch.zeros(1)}) == pytest.approx(2.0)


def test_other_names_shapes_and_numbers_that_are_none():
    wanted = {"weight": torch.ones(2)}
    for found in ({}, {"weight": torch.ones(3)}, {"weight": torch.tensor([1.0, float("nan")])}):
        assert gradient_error(found, wanted) == float("inf")
    assert gradient_error({"none": torch.ones(0)}, {"none": torch.ones(0)}) == 0.0
