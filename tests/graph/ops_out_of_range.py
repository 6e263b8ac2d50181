"""Runs PyTorch's database of ops with data out of range and prints the ops that raise although their facts do not
say so: `python ops_out_of_range.py`. Each entry runs in a process of its own, since eager's kernels may crash.
"""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dynamotor.graph.op_facts import facts

SAMPLES, SECONDS = 4, 10
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
VALUES = (1 << 40, -1, 0, float("nan"), float("inf"), -1.0)
# The data are a size or a bound here: capture breaks the graph, where it would read them. Views of copies raise
# for their storage.
READ = {
    "aten.as_strided.default",
    "aten.zeros.default",
    "aten.linspace.Tensor_Scalar",
    "aten.linspace.Tensor_Tensor",
}


class Innermost(TorchDispatchMode):
    """Remembers the op that raised."""

    raised = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.raised = func
            raise


def filled(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full_like(tensor, value) if isinstance(value, float) else tensor.clone()
    if tensor.dtype == torch.bool:
        return torch.full_like(tensor, value == 0)
    limits = torch.iinfo(tensor.dtype)
    return (
        torch.full_like(tensor, max(limits.min, min(limits.max, value)))
        if isinstance(value, int)
        else tensor.clone()
    )


def variants(args: Any) -> Iterator[Any]:
    """The arguments with each value in all of their tensors, and in each alone."""
    count = sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))
    for value in VALUES:
        for only in (None, *range(count)):
            places = iter(range(count))

            def change(leaf: Any, value: Any = value, only: int | None = only, places: Any = places) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                here = next(places)
                return filled(leaf.detach(), value) if only in (None, here) else leaf.detach().clone()

            yield tree_map(change, args)


def unlisted(info: Any, dtype: torch.dtype) -> set[str]:
    """The ops that raise and are not known to."""
    found = set()
    for sample in list(info.sample_inputs("cpu", dtype))[:SAMPLES]:
        for args, kwargs in variants(((sample.input, *sample.args), sample.kwargs)):
            innermost = Innermost()
            with contextlib.suppress(Exception), innermost:
                info.op(*args, **kwargs)
            if innermost.raised is not None and str(innermost.raised) not in READ:
                known = facts(innermost.raised)
                if not (known.bounded or known.asserts or known.data_dependent):
                    found.add(str(innermost.raised))
    return found


def examine(info: Any) -> None:
    for dtype in DTYPES:
        with contextlib.suppress(Exception):
            for sample in list(info.sample_inputs("cpu", dtype))[:SAMPLES]:
                info.op(sample.input, *sample.args, **sample.kwargs)
            for name in sorted(unlisted(info, dtype)):
                print("unlisted:", info.name, name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for entry in op_db:
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            examine(entry)
            os._exit(0)
        os.waitpid(child, 0)
