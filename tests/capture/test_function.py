"""Functions and closures of the program."""

import pytest
import torch

import dynamotor


@pytest.mark.regression
def test_a_name_that_a_closure_keeps_is_deleted_once():
    def twice(x, n=2):
        for _ in range(3):

            def inner():
                return n  # noqa: F821

            del n
        return inner

    with pytest.raises(UnboundLocalError, match="'n'"):
        dynamotor.compile(twice, backend="eager")(torch.ones(1))
