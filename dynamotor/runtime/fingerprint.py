"""Has the content of some tensors changed? A hash over their bytes, at the speed of memory.

`(data_ptr, _version)` does not see `p.data.mul_(2)`: it keeps the address and moves another version counter.
So work that is done once on parameters is guarded by what they hold. 45 MB take 2-3 ms on two cores.

>>> seen = Fingerprint([TensorSpec.of(t) for t in tensors])
>>> before = seen.of(tensors); tensors[0].data.mul_(2); seen.of(tensors) != before
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..graph.spec import TensorSpec
from .build import start_build
from .launch import make_kernel

# To each 64-bit word a random key of its own place is added, then one half is multiplied by the other: linear
# edits (signs flipped, factors of two, rows swapped) do not cancel each other. (With keys in steps of a
# constant they do: an edit of the pattern + - - + has a second difference of zero.) The word itself is added
# too, so that a half of zeros hides nothing, and after 16 steps the sums are folded into themselves and the
# keys begin again. Blocks are hashed apart from each other, with their number, and mixed into a sum, so that
# threads may take any of them.
_SOURCE = r"""
#if defined(__AVX512F__)
enum { WORDS = 8 };
typedef int ints __attribute__((vector_size(64))); typedef long long longs __attribute__((vector_size(64)));
#define HALVES(x) (vec)__builtin_ia32_pmuludq512_mask((ints)(x), (ints)((x) >> 32), (longs){}, (unsigned char)-1)
#elif defined(__AVX2__)
enum { WORDS = 4 };
typedef int ints __attribute__((vector_size(32)));
#define HALVES(x) (vec)__builtin_ia32_pmuludq256((ints)(x), (ints)((x) >> 32))
#else
enum { WORDS = 2 };
#define HALVES(x) (((x) & 0xffffffffULL) * ((x) >> 32))
#endif
typedef unsigned long long u64; typedef long long i64;
typedef u64 vec __attribute__((vector_size(WORDS * 8)));
typedef u64 mem __attribute__((vector_size(WORDS * 8), aligned(1), may_alias));
static inline u64 mix(u64 x) {
  x ^= x >> 33; x *= 0xff51afd7ed558ccdULL; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ULL; return x ^ (x >> 33);
}
enum { SUMS = 4, STEP = SUMS * WORDS * 8, STEPS = 16 };
static struct Keys {
  vec of[STEPS * SUMS];
  Keys() { for (int i = 0; i < STEPS * SUMS; i++) for (int k = 0; k < WORDS; k++) of[i][k] = mix(i * WORDS + k + 1); }
} keys;
static u64 block(const unsigned char* p, i64 n, u64 seed) {
  vec sums[SUMS];
  for (int s = 0; s < SUMS; s++) sums[s] = ~keys.of[s];
  i64 i = 0;
  while (i + STEP <= n) {
    for (int k = 0; k < STEPS && i + STEP <= n; k++, i += STEP) {
      #pragma GCC unroll 4
      for (int s = 0; s < SUMS; s++) {
        vec w = *(const mem*)(p + i + s * WORDS * 8), x = w + keys.of[k * SUMS + s];
        sums[s] += HALVES(x) + (w << 32 | w >> 32);
      }
    }
    for (int s = 0; s < SUMS; s++) sums[s] = (sums[s] ^ (sums[s] >> 29)) * 0xBF58476D1CE4E5B9ULL;
  }
  u64 h = mix(seed * 0x9E3779B97F4A7C15ULL + (u64)n);
  for (int s = 0; s < SUMS; s++) for (int k = 0; k < WORDS; k++) h = mix(h ^ sums[s][k]);
  for (; i < n; i++) h = mix(h ^ p[i]);
  return h;
}
enum { BLOCK = 1 << 16 };
extern "C" void fingerprint(void** ptrs, const i64* sizes) {
  i64 n = sizes[0]; u64 total = 0;
  for (i64 t = 0; t < n; t++) {
    const unsigned char* p = (const unsigned char*)ptrs[t]; i64 size = sizes[t + 1], blocks = (size + BLOCK - 1) / BLOCK;
    u64 sum = 0;
    #pragma omp parallel for reduction(+ : sum) if (blocks > 4)
    for (i64 j = 0; j < blocks; j++) sum += block(p + j * BLOCK, j + 1 < blocks ? (i64)BLOCK : size - j * BLOCK, (u64)j);
    total = mix(total ^ mix(sum + (u64)t));
  }
  *(u64*)ptrs[n] = total;
}
"""
# The loops are written as vectors: more than -O1 is as quick a hash, 40 ms later.
_FLAGS = ("-O1", "-march=native", "-fopenmp", "-w")


class Fingerprint:
    """Hashes tensors of known specs. Making one starts to build the hash function; the first `of` waits for
    it.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._sizes = [spec.extent * spec.dtype.itemsize for spec in specs]
        self._build = start_build(_SOURCE, _FLAGS)
        self._kernel: Callable[..., None] | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> int:
        """A 64-bit hash of the bytes that the tensors span. BuildError when there is no compiler."""
        if self._kernel is None:
            count = len(self._sizes)
            self._kernel = make_kernel(self._build.result(), "fingerprint", count + 1, (count, *self._sizes))
        result = torch.empty((), dtype=torch.int64)
        self._kernel(*tensors, result)
        return int(result.item())
