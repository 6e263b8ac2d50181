"""Global state of PyTorch is as in eager inside, around and between calls with regions, which end by
themselves, by a return, an error or by hand, or have a graph break in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor

A = torch.linspace(-1, 1, 6).reshape(2, 3)

REGIONS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "inference_mode off": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "device": lambda: torch.device("cpu"),
    "device meta": lambda: torch.device("meta"),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "disable_saved_tensors_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view_replay": lambda: torch.autograd._force_original_view_tracking(True),
    "allow_mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "forward_ad": torch.autograd.forward_ad.dual_level,
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True),
    "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "record_function": lambda: torch.profiler.record_function("here"),
    "fork_rng": lambda: torch.random.fork_rng(devices=[]),
    "functions off": torch._C.DisableTorchFunction,
    "subclasses off": torch._C.DisableTorchFunctionSubclass,
    "dtype": lambda: set_and_back(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: set_and_back(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "precision": lambda: set_and_back(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "warn_always": lambda: set_and_back(torch.is_warn_always_enabled, torch.set_warn_always, True),
}


@contextlib.contextmanager
def set_and_back(ask: Callable[[], Any], tell: Callable[[Any], None], value: Any) -> Any:
    before = ask()
    tell(value)
    try:
        yield
    finally:
        tell(before)


def state() -> dict[str, Any]:
    """What regions set."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")],
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "no hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "anomaly": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "threads": torch._C._is_multithreading_enabled(),
        "views": torch._C._is_view_replay_enabled(),
        "level": torch.autograd.forward_ad._current_level,
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": [getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")],
        "sdpa": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "functions": [torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()],
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "warn_always": torch.is_warn_always_enabled(),
    }


def ends(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    with region():
        y = x * 2 + torch.ones(3)
    return y, x + torch.ones(3)


def returns(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    for _ in range(2):
        with region():
            return x @ x.t()


def breaks(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    with region():
        y = x * 2
        seen.append(state() | {"sum": float(A.sum())})
        print(end="")  # a break
        y = y + torch.zeros(3)
    return y * 3


def raises(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    try:
        with region():
            seen.append(x.dtype)
            raise KeyError("here")
    except KeyError:
        return x + 1, torch.ones(2)


def lets_out(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    with region():
        y = x * 2
        return y.view(5)


def yields(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    def parts() -> Any:
        with region():
            yield x * 2
            yield x + torch.ones(3)

    steps = parts()
    first = next(steps)
    middle = torch.ones(2) + 1
    steps.close()
    return first, middle, x - 1


def by_hand(x: torch.Tensor, region: Any, seen: list[Any]) -> Any:
    held = region()
    held.__enter__()
    y = x * 2
    held.__exit__(None, None, None)
    return y, x * 3


def facts(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        values = None if result.is_meta else result.detach().tolist()
        return result.dtype, result.device, result.requires_grad, result.is_inference(), values
    return [facts(one) for one in result] if isinstance(result, list | tuple) else result


def told(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return facts(call(*args))
    except (RuntimeError, KeyError, AssertionError, ValueError) as error:
        return type(error)


def story(function: Any, region: Any, call: Any) -> list[Any]:
    """Between, inside and around: results and the state behind each call."""
    said: list[Any] = []
    x = A.clone().requires_grad_()
    for around in (contextlib.nullcontext, region, contextlib.nullcontext):
        seen: list[Any] = []
        with around():
            said += [told(call, x, region, seen), seen, state()]
        said += [state(), torch.rand(1).item()]
    return said


PROGRAMS = [ends, returns, breaks, raises, lets_out, yields, by_hand]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_what_is_global_is_as_in_eager(function: Any) -> None:
    for name, region in REGIONS.items():
        before = state()
        torch.manual_seed(1)
        expected = story(function, region, function)
        torch.manual_seed(1)
        assert story(function, region, dynamotor.compile(function, backend="aot_eager")) == expected, name
        assert state() == before, name
