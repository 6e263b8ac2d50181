"""Attention over tiles and over pages, products by groups, and Pallas kernels, for xla tensors.

On a TPU `flash_attention` is jax's Pallas kernel; elsewhere, and all others, are the same in XLA's
operations.

>>> out = flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5)
>>> def plus(x, y): return pl.pallas_call(add, out_shape=x)(x, y)
>>> plus = make_kernel_from_pallas(plus, lambda x, y: [(x.shape, x.dtype)])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ..distributed.spmd.xla_sharding import get_global_mesh
from ..errors import require
from ..jax_call import call_jax

DEFAULT_MASK_VALUE = -0.7 * float(torch.finfo(torch.float32).max)


def _softmax_of(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: Any, scale: float, cap: float | None, bias: Any = None
) -> jax.Array:
    """Attention of q [..., n, d] over k, v [..., m, d], in float32; `seen` [..., n, m]: the keys of each
    query (None: all).
    """
    scores = (
        jnp.einsum("...nd,...md->...nm", q, k, preferred_element_type=jnp.float32, precision="highest")
        * scale
    )
    scores = scores if bias is None else scores + bias
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores if seen is None else jnp.where(seen, scores, DEFAULT_MASK_VALUE)
    parts = jax.nn.softmax(scores, axis=-1)
    parts = parts if seen is None else jnp.where(seen, parts, 0)
    return jnp.einsum("...nm,...md->...nd", parts, v.astype(jnp.float32), precision="highest").astype(q.dtype)


def _flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    ab: jax.Array | None,
    causal: bool,
    scale: float,
    sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    if jax.default_backend() == "tpu":
        return _flash_on_tpu(q, k, v, q_ids, kv_ids, ab, causal, scale, sharding)
    seen = jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool)) if causal else None
    if q_ids is not None and kv_ids is not None:
        same = q_ids[:, None, :, None] == kv_ids[:, None, None, :]
        seen = same if seen is None else seen & same
    return _softmax_of(q, k, v, seen, scale, None, ab)


def _flash_on_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    ab: jax.Array | None,
    causal: bool,
    scale: float,
    sharding: Any,
) -> jax.Array:
    """jax's kernel, whose positions have 32 bits. XLA does not divide kernels: each device of a mesh runs it
    on its part."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel  # only with a TPU

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_ids: jax.Array | None,
        kv_ids: jax.Array | None,
        ab: jax.Array | None,
    ) -> jax.Array:
        ids = None
        if q_ids is not None and kv_ids is not None:
            ids = kernel.SegmentIds(q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32))
        return kernel.flash_attention(q, k, v, ab, ids, causal=causal, sm_scale=scale)

    sharding = _default_sharding(q, k) if sharding is None else sharding
    if sharding is not None:
        whole, rows = sharding.spec, jax.sharding.PartitionSpec(*sharding.spec[:1])
        specs = tuple(
            None if x is None else whole if x.ndim == 4 else rows for x in (q, k, v, q_ids, kv_ids, ab)
        )
        attend = jax.shard_map(attend, mesh=sharding.mesh, in_specs=specs, out_specs=whole, check_vma=False)
    return _in_32_bits(attend)(q, k, v, q_ids, kv_ids, ab)


def _default_sharding(q: jax.Array, k: jax.Array) -> jax.sharding.NamedSharding | None:
    """Which part each device attends to where the program does not say; XLA moves operands to fit. Each axis
    of the operands' mesh divides the batch, else the heads, else nothing. None without a mesh.
    """
    mesh = next((m for x in (q, k) if (m := jax.typeof(x).sharding.mesh).size > 1), None)
    if mesh is None:
        return None
    divided: tuple[list[str], list[str]] = ([], [])
    left = [math.gcd(q.shape[d], k.shape[d]) for d in (0, 1)]
    for axis, size in mesh.shape.items():
        d = next((d for d in (0, 1) if left[d] % size == 0), None)
        if d is not None:
            divided[d].append(axis)
            left[d] //= size
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(tuple(d) or None for d in divided)))


