"""A package gives the model's results, without the model; calls that do not fit it are refused with a code."""

from __future__ import annotations

import json
import platform
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_forked
from wrapper_classes import Quantised

import dynamotor
from dynamotor import BuildError, UsageError
from dynamotor.__main__ import main
from dynamotor.base.config import config
from dynamotor.codegen import stored


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with config.patch(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


class Net(torch.nn.Module):
    """Folded weights, a weight seen twice, a buffer, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 8)
        self.again = self.head
        self.register_buffer("mask", torch.tensor([True, False] * 4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = self.conv(x).mean((2, 3)) * scale
        z = self.again(self.head(y)).masked_fill(self.mask, 0)
        return {"y": y, "parts": (z, [z.sum(), 3])}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, _own_cache: None) -> tuple[Path, torch.Tensor, Any]:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 9, 9)
    path = tmp_path_factory.mktemp("package") / "net.dm"
    dynamotor.export(model, (x,), {"scale": 0.5}).package(path)
    with torch.no_grad():
        return path, x, model(x, scale=0.5)


def test_it_gives_what_the_model_gave(packed: Any) -> None:
    path, x, expected = packed
    found = dynamotor.load(path)
    torch.testing.assert_close(found(x, scale=0.5), expected)
    assert list(found(x, scale=0.5)) == ["y", "parts"] and type(found(x, scale=0.5)["parts"][1]) is list


def test_a_process_without_compiler_model_or_cache_runs_it(packed: Any, tmp_path: Path) -> None:
    path, x, expected = packed
    torch.save((x, expected), tmp_path / "x.pt")
    program = (
        "import sys, torch, dynamotor; x, expected = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(dynamotor.load(sys.argv[1])(x, scale=0.5), expected)\n"
        "assert not dynamotor.counters['build'] and not dynamotor.counters['frames']"
    )
    nothing = {"PATH": "/nowhere", "DYNAMOTOR_CACHE_DIR": str(tmp_path / "none")}
    done = run_forked(program, str(path), str(tmp_path / "x.pt"), **nothing)
    assert done.returncode == 0, done.stderr


def test_other_arguments_are_refused(packed: Any) -> None:
    path, x, _ = packed
    found = dynamotor.load(path)
    wrong: list[tuple[tuple, dict]] = [
        ((x,), {}),
        ((x,), {"scale": 1.0}),
        ((x[:1],), {"scale": 0.5}),
        ((x.double(),), {"scale": 0.5}),
        ((x.to(memory_format=torch.channels_last),), {"scale": 0.5}),
        ((x.clone().requires_grad_(),), {"scale": 0.5}),
        ((torch.nn.Parameter(x, requires_grad=False),), {"scale": 0.5}),
        ((1,), {"scale": 0.5}),
        ((x, x), {"scale": 0.5}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(UsageError, match="DM115"):
            found(*args, **kwargs)


def rewritten(path: Path, target: Path, change: Any) -> Path:
    """The package with another program or library."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return target


@pytest.mark.parametrize(
    "part", ["Python", "machine", "torch", "torch's revision", "dynamotor", "processor", "vectors"]
)
def test_another_machine_or_version_is_refused(packed: Any, tmp_path: Path, part: str) -> None:
    def change(name: str, data: bytes) -> bytes:
        if name != "program.json":
            return data
        program = json.loads(data)
        program["environment"][part] += " of another kind"
        return json.dumps(program).encode()

    with pytest.raises(BuildError, match=f"(?s)DM308.*another {part}"):
        dynamotor.load(rewritten(packed[0], tmp_path / "other.dm", change))


def test_another_kernel_of_the_system_is_none(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = platform.uname()
    monkeypatch.setattr(platform, "uname", lambda: known._replace(release="another"))
    stored._versions.cache_clear()
    try:
        dynamotor.load(packed[0])
    finally:
        stored._versions.cache_clear()


def test_a_damaged_package_is_refused(packed: Any, tmp_path: Path) -> None:
    path = packed[0]
    data = path.read_bytes()
    cut = tmp_path / "cut.dm"
    for wrong in (b"", b"nothing", data[: len(data) // 2]):
        cut.write_bytes(wrong)
        with pytest.raises(UsageError, match="DM116"):
            dynamotor.load(cut)
    for kind in (".so", ".safetensors"):
        shorter = rewritten(
            path,
            tmp_path / f"short{kind}.dm",
            lambda name, data, kind=kind: data[:-9] if name.endswith(kind) else data,
        )
        with pytest.raises(UsageError, match="DM116"):
            dynamotor.load(shorter)


class Other:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("model", [lambda x: Other(x + 1), lambda x: x + torch.tensor([1.0, 2.0])])
def test_what_a_file_cannot_hold_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="DM114"):
        dynamotor.export(model, (torch.randn(3, 2),)).package(tmp_path / "refused.dm")


def test_the_command_lists_what_is_inside(
    packed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["package", "inspect", str(packed[0])]) == 0
    text = capsys.readouterr().out
    assert "weights.safetensors" in text and ".so" in text and "float32[2, 3, 9, 9]" in text
    assert main(["package", "inspect", str(tmp_path / "none")]) == 2


class Weighed(torch.nn.Module):
    """A weight of a wrapper subclass."""

    def __init__(self) -> None:
        super().__init__()
        weight = Quantised.of(torch.randn(6, 6))
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight).relu()


def test_weights_of_wrapper_subclasses_are_those_inside(tmp_path: Path) -> None:
    model, x = Weighed().eval(), torch.randn(4, 6)
    program = dynamotor.export(model, x)
    assert [place.target for place in program.graph_signature.inputs[:3]] == [
        "x",
        "weight.values_",
        "weight.scale",
    ]
    program.package(tmp_path / "weighed.dm")
    torch.testing.assert_close(dynamotor.load(tmp_path / "weighed.dm")(x), model(x))
    torch.testing.assert_close(program.exported_program().module()(x), model(x))


def test_an_argument_of_a_wrapper_subclass_is_refused(tmp_path: Path) -> None:
    x = Quantised.of(torch.randn(4, 6))
    with pytest.raises(UsageError, match="DM114.*an argument that is a Quantised"):
        dynamotor.export(lambda x: torch.nn.functional.linear(torch.ones(2, 6), x), (x,)).package(
            tmp_path / "x"
        )


@pytest.mark.regression
@pytest.mark.parametrize("least", [None, 3])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_dimension_without_a_largest_size(tmp_path: Path, least: int | None, is_read: bool) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if is_read else y * 2

    path, x, y = tmp_path / "fn.dm", torch.randn(5, 3), torch.randn(3)
    shapes = {"x": {0: torch.export.Dim("rows", min=least)}, "y": None}
    dynamotor.export(fn, (x, y), dynamic_shapes=shapes).package(path)
    loaded = dynamotor.load(path)
    for n in (3, 5, 4096):
        x = torch.randn(n, 3)
        torch.testing.assert_close(loaded(x, y), fn(x, y))
    if least:
        with pytest.raises(UsageError, match="DM115"):
            loaded(torch.randn(2, 3), y)
