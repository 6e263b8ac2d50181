"""Options that are floats, each with six values in turn: how many programs one compiled function needs, whether
calls after the second need another one, and whether results and gradients are eager's.

python -m bench options [--only NAME] [--backend eager] [--json FILE]

The calls are those of PyTorch's databases of operators and modules; the options are the floats among their
arguments, those of the operators' schemas and signatures, and the float attributes of modules.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import dynamotor
from bench.tool import write_json
from dynamotor.base.events import counters
from fuzz.databases import module_infos, operator_infos
from fuzz.operators import UNCERTAIN

VALUES = 6
SAMPLES = 60  # of an operator, at most
_REFUSED = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Case:
    """An option of a call. `call(value, *tensors)` makes it."""

    name: str
    option: str
    value: float
    call: Callable[..., Any]
    tensors: tuple[Any, ...]


def cases(only: str = "") -> Iterator[Case]:
    """One case for each option of each operator and module."""
    for info in operator_infos():
        if (
            only in info.name
            and not UNCERTAIN.search(info.name)
            and info.supports_dtype(torch.float32, "cpu")
        ):
            yield from _of_operator(info)
    for info in module_infos():
        if only in info.name:
            yield from _of_module(info)


def _of_operator(info: Any) -> Iterator[Case]:
    seen: set[str] = set()
    try:
        samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))[
            :SAMPLES
        ]
    except _REFUSED:
        return
    for sample in samples:
        args, tree = tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        for place, value in enumerate(args):
            option = _name_of(tree, place)
            if type(value) is float and math.isfinite(value) and option not in seen:
                seen.add(option)
                rest = (*args[:place], *args[place + 1 :])
                yield Case(
                    info.formatted_name,
                    option,
                    value,
                    functools.partial(_with_argument, info.op, tree, place),
                    rest,
                )
    for option, value in (_unused_options(info) if samples else {}).items():
        for sample in samples:
            rest, tree = tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
            case = Case(
                info.formatted_name,
                option,
                value,
                functools.partial(_with_keyword, info.op, tree, option),
                tuple(rest),
            )
            if option not in seen and option not in sample.kwargs and _answers(case, value):
                seen.add(option)
                yield case


def _name_of(tree: Any, place: int) -> str:
    """The keyword of a leaf, or its number among the positional ones."""
    (args, kwargs) = tree_unflatten(list(range(tree.num_leaves)), tree)
    return next((k for k, v in kwargs.items() if place in tree_leaves(v)), str(place))


def _unused_options(info: Any) -> dict[str, float]:
    """The float options that a signature or schema names, and a value for each."""
    found: dict[str, float] = {}
    packet = getattr(torch.ops.aten, info.name.rpartition(".")[2], None)
    for overload in packet.overloads() if packet is not None else ():
        for argument in getattr(packet, overload)._schema.arguments:
            kind = str(argument.type)
            if ("float" in kind or "Scalar" in kind or "number" in kind) and "List" not in kind:
                default = argument.default_value
                found[argument.name] = default if type(default) is float else 0.4
    try:
        parameters = inspect.signature(info.op).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    found |= {p.name: p.default for p in parameters if type(p.default) is float}
    return {name: value for name, value in found.items() if name not in ("self", "input")}


def _with_argument(op: Any, tree: Any, place: int, value: float, *rest: Any) -> Any:
    args, kwargs = tree_unflatten([*rest[:place], value, *rest[place:]], tree)
    return op(*args, **kwargs)


def _with_keyword(op: Any, tree: Any, option: str, value: float, *rest: Any) -> Any:
    args, kwargs = tree_unflatten(list(rest), tree)
    return op(*args, **{**kwargs, option: value})


def _of_module(info: Any) -> Iterator[Case]:
    seen: set[str] = set()
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    for sample in inputs:
        made, given = sample.constructor_input, sample.forward_input
        try:
            module = info.module_cls(*made.args, **made.kwargs)
        except _REFUSED:
            continue
        for option, value in vars(module).items():
            if type(value) is float and math.isfinite(value) and option not in seen and given is not None:
                seen.add(option)
                rest, tree = tree_flatten((tuple(given.args), dict(given.kwargs)))
                run = functools.partial(_with_attribute, module, tree, option)
                yield Case(info.name, option, value, run, tuple(rest))


def _with_attribute(module: Any, tree: Any, option: str, value: float, *rest: Any) -> Any:
    args, kwargs = tree_unflatten(list(rest), tree)
    setattr(module, option, value)
    return module(*args, **kwargs)


def values_of(case: Case) -> list[float]:
    """Six values that eager takes: near the sample's, else near one half."""
    start = case.value if case.value not in (0.0, 1.0) else case.value + 0.21
    near = [start * (1 - 0.031 * k) for k in range(1, VALUES + 1)]
    half = [0.5 + 0.013 * k for k in range(1, VALUES + 1)]
    return next((found for found in (near, half) if all(_answers(case, v) for v in found)), [])


def _answers(case: Case, value: float) -> bool:
    try:
        return bool(_tensors(_outcome(case.call, value, case.tensors)[0]))
    except _REFUSED:
        return False


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _outcome(call: Any, value: float, given: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The result of a call on copies, and the gradients."""
    leaves = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        for t in given
    ]
    torch.manual_seed(7)
    found = call(value, *[t.clone() if _wants(t) else t for t in leaves])
    wanting = [t for t in leaves if _wants(t)]
    results = [t for t in _tensors(found) if t.requires_grad]
    if not wanting or not results:
        return tree_map_only(torch.Tensor, torch.Tensor.detach, found), []
    total = sum((t.abs() if t.is_complex() else t).double().sum() for t in results)
    grads = torch.autograd.grad(total, wanting, allow_unused=True)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, found), list(grads)


def _wants(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def measure(case: Case, backend: str = "eager") -> dict[str, Any] | None:
    """A row: the programs of six values (`late`: of those after the second; a graph break makes more than one a
    call), and the first difference from eager; None: eager takes no such values."""
    values = values_of(case)
    if not values:
        return None
    dynamotor.reset()
    row: dict[str, Any] = {"name": case.name, "option": case.option, "programs": 0, "late": 0, "wrong": ""}

    def program(value: float, *tensors: Any) -> Any:
        return case.call(value, *tensors)

    compiled, before = dynamotor.compile(program, backend=backend), counters["frames"]["captured"]
    second = before
    for k, value in enumerate(values):
        second = counters["frames"]["captured"] if k == 2 else second
        want = _outcome(case.call, value, case.tensors)
        try:
            got = _outcome(compiled, value, case.tensors)
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)
        except (*_REFUSED, dynamotor.DynamotorError) as error:
            row["wrong"] = f"{value}: {type(error).__name__}: {str(error).strip()[:300]}"
            break
    row["programs"], row["late"] = (counters["frames"]["captured"] - then for then in (before, second))
    return row


def main() -> None:
    """Print the rows of options that need more than two programs, or differ from eager."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the operator's or module's name")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    rows = [row for case in cases(options.only) if (row := measure(case, options.backend)) is not None]
    shown = [row for row in rows if row["late"] or row["wrong"]]
    for row in shown:
        print(f"{row['name']:40} {row['option']:16} {row['programs']:3}  {row['wrong']}")
    print(f"{len(rows)} options, {len(shown)} with a program after the second call or another result")
    if options.json:
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
