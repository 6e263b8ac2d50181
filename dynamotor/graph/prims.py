"""Our own ops, `torch.ops.dynamotor.*`: counter-based random numbers that eager and generated code draw
bit-equal.

`rand(seed, stream, size)` is a pure function of its arguments: Philox4x32-10 with counter (index // 4, 0,
stream, 0), key (seed low, seed high), lane index % 4; the value is the top 24 bits as a float in [0, 1).

>>> seed = torch.ops.dynamotor.new_seed()
>>> torch.ops.dynamotor.rand(seed, 0, [2, 3]).shape
torch.Size([2, 3])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .op_definition import layout
from .spec import CPU, TensorSpec, device_with_index, numel

_library = torch.library.Library("dynamotor", "DEF")
_library.define("new_seed(*, Device? device=None) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(
    "rand(Tensor seed, int stream, SymInt[] size, *, ScalarType? dtype=None, Device? device=None) -> Tensor"
)

_MASK = 0xFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP0, _KEY_STEP1 = 0x9E3779B9, 0xBB67AE85
_STEP = 2.0**-24  # between two numbers
_FEW_BLOCKS = 16  # for which Python's integers are faster than 200 calls of PyTorch


def new_seed(*, device: torch.device | None = None) -> torch.Tensor:
    """int64[1], drawn from PyTorch's default generator of the device, so that `torch.manual_seed` repeats
    it.
    """
    return torch.empty(1, dtype=torch.int64, device=device or CPU).random_()


def philox(index: torch.Tensor, stream: int, seed: int) -> tuple[torch.Tensor, ...]:
    """The four 32-bit words (as int64) of Philox4x32-10 for counters (index, 0, stream, 0)."""
    nothing = torch.zeros_like(index)
    return _rounds((index & _MASK, nothing, torch.full_like(index, stream & _MASK), nothing), seed)


def _rounds(counter: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The words of a counter, which are tensors of int64 or Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        p0, p1 = c0 * _MUL0, c2 * _MUL1  # the low 64 bits are right although int64 wraps; masks drop the sign
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEP0) & _MASK, (k1 + _KEY_STEP1) & _MASK
    return c0, c1, c2, c3


def rand(
    seed: torch.Tensor,
    stream: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Uniform [0, 1) of the given size, row-major; dtype defaults to float32."""
    count, key = numel(size), int(seed.item())
    n_blocks = (count + 3) // 4
    if n_blocks <= _FEW_BLOCKS:
        counters = [(k, 0, stream & _MASK, 0) for k in range(n_blocks)]
        numbers = [(word >> 8) * _STEP for counter in counters for word in _rounds(counter, key)]
        uniform = torch.tensor(numbers[:count], dtype=torch.float32, device="cpu")
    else:
        blocks = torch.arange(n_blocks, dtype=torch.int64, device="cpu")
        words = torch.stack(philox(blocks, stream, key), dim=1).reshape(-1)[:count]
        uniform = (words >> 8).to(torch.float32) * _STEP
    return uniform.reshape(tuple(size)).to(device=device or seed.device, dtype=dtype or torch.float32)


_library.impl("new_seed", new_seed, "CompositeExplicitAutograd")
_library.impl("rand", rand, "CompositeExplicitAutograd")


@layout(torch.ops.dynamotor.new_seed.default)
def _new_seed_shape(*, device: torch.device | None = None) -> TensorSpec:
    return TensorSpec.dense((1,), torch.int64, device_with_index(device or CPU))


@layout(torch.ops.dynamotor.rand.default)
def _rand_shape(
    seed: TensorSpec,
    stream: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> TensorSpec:
    return TensorSpec.dense(tuple(size), dtype or torch.float32, device_with_index(device or seed.device))
