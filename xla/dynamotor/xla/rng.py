"""The random state of each device: one integer, moved on by each draw when it is recorded.

Draw by draw the state is the key of the draw, an input of the graph, so lazy runs and both bridges draw the
same numbers, bit for bit, and a state that is read or set between two draws holds for the second.

>>> set_state(7); a = torch.rand(2, device="xla")
>>> set_state(7); b = torch.rand(2, device="xla")       # equal to a
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import compat
from .errors import require

# threefry's bits depend on nothing but key and position: not on the platform, nor on how XLA fuses.
IMPL = "threefry2x32"
_STEP = 0x9E3779B97F4A7C15  # the golden-ratio increment of splitmix64: a full period
_PERIOD = 1 << 63
_MASK = _PERIOD - 1
_BACK = pow(_STEP, -1, _PERIOD)
_FAR = 1 << 32  # a state further than so many draws from another was set by the program
_states: dict[int, int] = {}


def _index(device: Any) -> int:
    return (
        device if isinstance(device, int) else (torch.device(device).index or 0) if device is not None else 0
    )


def get_state(device: Any = None) -> int:
    """The state, which is the key of the next draw; at first torch's own initial seed."""
    index = _index(device)
    if index not in _states:
        _states[index] = (torch.initial_seed() + index) & _MASK
    return _states[index]


def set_state(seed: int, device: Any = None) -> None:
    """Set a device's state."""
    _states[_index(device)] = int(seed) & _MASK


def set_state_all(seed: int) -> None:
    """Set the state of every device, each to another one."""
    for index in range(max(len(_states), len(jax.local_devices()))):
        set_state(seed + index, index)


def _follow_manual_seed(seed_others: Callable[[int], None]) -> None:
    """`torch.manual_seed` seeds every device, each to a state of its own; PyTorch tells one backend of it."""

    def seed_custom_device(seed: int) -> None:
        seed_others(seed)
        _states.clear()  # the next look takes torch's seed

    compat.device_seeder.set(seed_custom_device)


_follow_manual_seed(compat.device_seeder.get())


def get_state_tensor(device: Any = None) -> torch.Tensor:
    """The state as a CPU tensor, as `torch.get_rng_state` gives it."""
    return torch.tensor([get_state(device)], dtype=torch.int64, device="cpu").view(torch.uint8)


def set_state_tensor(state: torch.Tensor, device: Any = None) -> None:
    """Restore what `get_state_tensor` gave."""
    set_state(int(state.view(torch.int64)[0]), device)


def draw(device: torch.device, generator: torch.Generator | None) -> int:
    """The key of one draw, from the device's state or a generator's, which moves on. XlaError DM614 for a
    generator of another device."""
    if generator is None:
        state = get_state(device)
        _states[device.index] = (state + _STEP) & _MASK
        return state
    require(
        generator.device.type == "xla",
        "DM614",
        f"Expected a 'xla' device type for generator but found '{generator.device.type}'",
        cure='use torch.Generator(device="xla")',
    )
    drawn = generator.get_offset()
    generator.set_offset(drawn + 1)
    return (generator.initial_seed() + drawn * _STEP) & _MASK


def words(states: list[int]) -> np.ndarray:
    """The keys of a graph's draws as its input: uint32 [draws, 2], high words first."""
    return np.array([(state >> 32, state & 0xFFFFFFFF) for state in states], dtype=np.uint32)


def keys_from(state: jax.Array, draws: int) -> jax.Array:
    """What `words` gives for so many draws from a state on (uint32 [2]), within a graph."""
    first = (state[0].astype(jnp.uint64) << 32) | state[1].astype(jnp.uint64)
    states = (first + jnp.arange(draws, dtype=jnp.uint64) * jnp.uint64(_STEP)) & jnp.uint64(_MASK)
    return jnp.stack([states >> 32, states & jnp.uint64(0xFFFFFFFF)], axis=1).astype(jnp.uint32)


def key(words: jax.Array) -> Any:
    """The PRNG key of one draw."""
    return jax.random.wrap_key_data(words, impl=IMPL)


class Draws:
    """The draws of a recorded graph, relative to the state that its call begins with. A state that the graph
    sets itself (`manual_seed` in a step) stays as it is."""

    def __init__(self, before: int, states: list[int], after: int) -> None:
        self.plan = [_from(before, state) for state in states]
        self.after = _from(before, after)

    def take(self, device: torch.device) -> np.ndarray:
        """The keys for one call, as `words`; the device's state becomes that of the call's end."""
        before = get_state(device)
        _states[device.index] = _at(before, self.after)
        return words([_at(before, place) for place in self.plan])


def _from(before: int, state: int) -> tuple[bool, int]:
    """(True, how many draws later), or (False, a state that has nothing to do with the first)."""
    draws = (state - before) * _BACK & _MASK
    return (True, draws) if draws < _FAR else (False, state)


def _at(before: int, place: tuple[bool, int]) -> int:
    moves, number = place
    return (before + number * _STEP) & _MASK if moves else number
