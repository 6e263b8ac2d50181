"""Which runs over several devices count as right beside one device's."""

import pytest

from bench.xla_scaling import compared


def first(losses=(3.0, 2.0), programs=(1, 2, 2), devices=2):
    return {"losses": list(losses), "programs": list(programs), "devices": devices}


def test_equal_losses_on_all_devices_are_right():
    assert compared(first(), first(devices=1), 2, "float32") == {"right": True, "difference": 0.0}


@pytest.mark.parametrize(
    "wrong", [{"losses": (3.0, 2.001)}, {"programs": (1, 2, 3)}, {"devices": 1}], ids=str
)
def test_one_difference_makes_a_run_wrong(wrong):
    assert not compared(first(**wrong), first(devices=1), 2, "float32")["right"]


def test_bfloat16_has_the_tolerance_of_its_own_rounding():
    assert compared(first(losses=(3.0, 2.001)), first(devices=1), 2, "bfloat16")["right"]
