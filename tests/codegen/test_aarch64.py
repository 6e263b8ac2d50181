"""Generated C++ compiles for aarch64, with NEON and with SVE: by a cross compiler (Debian's g++-aarch64-linux-gnu) where there is one."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from aten_graphs import aten_graph

from dynamotor.base.config import config
from dynamotor.codegen import compile_aten, cpp_kernel
from dynamotor.graph.spec import GraphInfo
from dynamotor.runtime import cpp_build

CROSS = shutil.which("aarch64-linux-gnu-g++")
pytestmark = pytest.mark.skipif(CROSS is None, reason="no cross compiler for aarch64")


def rows(x, y):
    return torch.softmax(x * y, -1), torch.layer_norm(x, (50,)), x.argmax(1), x.var(1), (x > y).any(1)


def columns(x, y):
    return x.sum(0), x.amax(0), x.double().mean(0), x.half().sum(0), (x * 10).long().sum(0)


def types(x, y):
    return (
        (x * x).bfloat16(),
        x.half() * 2,
        (x * 100).to(torch.int8) + 3,
        x.to(torch.int64) % 7,
        x.bool() ^ (y > 0),
    )


def functions(x, y):
    return (
        torch.erf(x),
        torch.sin(x).tanh(),
        x.double().exp().log1p(),
        torch.pow(x.abs(), y),
        torch.nn.functional.gelu(x),
    )


def places(x, y):
    index = (y.abs() * 10).long() % 20
    return (
        x.t().contiguous(),
        x[index],
        x.cumsum(1),
        torch.zeros(20, 50).index_add(0, index, x[index]),
        x.flip(1),
    )


def pictures(x, y):
    image = (x * 2).reshape(1, 4, 10, 25)
    scaled = torch.nn.functional.interpolate(image, scale_factor=2.0, mode="bilinear")
    return scaled.relu(), torch.nn.functional.max_pool2d(image, 2) + 1, torch.rand_like(x) * x


@pytest.mark.parametrize("isa", ["neon", "sve"])
@pytest.mark.parametrize(
    "fn", [rows, columns, types, functions, places, pictures], ids=lambda fn: fn.__name__
)
def test_generated_code_compiles(isa, fn, monkeypatch, tmp_path):
    units: list[tuple[str, tuple[str, ...]]] = []
    build, march = cpp_build.start_build, cpp_kernel.ISAS[isa].flags

    def record(source, flags):
        """Built for this machine as well, so that the program runs here."""
        units.append((source, flags))
        return build(source, [flag for flag in flags if flag not in march])

    monkeypatch.setattr(cpp_build, "start_build", record)
    monkeypatch.setattr(cpp_kernel, "processor_features", lambda: {"asimd", "sve"})
    x, y = torch.randn(20, 50), torch.randn(50)
    with config.patch(isa=isa):
        call = compile_aten(aten_graph(fn, x, y), GraphInfo("inference", "test"))
    call(x, y)
    assert units
    for source, flags in units:
        (tmp_path / "unit.cpp").write_text(source)
        command = [CROSS, tmp_path / "unit.cpp", "-o", tmp_path / "unit.so", *cpp_build.BASE_FLAGS, *flags]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr
