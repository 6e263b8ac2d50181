"""jax functions in PyTorch programs; see jax_call.

>>> call_jax(jnp.hypot, (a, b))
"""

from __future__ import annotations

from ..jax_call import call_jax  # noqa: F401
