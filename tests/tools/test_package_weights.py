"""Tensors that a packaged program writes: state of the loaded package, and arguments, in place as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import PROMPTS, Cached, Llama, compared, decoded, examples, programs_of

import dynamotor
from dynamotor import UsageError
from dynamotor.base.config import config


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with config.patch(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="module", params=[False, True], ids=["fixed", "dynamic"])
def cached(tmp_path_factory: pytest.TempPathFactory, _own_cache: None, request: Any) -> Any:
    """A packaged model with state that is not as it was made, and the sizes that it takes."""
    torch.manual_seed(0)
    model, args = Cached().eval(), examples(5)
    with torch.no_grad():
        model(*args)
    path = tmp_path_factory.mktemp("package") / "cached.dm"
    shapes = {"x": {1: "n"}, "at": {0: "n"}} if request.param else None
    before = copy.deepcopy((dict(model.named_buffers()), args))
    dynamotor.export(model, args, dynamic_shapes=shapes).package(path)
    after = dict(model.named_buffers()), args
    torch.testing.assert_close(after, before, rtol=0, atol=0)  # an export writes nothing
    return path, model, [(5, 3), (3, 1), (8, 8), (2, 0)] if request.param else [(5, 3), (5, 0), (5, 11)]


def test_state_goes_on_from_that_of_the_export(cached: Any) -> None:
    path, model, sizes = cached
    loaded = dynamotor.load(path)
    assert list(loaded.state) == ["keys", "calls", "turned"]
    compared(loaded, copy.deepcopy(model), sizes)


def test_loaded_packages_have_state_of_their_own(cached: Any) -> None:
    path, model, sizes = cached
    first, second = dynamotor.load(path), dynamotor.load(path)
    compared(first, copy.deepcopy(model), sizes)
    compared(second, other := copy.deepcopy(model), sizes[:1])
    compared(dynamotor.load(path), copy.deepcopy(model), sizes[1:])  # from a file that nothing has written
    compared(second, other, sizes[1:])


def test_state_may_be_read_and_written_between_calls(cached: Any) -> None:
    path, model, sizes = cached
    loaded, model = dynamotor.load(path), copy.deepcopy(model)
    compared(loaded, model, sizes[:1])
    kept = {name: value.clone() for name, value in loaded.state.items()}
    compared(loaded, copy.deepcopy(model), sizes)
    for name, value in loaded.state.items():
        value.copy_(kept[name])
    compared(loaded, model, sizes)


def test_results_that_are_state_show_later_calls_as_in_eager(cached: Any) -> None:
    path, model, _ = cached
    loaded, model = dynamotor.load(path), copy.deepcopy(model)
    with torch.no_grad():
        args = examples(5)
        shown, expected = loaded(*args)[2], model(*args)[2]
        loaded(*args), model(*args)
    torch.testing.assert_close(shown, expected)
    assert shown.data_ptr() == loaded.state["turned"].data_ptr()


def test_written_arguments_must_be_apart(cached: Any) -> None:
    path, _, _ = cached
    loaded, (x, at, _) = dynamotor.load(path), examples(5)
    memory = torch.zeros(48)
    with pytest.raises(UsageError, match=r"DM115(.|\n)*argument 2 and argument 0 that share memory"):
        loaded(memory[:40].view(1, 5, 8), at, memory[36:42].view(3, 2))
    with pytest.raises(UsageError, match=r"DM115(.|\n)*shares memory with the package's state"):
        loaded(x, at, loaded.state["keys"].view(-1)[:6].view(3, 2))
    compared(loaded, copy.deepcopy(cached[1]), [(5, 0)])  # nothing was written


def test_sizes_beyond_the_range_are_refused(cached: Any) -> None:
    loaded, (x, at, total) = dynamotor.load(cached[0]), examples(5)
    with pytest.raises(UsageError, match=r"DM115(.|\n)*argument 1 (.|\n)*dimension 0 is 4, and 5 "):
        loaded(x, at[1:], total)
    with pytest.raises(UsageError, match=r"DM115(.|\n)*argument 0 (.|\n)*dimension 1"):
        loaded(x[:, :1], at[:1], total)


@pytest.mark.parametrize(
    "dim, sizes, wrong, words",
    [
        (torch.export.Dim("n", min=2, max=9), (2, 6, 9), 10, "size 10 in dimension 0, but for 2 to 9"),
        (
            "n",
            (4, 6, 12),
            5,
            r"mod\(s0, 2\) == 0 does not hold: s0 is the size of argument 0 in dimension 0, here 5",
        ),
    ],
)
def test_assumptions_about_sizes_are_checked(
    tmp_path: Path, dim: Any, sizes: tuple[int, ...], wrong: int, words: str
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x * 2]).sum(1) if dim != "n" or x.shape[0] % 2 == 0 else x.sum(1)

    dynamotor.export(model, (torch.randn(6, 3),), dynamic_shapes={"x": {0: dim}}).package(tmp_path / "x.dm")
    loaded = dynamotor.load(tmp_path / "x.dm")
    for n in sizes:
        x = torch.randn(n, 3)
        torch.testing.assert_close(loaded(x), model(x))
    with pytest.raises(UsageError, match=f"DM115(.|\\n)*{words}"):
        loaded(torch.randn(wrong, 3))


def test_dimensions_of_different_names_differ(tmp_path: Path) -> None:
    def model(x: torch.Tensor, y: torch.Tensor, unread: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, y.sum(0)

    args = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 4)
    shapes = {"x": {0: "n"}, "y": {0: "m"}, "unread": {0: "k", 1: "n"}}
    dynamotor.export(model, args, dynamic_shapes=shapes).package(tmp_path / "x.dm")
    loaded = dynamotor.load(tmp_path / "x.dm")
    for n, m, k in ((2, 5, 3), (7, 3, 2), (4, 4, 4)):
        args = torch.randn(n, 3), torch.randn(m, 3), torch.randn(k, n)
        torch.testing.assert_close(loaded(*args), model(*args))


@pytest.mark.regression
@pytest.mark.parametrize(
    "model, shapes",
    [
        (lambda x: (x * 2, x.shape[0] * 2), {"x": {0: "n"}}),
        (lambda x: {"rows": f"{x.shape[0]} rows", "x": x * 2}, {"x": {0: "n"}}),
        (lambda x: (x.sum().item(), x * 2), None),
    ],
)
def test_numbers_of_calls_in_a_result_are_refused(
    model: Callable[..., Any], shapes: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="DM114(.|\n)*a number in its result"):
        dynamotor.export(model, (torch.ones(4, 2),), dynamic_shapes=shapes).package(tmp_path / "x.dm")


class Overlapping(torch.nn.Module):
    """State that another method's weight shows, or that has gaps."""

    def __init__(self, gaps: bool) -> None:
        super().__init__()
        whole = torch.zeros(6, 4)
        self.register_buffer("state", whole[:, :2] if gaps else whole[1:])
        self.register_buffer("other", whole[:2])

    def forward(self, x: torch.Tensor, write: bool) -> torch.Tensor:
        if not write:
            return self.other * 2
        self.state[1] = x
        return x + 1


