"""What one process found and built is one file, which another cache takes whole or not at all."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dynamotor
from dynamotor import UsageError, load_cache_artifacts, save_cache_artifacts
from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.events import counters


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache, "used", set())
    counters.clear()
    with config.patch(cache_dir=str(tmp_path / "one"), verify=False, check=False):
        yield


def key(n: int) -> str:
    return cache.digest(str(n))


def test_a_program_moves_to_another_cache(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu().sum(0)

    x = torch.randn(7, 5, requires_grad=True)
    dynamotor.compile(f)(x).sum().backward()
    data = save_cache_artifacts()
    with config.patch(cache_dir=str(tmp_path / "two")):
        dynamotor.compile(lambda x: x + 1)(torch.ones(2))  # an empty cache
        counters["cache"].clear()
        assert load_cache_artifacts(data) >= 3  # forward, backward, a library
        x.grad = None
        result = dynamotor.compile(f)(x)
        result.sum().backward()
        assert counters["cache"]["program.hit"] == 2 and not counters["cache"]["program.miss"]
        torch.testing.assert_close(result, f(x))
        torch.testing.assert_close(x.grad, torch.autograd.grad(f(x).sum(), x)[0])


def test_damaged_artifacts_are_refused_whole(tmp_path: Path) -> None:
    for n in range(3):
        cache.store("program", key(n), bytes(5000))
    data = save_cache_artifacts()
    others = [b"", b"nothing", data[:-30], data[:100] + bytes([data[100] ^ 255]) + data[101:]]
    for name in ("../../../etc", "program/x"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(
                "index.json", f'{{"format": "dynamotor-cache-1", "entries": [["program", "{name}", "00"]]}}'
            )
        others.append(file.getvalue())
    with config.patch(cache_dir=str(tmp_path / "two")):
        for wrong in others:
            with pytest.raises(UsageError, match="DM113"):
                load_cache_artifacts(wrong)
        assert not list(cache.entries())
        assert load_cache_artifacts(data) == 3 and cache.load("program", key(1)) == bytes(5000)
