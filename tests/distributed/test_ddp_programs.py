"""Training loops as people write them give eager DDP's gradients, and ranks that agree to the last bit."""

from __future__ import annotations

import pytest
from ddp_programs import PROGRAMS, differences
from ranks import Pair

LOOSE = {"power_sgd": 1e-6}  # float32; buckets may hold their parameters in another order
WAYS = (
    ("inside", "aot_eager", "auto"),
    ("outside", "aot_eager", "split"),
)  # beside compile(DDP(model)); in turns
IN_CPP = (
    "accumulation_in_odd_orders",
    "generator_and_critic",
    "one_parameter_in_two_modules",
    "evaluation_mode_between",
    "gradients_that_somebody_keeps",
    "accumulation_with_bucket_views",
    "sparse_gradients",
    "weights_loaded_on_the_way",
)


def check(results: list[dict], tolerance: float) -> None:
    for result in results:
        assert result["eager same"], "the program asks for more than eager DDP does"
        assert result["worst"] <= tolerance and result["same"], result


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_in_eager(pair: Pair, name: str) -> None:
    for way in (("outside", "aot_eager", "auto"), WAYS[list(PROGRAMS).index(name) % 2]):
        check(pair.run(differences, name, *way), LOOSE.get(name, 1e-12))


@pytest.mark.parametrize("name", IN_CPP)
def test_a_program_trains_as_in_eager_with_kernels_of_ours(pair: Pair, name: str) -> None:
    check(pair.run(differences, name, "outside", "native"), 1e-9)
