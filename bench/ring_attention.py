"""Context parallel attention on a CPU: PyTorch's ring knows the attention ops of GPUs alone.

>>> with ring_attention.on_cpu(), context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]): ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _of_parts(
    run: Callable[..., tuple[Any, ...]],
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """The handler of an op: `run` of parts on this rank, with its results as DTensors."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = args[0]._spec
        parts = [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]
        found = run(spec.mesh.get_group(), *parts, **kwargs)
        return tuple(DTensor.from_local(x, spec.mesh, spec.placements, run_check=False) for x in found)

    return handler


def _run_forward(
    group: Any, q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **rest: Any
) -> Any:
    return ring._templated_ring_attention(
        group, 2, _forward, q, k, v, is_causal=causal, dropout_p=dropout, scale=rest.get("scale")
    )


def _run_backward(
    group: Any,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dropout: float,
    causal: bool,
    **rest: Any,
) -> Any:
    return ring._templated_ring_attention_backward(
        group, 2, _backward_by_name, grad, "grad_out", q, k, v, out, lse, causal, **rest, dropout_p=dropout
    )


def _backward_by_name(
    *, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, **rest: Any
) -> Any:
    return _backward(grad_out, query, key, value, out, logsumexp, **rest)


_HANDLERS = {_forward: _of_parts(_run_forward), _backward: _of_parts(_run_backward)}


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let `context_parallel` run attention on a CPU."""
    ring.custom_ops.update(_HANDLERS)
    try:
        yield
    finally:
        for op in _HANDLERS:
            del ring.custom_ops[op]