@pytest.mark.parametrize("gaps, words", [(False, "shares memory"), (True, "has gaps")])
def test_state_that_a_file_cannot_hold_is_refused(gaps: bool, words: str, tmp_path: Path) -> None:
    model, x = Overlapping(gaps), torch.ones(2 if gaps else 4)
    programs = {"write": dynamotor.export(model, (x, True))}
    if not gaps:
        dynamotor.package(tmp_path / "one.dm", programs)
        programs["read"] = dynamotor.export(model, (x, False))
    with pytest.raises(UsageError, match=f"DM114(.|\n)*state, which it writes, {words}"):
        dynamotor.package(tmp_path / "two.dm", programs)


class Part(torch.nn.Module):
    """A buffer that is a part of another tensor: without its beginning, or with gaps."""

    def __init__(self, gaps: bool) -> None:
        super().__init__()
        self.register_buffer("part", torch.arange(20.0)[::2] if gaps else torch.arange(20.0)[4:])

    def forward(self, x: torch.Tensor, whole: bool) -> tuple[torch.Tensor, ...]:
        shown = self.part.as_strided((3,), (2,), self.part.storage_offset() + 1)
        return x + 1, shown if whole else shown * 2, self.part[3:]


@pytest.mark.regression
@pytest.mark.parametrize("whole, gaps", [(False, False), (True, False), (True, True)])
def test_places_in_a_storage_are_eagers_or_refused(whole: bool, gaps: bool, tmp_path: Path) -> None:
    model, x = Part(gaps), torch.ones(2)
    program = dynamotor.export(model, (x, whole))
    if whole:
        with pytest.raises(UsageError, match="DM114(.|\n)*as_strided"):
            program.package(tmp_path / "x.dm")
        return
    program.package(tmp_path / "x.dm")
    torch.testing.assert_close(dynamotor.load(tmp_path / "x.dm")(x, whole), model(x, whole))


