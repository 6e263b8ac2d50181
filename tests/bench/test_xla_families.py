"""Which findings of a way to train are right beside the CPU's."""

import numpy as np
import pytest
import torch

from bench.xla_families import Float64, judged, row_of


def found(gradient=1.0, losses=(3.0, 2.0, 1.0), programs=(1, 2, 2), devices=1):
    means = {"grad large": np.array([100.0], np.float32), "grad small": np.array([gradient], np.float32)}
    return {"losses": list(losses), "programs": list(programs), "devices": devices, "means": means}


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient": 1.001},
        {"losses": (3.0, 2.0, 1.00001)},
        {"losses": (3.0, float("nan"), 1.0)},
        {"programs": (1, 2, 3)},
        {"devices": 4},
    ],
    ids=str,
)
def test_one_difference_makes_a_way_wrong(wrong):
    assert judged(found(), [found()], found(), 1)["right"]
    assert not judged(found(**wrong), [found()], found(), 1)["right"]


def test_the_cpu_s_own_error_is_the_measure():
    assert judged(found(gradient=1.003), [found(), found(gradient=0.999)], found(), 1)["right"]
    assert not judged(found(gradient=1.005), [found(), found(gradient=0.999)], found(), 1)["right"]


def test_a_way_that_is_right_in_float64_alone_differs_by_rounding():
    far, exact = found(gradient=1.1), found()
    row = row_of(lambda dtype, seed: found(), lambda *dtype: exact if dtype else far, [found()], exact, 1)
    assert row["right"] and row["float64"] == 0 and row["gradient"]["error"] == pytest.approx(0.1)
    assert not row_of(lambda dtype, seed: found(), lambda *dtype: far, [found()], exact, 1)["right"]
    assert not row_of(None, lambda *dtype: "an error", [found()], exact, 1)["right"]


def test_the_reference_has_float64_where_models_ask_for_float32():
    x = torch.ones(2, dtype=torch.float64)
    with Float64():
        made = [
            x.float(),
            x.to(torch.float32),
            x.softmax(0, dtype=torch.float32),
            torch.ones(2, dtype=torch.float32),
        ]
    assert {each.dtype for each in made} == {torch.float64}