def _in_32_bits(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function that is traced without 64-bit types, as is its backward pass, which jax traces later."""

    @jax.custom_vjp
    def narrow(*args: Any) -> jax.Array:
        with jax.enable_x64(False):
            return function(*args)

    def forward(*args: Any) -> tuple[jax.Array, Any]:
        with jax.enable_x64(False):
            return jax.vjp(function, *args)

    def backward(pull: Any, gradient: jax.Array) -> Any:
        with jax.enable_x64(False):
            return pull(gradient)

    narrow.defvjp(forward, backward)
    return narrow


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """softmax(q k^T sm_scale + ab) v, with gradients, for q, k, v [batch, heads, length, d].

    causal: query i sees the keys up to i. *_segment_ids int [batch, length]: a query sees the keys of its own
    segment. ab [batch, heads, n, m] is added to the scores. partition_spec: the axes of `mesh` (the global
    one where not given) that divide q, k, v, batch and heads among them: each device attends to its part. By
    default on a mesh of TPUs each axis divides the batch, or the heads where the batch is too small.
    """
    sharding = None
    if partition_spec is not None:
        found: Any = mesh or get_global_mesh()
        require(
            found is not None,
            "DM649",
            "partition_spec without a mesh",
            cure="pass mesh=, or set_global_mesh(mesh)",
        )
        sharding = found.sharding(partition_spec)
    return call_jax(_flash, (q, k, v, q_segment_ids, kv_segment_ids, ab, causal, float(sm_scale), sharding))


def _pages(pages: jax.Array, indices: jax.Array) -> jax.Array:
    """[heads, pages, page size, d] and [batch, n] -> [batch, heads, n * page size, d]."""
    found = jnp.moveaxis(pages[:, indices], 1, 0)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])


def _paged(
    q: jax.Array, k_pages: Any, v_pages: Any, lengths: Any, indices: Any, q_lengths: Any, cap: float | None
) -> jax.Array:
    """q [batch, n, heads, d]; the last of `q_lengths` queries is the newest token of `lengths`."""
    k, v = _pages(k_pages, indices), _pages(v_pages, indices)
    group = q.shape[2] // k.shape[1]
    heads = jnp.moveaxis(q, 2, 1).reshape(q.shape[0], k.shape[1], group, q.shape[1], q.shape[3])
    place = (lengths - q_lengths)[:, None] + jnp.arange(q.shape[1])
    seen = jnp.arange(k.shape[2]) <= jnp.minimum(place, lengths[:, None] - 1)[..., None]
    out = _softmax_of(heads, k[:, :, None], v[:, :, None], seen[:, None, None], 1.0, cap)
    return jnp.moveaxis(out.reshape(q.shape[0], q.shape[2], *out.shape[3:]), 1, 2)


def multi_queries_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    effective_q_lens: torch.Tensor,
    num_kv_pages_per_compute_block: int = 1,
    num_queries_per_compute_block: int = 1,
    use_kernel: bool = True,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the newest queries of each sequence over keys and values in pages; scores
    are not scaled.

    q [batch, n, heads, d]; k_pages, v_pages [kv heads, pages, page size, d]; lengths, effective_q_lens int
    [batch]; page_indices int [batch, pages a sequence]. The other arguments are accepted. The result is like
    q.
    """
    return call_jax(
        _paged, (q, k_pages, v_pages, lengths, page_indices, effective_q_lens, attn_logits_soft_cap)
    )


def _one_query(
    q: jax.Array, k_pages: Any, v_pages: Any, lengths: Any, indices: Any, cap: float | None
) -> jax.Array:
    return _paged(q[:, None], k_pages, v_pages, lengths, indices, jnp.ones_like(lengths), cap)[:, 0]


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    pages_per_compute_block: int = 1,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """`multi_queries_paged_attention` for one query a sequence: q and the result are [batch, heads, d]."""
    return call_jax(_one_query, (q, k_pages, v_pages, lengths, page_indices, attn_logits_soft_cap))


def _ragged(
    q: jax.Array,
    kv_pages: Any,
    kv_lens: Any,
    indices: Any,
    starts: Any,
    count: Any,
    scale: float,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    tokens = jnp.arange(q.shape[0])
    sequence = jnp.clip(jnp.searchsorted(starts, tokens, side="right") - 1, 0, kv_lens.shape[0] - 1)
    found = kv_pages[indices[sequence]]  # [tokens, pages, page size, 2 * kv heads, d]
    found = jnp.moveaxis(found.reshape(q.shape[0], -1, *kv_pages.shape[2:]), 1, 2)
    k, v = found[:, 0::2], found[:, 1::2]
    heads = q.reshape(q.shape[0], k.shape[1], -1, 1, q.shape[2])
    place = kv_lens[sequence] - (starts[sequence + 1] - starts[sequence]) + tokens - starts[sequence]
    keys = jnp.arange(k.shape[2])
    seen = keys <= place[:, None]
    seen = seen if window is None else seen & (keys > place[:, None] - window)
    seen &= (tokens < starts[count[0]])[:, None]
    out = _softmax_of(heads, k[:, :, None], v[:, :, None], seen[:, None, None, None], scale, cap)
    return out.reshape(q.shape)


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Causal attention of sequences of different lengths, one behind the other, over keys and values in
    pages.

    q [tokens, heads, d]; kv_pages [pages, page size, 2 * kv heads, d], keys and values of a head in turn;
    kv_lens int [sequences]; page_indices int [sequences, pages]; cu_q_lens int [sequences + 1], where each
    begins in q; num_seqs int [1]. sliding_window: how many of the latest keys are seen. soft_cap: scores
    become cap * tanh(score / cap). Options that tune kernels are accepted. Tokens behind the last sequence
    give zeros.
    """
    args = (
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        float(sm_scale),
        sliding_window,
        soft_cap,
    )
    return call_jax(_ragged, args)


def _grouped(lhs: jax.Array, rhs: jax.Array, sizes: Any, transposed: bool) -> jax.Array:
    return jax.lax.ragged_dot(
        lhs, jnp.swapaxes(rhs, 1, 2) if transposed else rhs, sizes.astype(jnp.int32), precision="highest"
    )


def gmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: Any = None,
    group_offset: Any = None,
    transpose_rhs: bool = False,
) -> torch.Tensor:
    """Rows of lhs [m, k] in groups, each times its own matrix of rhs [groups, k, n]: [m, n], with gradients.

    group_sizes int [groups]: rows of each. transpose_rhs: rhs is [groups, n, k]. tiling, group_offset None:
    accepted.
    """
    return call_jax(_grouped, (lhs, rhs, group_sizes, transpose_rhs))


def _grouped_weights(lhs: jax.Array, rhs: jax.Array, sizes: Any) -> jax.Array:
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(lhs.shape[1])
    mine = (rows < ends[:, None]) & (rows >= (ends - sizes)[:, None])
    return jnp.einsum("km,gm,mn->gkn", lhs, mine.astype(lhs.dtype), rhs, precision="highest")


def gmm_backward(
    grad: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, group_sizes: torch.Tensor, tiling: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `gmm(lhs, rhs, group_sizes)` by lhs and rhs. tiling: accepted."""
    by_lhs = gmm(grad, rhs, group_sizes, transpose_rhs=True)
    return by_lhs, call_jax(_grouped_weights, (lhs.t(), grad, group_sizes))


def repeat_with_fixed_output_size(
    input: torch.Tensor,  # noqa: A002 - torch_xla's name
    repeats: torch.Tensor,
    total_repeat_length: int,
) -> torch.Tensor:
    """Row i of `input` repeats[i] times, in a result of total_repeat_length rows (int repeats [rows]): what
    is too long is cut, and the last row fills the gap."""
    return call_jax(_repeat, (input, repeats, total_repeat_length))


def _repeat(x: jax.Array, repeats: Any, length: int) -> jax.Array:
    return jnp.repeat(x, repeats, axis=0, total_repeat_length=length)


def tgmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: Any = None,
    group_offset: Any = None,
    num_actual_groups: int | None = None,
) -> torch.Tensor:
    """For each group of columns of lhs [k, m] and rows of rhs [m, n] their product: [groups, k, n]. The rest
    as in `gmm`.
    """
    return call_jax(_grouped_weights, (lhs, rhs, group_sizes))


def make_kernel_from_pallas(
    kernel: Callable[..., Any], output_shape_dtype_fn: Callable[..., list[tuple[Any, torch.dtype]]]
) -> Callable[..., Any]:
    """A jax function that calls Pallas, as a function of xla tensors. `output_shape_dtype_fn` is accepted:
    jax knows the results.

    The kernel runs where Pallas has a compiler for the device; pass `interpret=True` to `pallas_call` on a
    CPU. Keywords must be hashable.
    """

    @functools.wraps(kernel)
    def call(*args: Any, static_argnums: Any = None, static_argnames: Any = None, **kwargs: Any) -> Any:
        return call_jax(kernel, args, kwargs)

    return call
