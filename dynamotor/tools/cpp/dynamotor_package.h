/* Runs a package of dynamotor (`dynamotor.export(...).package("model.dm")`) without Python.
 *
 *     dynamotor_package *model = dynamotor_load("model.dm", NULL);
 *     dynamotor_tensor x = *dynamotor_argument(model, 0);        // dtype and shape as at the export
 *     x.data = my_floats;
 *     dynamotor_results *results = dynamotor_run(model, &x, 1);
 *     const dynamotor_tensor *y = dynamotor_result(results, 0);
 *
 * Build dynamotor_package.cpp into the program (C++17, -ldl). Packages whose steps call no library need no torch;
 * for the others libtorch_cpu.so of the version that built the package is loaded at run time. What cannot be run
 * here (another processor, another torch, steps that only Python takes) gives NULL, and dynamotor_error() says why.
 *
 * A package is code: load only what comes from where your programs come from. Calls of one package wait for each
 * other; several packages run side by side.
 */
#ifndef DYNAMOTOR_PACKAGE_H
#define DYNAMOTOR_PACKAGE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { /* dtypes, as libtorch numbers them */
    DYNAMOTOR_UINT8 = 0, DYNAMOTOR_INT8 = 1, DYNAMOTOR_INT16 = 2, DYNAMOTOR_INT32 = 3, DYNAMOTOR_INT64 = 4,
    DYNAMOTOR_FLOAT16 = 5, DYNAMOTOR_FLOAT32 = 6, DYNAMOTOR_FLOAT64 = 7, DYNAMOTOR_BOOL = 11, DYNAMOTOR_BFLOAT16 = 15
};

typedef struct {
    void *data;
    int32_t dtype;
    int32_t ndim;
    const int64_t *sizes;
    const int64_t *strides; /* in elements, those of the export; NULL: row-major elements, which are laid out so */
} dynamotor_tensor;

typedef struct dynamotor_package dynamotor_package;
typedef struct dynamotor_results dynamotor_results;

/* torch_library: the path of libtorch_cpu.so; NULL for the one that the process or the system's loader knows. */
dynamotor_package *dynamotor_load(const char *path, const char *torch_library);
void dynamotor_unload(dynamotor_package *package);

/* A method of a package that has several (`dynamotor.package(path, {"prefill": ..., "decode": ...})`); it belongs to the
 * package and is unloaded with it. Methods share weights and state; their calls wait for each other. */
dynamotor_package *dynamotor_method(dynamotor_package *package, const char *name);

/* The state: tensors that the programs write and that are no arguments (a cache). Each loaded package has its own, which
 * begins as it was at the export; between calls it may be read and written through `data`. */
size_t dynamotor_n_states(const dynamotor_package *package);
const char *dynamotor_state_name(const dynamotor_package *package, size_t k);
const dynamotor_tensor *dynamotor_state(const dynamotor_package *package, size_t k);

/* The tensors among the model's arguments, in its order (those given by name behind the others, by their names). A size
 * or stride that may differ between calls is -1. An argument that the model writes is written in place. */
size_t dynamotor_n_arguments(const dynamotor_package *package);
const dynamotor_tensor *dynamotor_argument(const dynamotor_package *package, size_t k);

/* The tensors of the model's result, in its order. They live until they are freed, and share no memory with arguments or
 * state. */
dynamotor_results *dynamotor_run(dynamotor_package *package, const dynamotor_tensor *arguments, size_t n);
size_t dynamotor_n_results(const dynamotor_results *results);
const dynamotor_tensor *dynamotor_result(const dynamotor_results *results, size_t k);
void dynamotor_free_results(dynamotor_results *results);

/* Why this thread's last call gave NULL. */
const char *dynamotor_error(void);

#ifdef __cplusplus
}
#endif
#endif
