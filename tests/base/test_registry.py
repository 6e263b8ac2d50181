"""Registries and deferred functions of base/registry.py."""

from __future__ import annotations

import pytest

from dynamotor.base.registry import Deferred


def test_a_deferred_function_calls_its_definition_and_takes_no_second_one():
    double = Deferred[[int], int]("double")
    with pytest.raises(NotImplementedError, match="double is not defined"):
        double(1)
    double.define(lambda n: 2 * n)
    assert double(2) == 4
    with pytest.raises(KeyError, match="twice"):
        double.define(lambda n: n)
