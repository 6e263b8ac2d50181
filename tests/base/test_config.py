"""Settings by name: the error for a misspelt one."""

import pytest

import dynamotor
from dynamotor.base.config import CompileOptions, did_you_mean


def test_a_misspelt_name_is_answered_with_the_nearest_one():
    with pytest.raises(AttributeError, match="no field 'chek'; did you mean 'check'"):
        dynamotor.config.chek = True
    with pytest.raises(dynamotor.UsageError, match="unknown option 'chek'; did you mean 'check'"):
        dynamotor.compile(abs, options={"chek": True})
    with pytest.raises(
        dynamotor.UsageError, match="unknown mode 'reduce_overhead'; did you mean 'reduce-overhead'"
    ):
        CompileOptions(mode="reduce_overhead")


def test_a_name_like_no_other_has_no_suggestion():
    assert did_you_mean("zzzz", ["check", "strict"]) == ""
