"""The op `dynamotor::attend`: its reference, and the rule for its result."""

import pytest
import torch
import torch.nn.functional as F

from dynamotor.graph import attend_op
from dynamotor.graph.attend_op import attend
from dynamotor.graph.op_definition import Unknown
from dynamotor.graph.spec import TensorSpec

QUERY, KEY = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8)
MASK = torch.zeros(1, 1, 1, 9)
STRIDE = (96, 8, 24, 1)


def test_the_op_is_attention_in_the_layout_that_is_asked_for():
    found = torch.ops.dynamotor.attend(QUERY, KEY, KEY, MASK, 0.5, STRIDE)
    assert found.stride() == STRIDE
    torch.testing.assert_close(found, F.scaled_dot_product_attention(QUERY, KEY, KEY, scale=0.5))
    out = torch.empty_strided(found.shape, STRIDE)
    torch.ops.dynamotor.attend.out(QUERY, KEY, KEY, MASK, 0.5, STRIDE, out=out)
    assert torch.equal(out, found) and torch.equal(attend(QUERY, KEY, KEY, MASK, 0.5, STRIDE), found)


def test_the_rule_foretells_the_result():
    specs = [TensorSpec.of(t) for t in (QUERY, KEY, KEY, MASK)]
    found = torch.ops.dynamotor.attend(QUERY, KEY, KEY, MASK, 0.5, STRIDE)
    assert attend_op._attend_layout(*specs, 0.5, STRIDE) == TensorSpec.of(found)


def test_a_mask_of_other_keys_is_not_known():
    specs = [TensorSpec.of(t) for t in (QUERY, KEY, KEY, MASK[..., :5])]
    with pytest.raises(Unknown):
        attend_op._attend_layout(*specs, 0.5, STRIDE)
