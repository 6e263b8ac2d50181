"""Programs on disk: a hit computes what eager computes, any part of the key that changes is a miss, what has
no text is not kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs_cached
import pytest
import torch
import torch.nn.functional as F
from children import run_forked

import dynamotor
from bench.triton_interpret import available
from dynamotor.autograd import program_cache
from dynamotor.base.config import config
from dynamotor.base.events import collect, counters
from dynamotor.capture import siblings
from dynamotor.codegen import stored
from dynamotor.runtime import cpp_build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _no_programs(folder: Path) -> Iterator[None]:
    """Programs are kept only where no check reads the stages of their compilation."""
    before = config.snapshot()
    shutil.rmtree(folder / "program", ignore_errors=True)
    config.update(verify=False, check=False, cache_dir=str(folder))
    counters["cache"].clear()
    yield
    config.update(verify=before.verify, check=before.check, cache_dir=before.cache_dir)


def first_call(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, Any]:
    """The cache's answer to a new callable's first call ("hit", "miss", ...), and its result."""
    siblings.forget()
    before = counters["cache"].copy()
    result = dynamotor.compile(fn, **options)(*args)
    new = counters["cache"] - before
    return next(
        (what for what in ("not_kept", "hit", "damaged", "miss") if new[f"program.{what}"]), "nothing"
    ), result


def inference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(F.gelu(x @ w) + x.sum(1, keepdim=True), -1)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 8), torch.randn(8, 8)


@pytest.mark.parametrize("name", programs_cached.PROGRAMS)
def test_a_hit_computes_what_eager_computes(name: str) -> None:
    run = programs_cached.PROGRAMS[name]
    run(dynamotor.compile)
    missed = counters["cache"]["program.miss"]
    assert missed and not counters["cache"]["program.not_kept"]
    counters["cache"].clear()
    siblings.forget()  # where a sibling lives, a module's program is for any module
    run(dynamotor.compile)
    assert counters["cache"]["program.hit"] == missed and not counters["cache"]["program.miss"]


@pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "name", ["embedding", "written_inputs", "two_outputs_and_absent_gradients", "random_numbers"]
)
def test_a_hit_of_a_gpu_s_program_computes_what_eager_computes(name: str) -> None:
    with config.patch(target="triton", strict=True):
        test_a_hit_computes_what_eager_computes(name)


@pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
def test_a_program_of_another_gpu_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    with config.patch(target="triton", strict=True):
        assert first_call(inference, x, w)[0] == "miss"
        monkeypatch.setattr(stored, "gpu_of", lambda device: (device, "another", ""))
        torch.testing.assert_close(first_call(inference, x, w)[1], inference(x, w))
    assert counters["cache"]["program.incomplete"]


@pytest.mark.slow
def test_two_processes_compute_the_same() -> None:
    program = Path(programs_cached.__file__).read_text()
    env = {"DYNAMOTOR_CACHE_DIR": config.cache_dir, "DYNAMOTOR_VERIFY": "0"}
    done = [run_forked(program, **env) for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    first, second = (json.loads(one.stdout) for one in done)
    assert first["program.miss"] > 10 and not first.get("program.hit")
    assert second["program.hit"] == first["program.miss"] and not second.get("program.miss")


SETTINGS: dict[str, Callable[[], Any]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "exact": lambda: config.patch(exact=True),
    "no folding": lambda: config.patch(fold_constants=False),
    "no layout": lambda: config.patch(layout_opt=False),
    "vectors": lambda: config.patch(isa="avx2" if config.isa == "portable" else "portable"),
    "strict": lambda: config.patch(strict=True),
}


@pytest.mark.regression
def test_settings_of_precision_that_differ_by_library_are_part_of_the_key() -> None:
    """PyTorch refuses to name one precision for them."""
    x, w = tensors()
    try:
        torch.set_float32_matmul_precision("high")
        assert first_call(inference, x, w)[0] == "miss"
        torch.backends.cuda.matmul.allow_tf32 = False
        what, result = first_call(inference, x, w)
        assert what == "miss" and first_call(inference, x, w)[0] == "hit"
        torch.testing.assert_close(result, inference(x, w))
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_part_of_the_key(name: str) -> None:
    x, w = tensors()
    assert first_call(inference, x, w)[0] == "miss"
    with SETTINGS[name]():
        what, result = first_call(inference, x, w)
        close = {"rtol": 2e-2, "atol": 2e-2} if name == "autocast" else {}
        torch.testing.assert_close(result, inference(x, w), **close)
    assert what == "miss"
    assert first_call(inference, x, w)[0] == "hit"


@pytest.mark.parametrize("setting", ["deterministic", "precision", "onednn", "dtype", "threads"])
def test_a_setting_of_pytorch_is_part_of_the_key(setting: str) -> None:
    x, w = tensors()
    before = program_cache.torch_settings()
    undo = {
        "deterministic": lambda on: torch.use_deterministic_algorithms(on),
        "precision": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
        "onednn": lambda on: torch._C._set_mkldnn_enabled(not on),
        "dtype": lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        "threads": lambda on: torch.set_num_threads(2 if on else 1),
    }[setting]
    assert first_call(inference, x, w)[0] == "miss"
    undo(True)
    try:
        assert program_cache.torch_settings() != before
        assert first_call(inference, x, w)[0] == "miss"
    finally:
        undo(False)
    assert program_cache.torch_settings() == before


def test_an_input_s_metadata_is_part_of_the_key() -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    others = [
        (x.t(), w),
        (x.double(), w.double()),
        (torch.randn(9, 8), w),
        (x, x),
        (x.clone().requires_grad_(), w),
        (torch.randn(9, 8)[1:], w),
    ]
    assert first_call(inference, x, w)[0] == "miss"
    for args in others:
        what, result = first_call(inference, *args)
        assert what == "miss"
        torch.testing.assert_close(result, inference(*args))


def test_a_constant_of_the_program_is_part_of_the_key() -> None:
    def scaled(by: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.relu(x * by) + 1

    x = torch.arange(4)
    for by in (2, 2.0, 3, True, -0.0, 0.0, float("inf"), float("nan")):
        what, result = first_call(scaled(by), x)
        assert what == "miss", by
        torch.testing.assert_close(result, scaled(by)(x), equal_nan=True)
    one = scaled(5)
    assert [first_call(one, x)[0] for _ in range(2)] == ["miss", "hit"]


@pytest.mark.parametrize("part", range(len(stored.environment())))
def test_each_part_of_the_environment_is_part_of_the_key(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    now = stored.environment()
    assert first_call(inference, x, w)[0] == "miss"
    monkeypatch.setattr(stored, "environment", lambda: (*now[:part], now[part] + "!", *now[part + 1 :]))
    assert first_call(inference, x, w)[0] == "miss"


@pytest.mark.parametrize("name", ["m5.py", "prelude.h", "table.json"])
def test_the_package_s_text_is_part_of_the_environment(tmp_path: Path, name: str) -> None:
    assert stored.hash_of_package() in stored.environment()
    for file in [name, *(f"m{k}.py" for k in range(60))]:
        (tmp_path / file).write_text("a = 1\n")
    before = stored.hash_of_package(tmp_path)
    (tmp_path / name).write_text("a = 2\n")
    assert stored.hash_of_package(tmp_path) != before


@torch.library.custom_op("kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def with_custom_op(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.kept.twice(x) + 1


def with_constant(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 4.0])


@pytest.mark.parametrize("fn", [with_custom_op, with_constant])
def test_what_has_no_exact_text_is_not_kept(fn: Callable[..., Any]) -> None:
    with collect("not kept") as events:
        assert first_call(fn, torch.randn(3))[0] == "not_kept"
    assert events[0].data["reason"]
    assert first_call(fn, torch.randn(3))[0] != "hit"


@pytest.mark.parametrize(
    "argument", [torch.Generator(), object(), torch.nn.Identity(), torch.ones(1), os.environ]
)
def test_an_argument_without_exact_text_has_no_key(argument: Any) -> None:
    with pytest.raises(program_cache.NotPlain):
        program_cache.encode((3, {"generator": argument}))


def test_a_replaced_function_of_pytorch_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    @functools.wraps(F.gelu)
    def other(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(program_cache.NotPlain):
        program_cache.function_name(other)
    monkeypatch.setattr(F, "relu6", functools.wraps(F.relu6)(lambda x: x + 1))
    with pytest.raises(program_cache.NotPlain):
        program_cache.function_name(F.relu6)


def test_a_damaged_entry_is_compiled_again() -> None:
    x, w = tensors()
    expected = inference(x, w)
    assert first_call(inference, x, w)[0] == "miss"
    entries = [path for path in Path(config.cache_dir, "program").rglob("*") if path.is_file()]
    whole = entries[0].read_bytes()
    for wrong in (whole[:-5], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b"", whole[:20]):
        entries[0].write_bytes(wrong)
        what, result = first_call(inference, x, w)
        assert what == "damaged"
        torch.testing.assert_close(result, expected)
    assert first_call(inference, x, w)[0] == "hit"


def test_an_entry_without_its_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    assert first_call(inference, x, w)[0] == "miss"
    monkeypatch.setattr(cpp_build, "stored_library", lambda key: None)
    torch.testing.assert_close(first_call(inference, x, w)[1], inference(x, w))
    assert counters["cache"]["program.incomplete"]


def test_what_was_left_to_aten_is_told_again() -> None:
    x = torch.randn(4, 4)
    told = []
    for _ in range(2):
        counters["fallback"].clear()
        with collect("fallback") as events:
            first_call(left_to_aten, x)
        told.append((dict(counters["fallback"]), [event.data["op"] for event in events]))
    assert told[0] == told[1] and told[0][1]


def left_to_aten(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_exp(x) + 1


@pytest.mark.parametrize("setting", ["verify", "check"])
def test_checked_compilations_are_whole(setting: str) -> None:
    x, w = tensors()
    assert first_call(inference, x, w)[0] == "miss"
    with config.patch(**{setting: True}):
        assert first_call(inference, x, w)[0] == "nothing"


def test_a_listener_of_the_stages_sees_them() -> None:
    x, w = tensors()
    first_call(inference, x, w)
    with collect() as events:
        first_call(inference, x, w)
    assert {"aten_graph", "code"} <= {event.kind for event in events}
