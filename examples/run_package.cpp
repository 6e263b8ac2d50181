// Runs a package without Python: row-major arguments come on standard input one after the other, row-major results go
// to standard output.
//
//     g++ -std=c++17 -O2 -I dynamotor/tools/cpp examples/run_package.cpp dynamotor/tools/cpp/dynamotor_package.cpp -ldl
//     ./a.out model.dm [.../torch/lib/libtorch_cpu.so] < arguments > results
#include "dynamotor_package.h"

#include <cstdio>
#include <vector>

static size_t count(const dynamotor_tensor &tensor) {
    size_t n = 1;
    for (int d = 0; d < tensor.ndim; d++) n *= tensor.sizes[d];
    return n;
}

static size_t itemsize(const dynamotor_tensor &tensor) {
    switch (tensor.dtype) {
    case DYNAMOTOR_INT64: case DYNAMOTOR_FLOAT64: return 8;
    case DYNAMOTOR_INT32: case DYNAMOTOR_FLOAT32: return 4;
    case DYNAMOTOR_INT16: case DYNAMOTOR_FLOAT16: case DYNAMOTOR_BFLOAT16: return 2;
    }
    return 1;
}

// Writes a tensor's elements from the dimension `d` on, row by row.
static void write_row_major(const dynamotor_tensor &tensor, int d, const char *at) {
    if (d == tensor.ndim) {
        std::fwrite(at, itemsize(tensor), 1, stdout);
        return;
    }
    for (int64_t i = 0; i < tensor.sizes[d]; i++)
        write_row_major(tensor, d + 1, at + i * tensor.strides[d] * static_cast<int64_t>(itemsize(tensor)));
}

int main(int argc, char **argv) {
    dynamotor_package *package = argc > 1 ? dynamotor_load(argv[1], argc > 2 ? argv[2] : nullptr) : nullptr;
    if (!package) {
        std::fprintf(stderr, "%s\n", argc > 1 ? dynamotor_error() : "usage: run_package FILE [LIBTORCH_CPU]");
        return 1;
    }
    std::vector<std::vector<char>> memory;
    std::vector<dynamotor_tensor> arguments;
    for (size_t k = 0; k < dynamotor_n_arguments(package); k++) {
        dynamotor_tensor argument = *dynamotor_argument(package, k);
        memory.emplace_back(count(argument) * itemsize(argument));
        if (std::fread(memory.back().data(), 1, memory.back().size(), stdin) < memory.back().size()) return 2;
        argument.data = memory.back().data();
        argument.strides = nullptr;
        arguments.push_back(argument);
    }
    dynamotor_results *results = dynamotor_run(package, arguments.data(), arguments.size());
    if (!results) {
        std::fprintf(stderr, "%s\n", dynamotor_error());
        return 1;
    }
    for (size_t k = 0; k < dynamotor_n_results(results); k++) {
        const dynamotor_tensor *result = dynamotor_result(results, k);
        write_row_major(*result, 0, static_cast<const char *>(result->data));
    }
    dynamotor_free_results(results);
    dynamotor_unload(package);
    return 0;
}
