/* Has the content of some tensors changed? A hash over their bytes, at the speed of memory.
 *
 * To each 64-bit word a random key of its own place is added, then one half is multiplied by the other: linear edits
 * (signs flipped, factors of two, rows swapped) do not cancel each other. (With keys in steps of a constant they do: an
 * edit of the pattern + - - + has a second difference of zero.) The word itself is added too, so that a half of zeros
 * hides nothing, and after 16 steps the sums are folded into themselves and the keys begin again. Blocks are hashed
 * apart from each other, with their number, and mixed into a sum, so that threads may take any of them. */
#include "dynamotor.h"

typedef unsigned long long u64;
enum { SUMS = 4, STEPS = 16, MOST_WORDS = 8, BLOCK = 1 << 16, FEW_BLOCKS = 4 };

static u64 keys[STEPS * SUMS * MOST_WORDS] __attribute__((aligned(64)));

static inline u64 mix(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

#define WORDS 2
#define NAME(name) plain_##name
#define HALVES(x) (((x) & 0xffffffffULL) * ((x) >> 32))
#include "fingerprint_block.h"

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx2")
typedef int ints_of_4 __attribute__((vector_size(32)));
#define WORDS 4
#define NAME(name) avx2_##name
#define HALVES(x) (avx2_vec)__builtin_ia32_pmuludq256((ints_of_4)(x), (ints_of_4)((x) >> 32))
#include "fingerprint_block.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
typedef int ints_of_8 __attribute__((vector_size(64)));
typedef long long longs_of_8 __attribute__((vector_size(64)));
#define WORDS 8
#define NAME(name) avx512_##name
#define HALVES(x) (avx512_vec)__builtin_ia32_pmuludq512_mask((ints_of_8)(x), (ints_of_8)((x) >> 32), (longs_of_8){}, 255)
#include "fingerprint_block.h"
#pragma GCC pop_options
#endif

typedef u64 (*Block)(const unsigned char *, int64_t, u64);

/* The function for vectors of so many words, at most as wide as this processor has them. */
static Block block_for(int words) {
#ifdef __x86_64__
    if (words >= 8 && __builtin_cpu_supports("avx512f")) return avx512_block;
    if (words >= 4 && __builtin_cpu_supports("avx2")) return avx2_block;
#endif
    return plain_block;
}

/* torch's OpenMP (libgomp's interface); NULL where torch has none. */
static void (*in_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*max_threads)(void);

typedef struct {
    const unsigned char *bytes;
    int64_t size, blocks, share, next;
    u64 sum;
    Block block;
} Work;

/* A thread's share of the blocks. */
static void take_share(void *data) {
    Work *work = data;
    u64 sum = 0;
    for (int64_t j; (j = __atomic_fetch_add(&work->next, work->share, __ATOMIC_RELAXED)) < work->blocks;) {
        for (int64_t end = j + work->share < work->blocks ? j + work->share : work->blocks; j < end; j++) {
            int64_t left = work->size - j * BLOCK;
            sum += work->block(work->bytes + j * BLOCK, left < BLOCK ? left : BLOCK, (u64)j);
        }
    }
    __atomic_fetch_add(&work->sum, sum, __ATOMIC_RELAXED);
}

static u64 hash_of(Work *works, Py_ssize_t n) {
    u64 total = 0;
    int threads = in_parallel != NULL && max_threads != NULL ? max_threads() : 1;
    for (Py_ssize_t i = 0; i < n; i++) {
        Work *work = &works[i];
        work->share = threads > 1 ? (work->blocks + threads - 1) / threads : work->blocks;
        if (threads > 1 && work->blocks > FEW_BLOCKS)
            in_parallel(take_share, work, 0, 0);
        else
            take_share(work);
        total = mix(total ^ mix(work->sum + (u64)i));
    }
    return total;
}

static PyObject *py_fingerprint(PyObject *self, PyObject *args) {
    PyObject *tensors, *result = NULL;
    int words = MOST_WORDS;
    if (!PyArg_ParseTuple(args, "O|i", &tensors, &words)) return NULL;
    PyObject *items = PySequence_Fast(tensors, "fingerprint takes a sequence of tensors");
    if (items == NULL) return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
    Work *works = PyMem_Calloc((size_t)n + 1, sizeof(Work));
    if (works == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; works != NULL && i < n; i++) {
        uintptr_t start, stop;
        if (tensor_range(PySequence_Fast_GET_ITEM(items, i), &start, &stop) < 0) goto done;
        works[i].bytes = (const unsigned char *)start;
        works[i].size = (int64_t)(stop - start);
        works[i].block = block_for(words);
        works[i].blocks = (works[i].size + BLOCK - 1) / BLOCK;
    }
    if (works != NULL) {
        u64 total;
        Py_BEGIN_ALLOW_THREADS
        total = hash_of(works, n);
        Py_END_ALLOW_THREADS
        result = PyLong_FromUnsignedLongLong(total);
    }
done:
    PyMem_Free(works);
    Py_DECREF(items);
    return result;
}

static PyMethodDef methods[] = {
    {"fingerprint", py_fingerprint, METH_VARARGS,
     "fingerprint(tensors, words=8) -> a 64-bit hash of the bytes that the tensors span, in vectors of so many words at most"},
    {NULL, NULL, 0, NULL},
};

int fingerprint_init(PyObject *module) {
    for (int i = 0; i < STEPS * SUMS * MOST_WORDS; i++) keys[i] = mix((u64)i + 1);
    in_parallel = torch_symbol("GOMP_parallel");
    max_threads = torch_symbol("omp_get_max_threads");
    return PyModule_AddFunctions(module, methods);
}