@pytest.mark.parametrize("asks", [False, True])
def test_strides_of_dimensions_of_size_1_differ(asks: bool, tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * (x.stride(0) if asks else 2)

    dynamotor.export(model, (torch.randn(1, 3),)).package(tmp_path / "x.dm")
    loaded, x = dynamotor.load(tmp_path / "x.dm"), torch.randn(1, 5)[:, 1:4]
    if asks:
        with pytest.raises(UsageError, match="DM115(.|\n)*strides"):
            loaded(x)
    else:
        torch.testing.assert_close(loaded(x), model(x))


def test_tensors_that_nothing_reads_are_of_any_size(tmp_path: Path) -> None:
    def model(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["x"] * 2

    shapes = {"tensors": {"x": None, "unread": {0: "n"}}}
    args = {"x": torch.randn(3), "unread": torch.randn(4, 2)}
    dynamotor.export(model, (args,), dynamic_shapes=shapes).package(tmp_path / "x.dm")
    loaded = dynamotor.load(tmp_path / "x.dm")
    for n in (2, 9):
        torch.testing.assert_close(loaded(args | {"unread": torch.randn(n, 2)}), args["x"] * 2)
    with pytest.raises(UsageError, match="DM115"):
        loaded(args | {"unread": torch.randn(4, 3)})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, _own_cache: None) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(0)
    model = Llama().eval()
    path = tmp_path_factory.mktemp("package") / "llama.dm"
    dynamotor.package(path, programs_of(model))
    return path, model


def test_methods_share_weights_and_state(llama: Any) -> None:
    path, model = llama
    first, second = dynamotor.load(path), dynamotor.load(path)
    assert path.stat().st_size < 1.6 * sum(p.nbytes for p in model.parameters()) + 100_000
    for prompt in PROMPTS:
        expected = decoded(model, model, prompt, 32)
        for loaded in (first, second, first):
            assert decoded(loaded.prefill, loaded.decode, prompt, 32) == expected
    for name, value in first.state.items():
        torch.testing.assert_close(value, model.get_buffer(name))


def test_methods_have_names(llama: Any, tmp_path: Path) -> None:
    loaded = dynamotor.load(llama[0])
    assert list(loaded.methods) == ["prefill", "decode"]
    with pytest.raises(AttributeError, match="no method 'generate', but prefill, decode"):
        loaded.generate()
    with pytest.raises(UsageError, match="DM115(.|\n)*it has prefill, decode"):
        loaded(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(UsageError, match="DM147"):
        dynamotor.package(tmp_path / "x.dm", {"state": dynamotor.export(lambda x: x + 1, torch.ones(2))})


class Halves(torch.nn.Module):
    """One method writes what another could compute with ahead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(64, 64))

    def forward(self, x: torch.Tensor, write: bool) -> torch.Tensor:
        if write:
            self.scale.mul_(2)
            return x + 1
        return x @ (self.scale @ self.scale + 1)


def test_constants_of_a_method_that_another_writes_are_refused(tmp_path: Path) -> None:
    model, x = Halves(), torch.randn(3, 64)
    programs = {name: dynamotor.export(model, (x, name == "write")) for name in ("read", "write")}
    dynamotor.package(tmp_path / "read.dm", {"read": programs["read"]})
    with pytest.raises(UsageError, match="DM114(.|\n)*ahead of time"):
        dynamotor.package(tmp_path / "both.dm", programs)


class Rotated(torch.nn.Module):
    """Rotary positions by complex factors, as in Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(16, 4), torch.randn(16, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns[: x.shape[1]]
        return torch.view_as_real(pairs).flatten(-2)


@pytest.mark.regression
@pytest.mark.parametrize("shapes", [None, {"x": {1: "n"}}], ids=["fixed", "dynamic"])
def test_a_weight_may_be_complex(shapes: Any, tmp_path: Path) -> None:
    model = Rotated()
    dynamotor.export(model, torch.randn(2, 5, 8), dynamic_shapes=shapes).package(tmp_path / "x.dm")
    loaded = dynamotor.load(tmp_path / "x.dm")
    for size in (5,) if shapes is None else (5, 2, 16):
        x = torch.randn(2, size, 8)
        torch.testing.assert_close(loaded(x), model(x))
