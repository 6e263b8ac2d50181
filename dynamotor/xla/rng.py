"""The random state of each device: an integer seed, advanced once for each executed graph that draws.

Draw number i of a graph uses key(seed, i), so lazy runs and both bridges draw the same numbers, bit for bit.

>>> set_state(7)
>>> get_state()
7
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

# threefry's bits depend on nothing but key and position: not on the platform, nor on how XLA fuses.
IMPL = "threefry2x32"
_STEP = 0x9E3779B97F4A7C15  # the golden-ratio increment of splitmix64: a full period over 64 bits
_MASK = (1 << 63) - 1
_states: dict[int, int] = {}


def _index(device: Any) -> int:
    return (torch.device(device).index or 0) if device is not None else 0


def get_state(device: Any = None) -> int:
    """The seed that the next graph that draws will use; at first torch's own initial seed."""
    index = _index(device)
    if index not in _states:
        _states[index] = (torch.initial_seed() + index) & _MASK
    return _states[index]


def set_state(seed: int, device: Any = None) -> None:
    """Set a device's seed."""
    _states[_index(device)] = int(seed) & _MASK


def set_state_all(seed: int) -> None:
    """Set the seed of every device."""
    for index in range(max(len(_states), len(jax.local_devices()))):
        set_state(seed + index if index else seed, torch.device("xla", index))


def get_state_tensor(device: Any = None) -> torch.Tensor:
    """The state as a CPU tensor, as `torch.get_rng_state` gives it."""
    return torch.tensor([get_state(device)], dtype=torch.int64).view(torch.uint8)


def set_state_tensor(state: torch.Tensor, device: Any = None) -> None:
    """Restore what `get_state_tensor` gave."""
    set_state(int(state.view(torch.int64)[0]), device)


def take(device: Any) -> np.ndarray:
    """The seed as uint32[2] for one run of a graph; advances the state."""
    seed = get_state(device)
    set_state((seed + _STEP) & _MASK, device)
    return np.array([seed >> 32, seed & 0xFFFFFFFF], dtype=np.uint32)


def key(seed: jax.Array, index: int) -> Any:
    """The PRNG key of draw number `index` of a graph."""
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl=IMPL), index)
