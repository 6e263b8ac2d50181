"""Packages run without Python: the C++ loader gives what Python gives, or says why it does not."""

from __future__ import annotations

import copy
import ctypes
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import PROMPTS, Cached, Llama, compared, decoded, examples, programs_of
from torch.utils import _pytree as pytree

import dynamotor
from dynamotor.base.config import config
from dynamotor.runtime.cpp_build import find_compiler
from dynamotor.tools import package
from dynamotor.tools.package_program import DTYPES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(package.__file__).parent / "cpp"
LIBTORCH = str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with config.patch(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example program beside the loader as a library: the former proves that no Python is there."""
    folder = tmp_path_factory.mktemp("loader")
    common = [*find_compiler(), "-std=c++17", "-O0", "-Wall", "-Werror", f"-I{SOURCES}"]
    library, program = folder / "libdynamotor_package.so", folder / "run_package"
    source = str(SOURCES / "dynamotor_package.cpp")
    # With a C++ library of its own beside the one of this process: what goes by the process's locale would crash.
    shared = ["-shared", "-fPIC", "-static-libstdc++"]
    subprocess.run([*common, *shared, source, "-ldl", "-o", str(library)], check=True)
    example = str(ROOT / "examples/run_package.cpp")
    subprocess.run(
        [*common, example, str(library), f"-Wl,-rpath,{folder}", "-ldl", "-o", str(program)], check=True
    )
    return program


def bytes_of(value: Any) -> bytes:
    """The elements of all tensors in a value, row by row."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return b"".join(bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) for t in tensors)


def run(loader: Path, path: Path, args: Any, *more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([loader, path, *more], input=bytes_of(args), capture_output=True, check=False)


class Net(torch.nn.Module):
    """Folded weights, convolutions with what follows them, products, a view among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8))
        self.second = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8))
        self.head, self.last = torch.nn.Linear(8, 10), torch.nn.Linear(10, 4, bias=False)

    def forward(self, x: torch.Tensor, unused: torch.Tensor, scale: float) -> dict[str, Any]:
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + y)
        z = self.last(self.head(torch.nn.functional.max_pool2d(y, 2).mean((2, 3))).tanh())
        return {"pooled": [z.t(), scale], "y": y * scale, "again": z}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    torch.manual_seed(0)
    args = (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(3), 0.5)
    path = tmp_path_factory.mktemp("package") / "net.dm"
    dynamotor.export(Net().eval(), args).package(path)
    return path, args


def test_a_network_runs_as_in_python(loader: Path, net: Any) -> None:
    path, args = net
    done = run(loader, path, args, LIBTORCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes_of(dynamotor.load(path)(*args))


def pure(a: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> Any:
    b = torch.sin(a).t() + 1
    return b, b, (a * 2).sum(0), table[rows].softmax(-1), a > 0


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    args = (torch.randn(5, 7), torch.tensor([3, 0, 2]), torch.randn(4, 6, dtype=torch.bfloat16))
    path = tmp_path_factory.mktemp("package") / "pure.dm"
    dynamotor.export(pure, args).package(path)
    return path, args


def test_kernels_alone_need_no_torch(loader: Path, kernels: Any) -> None:
    path, args = kernels
    done = run(loader, path, args, "/no/libtorch")
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes_of(dynamotor.load(path)(*args))


def test_positions_out_of_range_are_an_error(loader: Path, kernels: Any) -> None:
    path, (a, rows, table) = kernels
    assert b"out of range" in run(loader, path, (a, rows + 2, table)).stderr


class Laid(ctypes.Structure):
    """`dynamotor_tensor` of the header."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]


def laid(*tensors: torch.Tensor) -> Any:
    """The tensors as C sees them."""
    rows = []
    for tensor in tensors:
        numbers = ctypes.c_int64 * tensor.ndim
        shape, stride = numbers(*tensor.shape), numbers(*tensor.stride())
        rows.append(Laid(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.ndim, shape, stride))
    return (Laid * len(rows))(*rows)


def tensor_of(shown: Laid) -> torch.Tensor:
    """A copy of what C shows."""
    dtype = next(dtype for dtype, code in DTYPES.items() if code == shown.dtype)
    sizes, strides = ([*row[: shown.ndim]] for row in (shown.sizes, shown.strides))
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(shown.data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides).clone()


@pytest.fixture(scope="module")
def library(loader: Path) -> Any:
    found = ctypes.CDLL(str(loader.parent / "libdynamotor_package.so"))
    for name in ("dynamotor_load", "dynamotor_run"):
        getattr(found, name).restype = ctypes.c_void_p
    for name in ("dynamotor_argument", "dynamotor_result"):
        getattr(found, name).restype = ctypes.POINTER(Laid)
    found.dynamotor_error.restype = ctypes.c_char_p
    return found


@pytest.mark.parametrize("which", ["net", "kernels"])
@pytest.mark.slow
def test_calls_come_one_after_the_other(library: Any, request: Any, which: str) -> None:
    path, args = request.getfixturevalue(which)
    loaded = ctypes.c_void_p(library.dynamotor_load(str(path).encode(), None))  # the torch that is here
    assert loaded, library.dynamotor_error()
    expected, kept = dynamotor.load(path), []
    for times in (1.0, -2.0, 0.5):
        other = [
            arg * times if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
        ]
        tensors = [arg for arg in other if isinstance(arg, torch.Tensor)]
        assert library.dynamotor_argument(loaded, 0)[0].ndim == tensors[0].ndim
        results = ctypes.c_void_p(library.dynamotor_run(loaded, laid(*tensors), len(tensors)))
        assert results, library.dynamotor_error()
        kept.append(
            (results, [t for t in pytree.tree_leaves(expected(*other)) if isinstance(t, torch.Tensor)])
        )
    library.dynamotor_unload(loaded)  # results outlive their package
    for results, wanted in kept:
        assert library.dynamotor_n_results(results) == len(wanted)
        for k, tensor in enumerate(wanted):
            torch.testing.assert_close(
                tensor_of(library.dynamotor_result(results, k)[0]), tensor, rtol=0, atol=0
            )
        library.dynamotor_free_results(results)


def test_other_arguments_are_refused(library: Any, kernels: Any) -> None:
    path, (a, rows, table) = kernels
    loaded = ctypes.c_void_p(library.dynamotor_load(str(path).encode(), None))
    for others, words in (
        ([a[1:], rows, table], b"another shape than at the export: the size in dimension 0 is 4, and 5 was"),
        ([a.t().contiguous().t(), rows, table], b"other strides"),
        ([a, rows, table.float()], b"dtype"),
        ([a, rows], b"takes 3"),
    ):
        assert library.dynamotor_run(loaded, laid(*others), len(others)) is None
        assert words in library.dynamotor_error()
    library.dynamotor_unload(loaded)


@pytest.mark.parametrize("same", [True, False])
def test_one_tensor_in_two_places(library: Any, tmp_path: Path, same: bool) -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 7.25 if a is b else a - b * 1.75

    x, y = torch.ones(3), torch.full((3,), 5.0)
    path = tmp_path / "two.dm"
    dynamotor.export(model, (x, x) if same else (x, y)).package(path)
    loaded = ctypes.c_void_p(library.dynamotor_load(str(path).encode(), None))
    for other in (y, x):
        found = library.dynamotor_run(loaded, laid(x, other), 2)
        assert (found is None) is ((other is x) is not same)
        if found is None:
            assert (b"were one tensor" if same else b"were two tensors") in library.dynamotor_error()
        else:
            results = ctypes.c_void_p(found)
            assert torch.equal(tensor_of(library.dynamotor_result(results, 0)[0]), model(x, other))
            library.dynamotor_free_results(results)
    library.dynamotor_unload(loaded)


def rewritten(path: Path, target: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy of a package in which one file is another."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, change(data) if name == info.filename else data)
    return target


@pytest.mark.parametrize(
    "which, before, after, words",
    [
        ("kernels", b"package-4", b"package-1", b"another format"),
        ("kernels", b"model name", b"model Name", b"another processor"),
        ("kernels", b"\nkernel ", b"\ncolonel ", b"does not know: colonel"),
        ("kernels", b"\nreturn ", b"\nreturn many ", b"not whole"),
        ("net", b"\n" + torch.__version__.encode(), b"\n1.9.0", b"built for torch 1.9.0"),
        ("net", b"mkldnn::", b"mkldnn::no", b"no_reorder_convolution_weight"),
    ],
)
def test_what_cannot_run_is_refused(
    loader: Path, request: Any, tmp_path: Path, which: str, before: bytes, after: bytes, words: bytes
) -> None:
    def change(data: bytes) -> bytes:
        assert before in data
        return data.replace(before, after)

    path, args = request.getfixturevalue(which)
    done = run(loader, rewritten(path, tmp_path / "other.dm", "steps.txt", change), args, LIBTORCH)
    assert done.returncode == 1 and words in done.stderr


def test_damaged_files_are_refused(loader: Path, kernels: Any, tmp_path: Path) -> None:
    data = kernels[0].read_bytes()
    at = data.index(b"\x7fELF") + 100
    damaged = tmp_path / "damaged.dm"
    for content, words in (
        (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], b"damaged"),
        (data[: len(data) // 2], b"no package"),
        (b"", b"cannot be mapped"),
    ):
        damaged.write_bytes(content)
        done = run(loader, damaged, kernels[1])
        assert done.returncode == 1 and words in done.stderr


def test_what_only_python_runs_says_so(loader: Path, tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 4)

    x = torch.randn(9)
    dynamotor.export(model, (x,)).package(tmp_path / "histc.dm")
    torch.testing.assert_close(dynamotor.load(tmp_path / "histc.dm")(x), model(x))
    done = run(loader, tmp_path / "histc.dm", x)
    assert b"only Python runs this package: an argument of aten.histc" in done.stderr


# State, written arguments, and sizes that differ ------------------------------------------------------------
class Loaded:
    """A package, or a method of one, in the loader's library."""

    def __init__(self, library: Any, package: Any) -> None:
        self.library, self.package = library, ctypes.c_void_p(package)
        assert self.package, library.dynamotor_error()

    @staticmethod
    def of(library: Any, path: Path) -> Loaded:
        library.dynamotor_state_name.restype = ctypes.c_char_p
        library.dynamotor_state.restype = ctypes.POINTER(Laid)
        library.dynamotor_method.restype = ctypes.c_void_p
        return Loaded(library, library.dynamotor_load(str(path).encode(), None))

    def method(self, name: str) -> Loaded:
        return Loaded(self.library, self.library.dynamotor_method(self.package, name.encode()))

    def __call__(self, *tensors: torch.Tensor, strides: bool = True) -> list[torch.Tensor] | str:
        """Copies of the results, or the error."""
        rows = laid(*tensors)
        for row in rows if not strides else ():
            row.strides = None
        found = self.library.dynamotor_run(self.package, rows, len(tensors))
        if found is None:
            return str(self.library.dynamotor_error().decode())
        results = ctypes.c_void_p(found)
        count = self.library.dynamotor_n_results(results)
        tensors_ = [tensor_of(self.library.dynamotor_result(results, k)[0]) for k in range(count)]
        self.library.dynamotor_free_results(results)
        return tensors_

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the state."""
        return {
            self.library.dynamotor_state_name(self.package, k).decode(): tensor_of(
                self.library.dynamotor_state(self.package, k)[0]
            )
            for k in range(self.library.dynamotor_n_states(self.package))
        }

    def unload(self) -> None:
        self.library.dynamotor_unload(self.package)


@pytest.fixture(scope="module", params=[False, True], ids=["fixed", "dynamic"])
def cached(tmp_path_factory: pytest.TempPathFactory, _own_cache: None, request: Any) -> Any:
    torch.manual_seed(0)
    model, args = Cached().eval(), examples(5)
    path = tmp_path_factory.mktemp("package") / "cached.dm"
    shapes = {"x": {1: "n"}, "at": {0: "n"}} if request.param else None
    dynamotor.export(model, args, dynamic_shapes=shapes).package(path)
    return (
        path,
        model,
        [(5, 3), (3, 1), (8, 8), (3, 0), (3, 2)] if request.param else [(5, 3), (5, 0), (5, 11)],
    )


def test_each_loaded_package_has_its_state(library: Any, cached: Any) -> None:
    path, model, sizes = cached
    first, second = Loaded.of(library, path), Loaded.of(library, path)
    assert list(first.state) == ["keys", "calls", "turned"]
    compared(first, copy.deepcopy(model), sizes)
    compared(second, other := copy.deepcopy(model), sizes[:2])
    first.unload()
    compared(second, other, sizes[1:])
    second.unload()
    again = Loaded.of(library, path)
    compared(again, copy.deepcopy(model), sizes)
    again.unload()


def test_what_was_written_and_is_refused_stays(library: Any, cached: Any) -> None:
    path, model, sizes = cached
    loaded, (x, at, total) = Loaded.of(library, path), examples(5)
    memory = torch.zeros(48)
    known = loaded.state["keys"]
    at_state = loaded.library.dynamotor_state(loaded.package, 0)[0].data
    inside = torch.frombuffer((ctypes.c_char * 24).from_address(at_state), dtype=torch.float32).view(3, 2)
    for args, words in (
        (
            (x, at[1:], total),
            "argument 1 of another shape than at the export: the size in dimension 0 is 4, and 5",
        ),
        ((x[:, :1], at[:1], total), "argument 0 of "),
        ((x, at, total.double()), "argument 2 of another dtype"),
        (
            (memory[:40].view(1, 5, 8), at, memory[36:42].view(3, 2)),
            "argument 2 and argument 0 that share memory",
        ),
        ((x, at, inside), "argument 2 that shares memory with the package's state"),
    ):
        error = loaded(*args)
        assert isinstance(error, str) and error.startswith("[DM115]") and words in error
    if len(sizes) > 3:
        assert "argument 0 of size 1 in dimension 1, but for 2 or more" in str(
            loaded(x[:, :1], at[:1], total)
        )
    torch.testing.assert_close(loaded.state["keys"], known, rtol=0, atol=0)
    compared(loaded, copy.deepcopy(model), sizes[:1])
    loaded.unload()


def test_written_arguments_in_another_layout(library: Any, tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x[1] += 1
        return x

    dynamotor.export(model, torch.zeros(4, 3).t()).package(tmp_path / "x.dm")
    loaded = Loaded.of(library, tmp_path / "x.dm")
    x, other = torch.rand(3, 4), torch.rand(4, 3).t()  # row-major elements, and the strides of the export
    for given, strides in ((x, False), (other, True)):
        before = given.clone()
        (result,) = loaded(given, strides=strides)
        torch.testing.assert_close(given, model(before))
        torch.testing.assert_close(result, given)  # type: ignore[arg-type]
    loaded.unload()


def halves(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, m = x.shape[0], y.shape[1]
    return (
        torch.cat([x[: n // 2].cumsum(0), x[n // 2 :]]) * y.sum(),
        (x @ y).relu().sum(1),
        torch.nn.functional.pad(y, (n % 3, 0)).softmax(-1),
        torch.arange(min(n, m)) * 2,
        x.unsqueeze(0).expand(m, n, 4).transpose(1, 2).reshape(m, -1).sin(),
    )


def quotients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[::3].exp(), y.flatten()[:-1].unfold(0, 2, 2).sum(1), x.view(-1, 2).t().contiguous()


def written(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shown = x.detach()
    return shown.mul_(2), y, shown[1:] + 1, y.t() @ x.t()


def shown(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = (x @ y).relu()
    flat = made.view(-1)[x.shape[0] :]
    return made[:, -1], made.t(), flat, made[x.shape[0] // 2 :], made[:-1, 1], made.sort(1)[0][1:]


def shown_of_arguments(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t(), y[:, y.shape[1] // 3 :], x.unsqueeze(0).expand(3, -1, -1), x.view(-1)[::2], y[1]


@pytest.mark.parametrize("model", [halves, quotients, written, shown, shown_of_arguments])
def test_sizes_are_computed_as_in_python(library: Any, tmp_path: Path, model: Callable[..., Any]) -> None:
    args = torch.randn(7, 4), torch.randn(4, 5)
    path = tmp_path / "x.dm"
    dynamotor.export(model, args, dynamic_shapes=({0: "n"}, {1: "m"})).package(path)
    loaded, in_python = Loaded.of(library, path), dynamotor.load(path)
    taken = 0
    for n, m in ((7, 5), (5, 9), (12, 3), (7, 5), (3, 2), (2, 31)):
        args = torch.randn(n, 4), torch.randn(4, m)
        try:
            in_python(*copy.deepcopy(args))
        except dynamotor.UsageError as error:  # a branch of eager's that the program has not
            assert "DM115" in str(loaded(*args)) and error.code == "DM115"
            continue
        again, found = copy.deepcopy(args), copy.deepcopy(args)
        torch.testing.assert_close(loaded(*found), [*in_python(*again)], rtol=0, atol=0)
        torch.testing.assert_close(found, again, rtol=0, atol=0)
        torch.testing.assert_close(in_python(*copy.deepcopy(args)), model(*args))
        torch.testing.assert_close(found, args)
        taken += 1
    assert taken > 2
    loaded.unload()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_take_the_kernel_and_more_the_library(
    library: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As in Python, so that the bits are the same."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 300), torch.nn.Linear(300, 512, bias=False)).to(dtype)
    x = torch.randn(7, 512).to(dtype)
    dynamotor.export(model.requires_grad_(False), (x,), dynamic_shapes=({0: "n"},)).package(tmp_path / "x.dm")
    with zipfile.ZipFile(tmp_path / "x.dm") as file:
        assert file.read("steps.txt").count(b"\neither ") == 2
    loaded, in_python = Loaded.of(library, tmp_path / "x.dm"), dynamotor.load(tmp_path / "x.dm")
    for n in (7, 2, 24, 25, 12, 13, 40):
        x = torch.randn(n, 512).to(dtype)
        torch.testing.assert_close(loaded(x), [in_python(x)], rtol=0, atol=0)
        exact = copy.deepcopy(model).double()(x.double())
        assert (in_python(x) - exact).abs().max() <= 1.5 * (model(x) - exact).abs().max() + 1e-6
    loaded.unload()


class Bytes(torch.nn.Module):
    """A linear layer whose weights are bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (300, 512), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype)) / 1000


def test_weights_in_bytes_take_the_kernel_for_any_number_of_rows(library: Any, tmp_path: Path) -> None:
    """The call of many rows is written in Python."""
    model, x = Bytes(), torch.randn(7, 512)
    dynamotor.export(model, (x,), dynamic_shapes=({0: "n"},)).package(tmp_path / "x.dm")
    loaded = Loaded.of(library, tmp_path / "x.dm")
    for n in (7, 2, 90):
        x = torch.randn(n, 512)
        torch.testing.assert_close(loaded(x), [model(x)], rtol=1e-4, atol=1e-4)
    loaded.unload()


def test_a_llama_decodes_without_python(loader: Path, tmp_path: Path, library: Any) -> None:
    torch.manual_seed(0)
    path, model = tmp_path / "llama.dm", Llama(layers=1).eval()
    dynamotor.package(path, programs_of(model))
    program = loader.parent / "decode_package"
    common = [*find_compiler(), "-std=c++17", "-O0", "-Wall", "-Werror", f"-I{SOURCES}"]
    sources = [str(ROOT / "examples/decode_package.cpp"), str(loader.parent / "libdynamotor_package.so")]
    subprocess.run([*common, *sources, f"-Wl,-rpath,{loader.parent}", "-ldl", "-o", str(program)], check=True)
    for prompt in PROMPTS:
        done = subprocess.run(
            [program, path, LIBTORCH, "32", *map(str, prompt)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert list(map(int, done.stdout.split())) == decoded(model, model, prompt, 32)
    first, second = Loaded.of(library, path), Loaded.of(library, path)
    for prompt in (PROMPTS[2], PROMPTS[0]):
        for one in (first, second):
            methods = [one.method(name) for name in ("prefill", "decode")]
            found = decoded(*(lambda *args, m=m: m(*args)[0] for m in methods), prompt, 32)  # type: ignore[misc]
            assert found == decoded(model, model, prompt, 32)
    assert "several methods" in str(first(torch.zeros(1, 1)))
    assert (
        not library.dynamotor_method(first.package, b"generate")
        and b"no method generate" in library.dynamotor_error()
    )
    first.unload(), second.unload()
