/* A block's hash, for vectors of WORDS words and the instructions of the target that includes this. HALVES multiplies
 * one half of each word by the other. */
typedef u64 NAME(vec) __attribute__((vector_size(WORDS * 8)));
typedef u64 NAME(mem) __attribute__((vector_size(WORDS * 8), aligned(1), may_alias));

static u64 NAME(block)(const unsigned char *p, int64_t n, u64 seed) {
    enum { STEP = SUMS * WORDS * 8 };
    const NAME(mem) *of = (const NAME(mem) *)keys;
    NAME(vec) sums[SUMS];
    int64_t i = 0;
    for (int s = 0; s < SUMS; s++) sums[s] = ~of[s];
    while (i + STEP <= n) {
        for (int k = 0; k < STEPS && i + STEP <= n; k++, i += STEP) {
#pragma GCC unroll 4
            for (int s = 0; s < SUMS; s++) {
                NAME(vec) w = *(const NAME(mem) *)(p + i + s * WORDS * 8), x = w + of[k * SUMS + s];
                sums[s] += HALVES(x) + (w << 32 | w >> 32);
            }
        }
        for (int s = 0; s < SUMS; s++) sums[s] = (sums[s] ^ (sums[s] >> 29)) * 0xBF58476D1CE4E5B9ULL;
    }
    u64 h = mix(seed * 0x9E3779B97F4A7C15ULL + (u64)n);
    for (int s = 0; s < SUMS; s++)
        for (int k = 0; k < WORDS; k++) h = mix(h ^ sums[s][k]);
    for (; i < n; i++) h = mix(h ^ p[i]);
    return h;
}
#undef WORDS
#undef NAME
#undef HALVES
