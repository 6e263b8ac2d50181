// Greedy decoding with a package of two methods that share a cache: `prefill` takes the prompt, `decode` one token at a
// time. Both take tokens and their positions and give the logits of the last token; the cache is the package's state.
//
//     g++ -std=c++17 -O2 -I dynamotor/tools/cpp examples/decode_package.cpp dynamotor/tools/cpp/dynamotor_package.cpp -ldl
//     ./a.out llama.dm .../torch/lib/libtorch_cpu.so 32 17 4 99      # 32 steps behind the prompt 17 4 99
#include "dynamotor_package.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

// The most likely token behind `tokens`, the first of which is at `position`; -1 where the program does not run.
static int64_t next_token(dynamotor_package *method, std::vector<int64_t> tokens, int64_t position) {
    std::vector<int64_t> positions;
    for (size_t k = 0; k < tokens.size(); k++) positions.push_back(position + static_cast<int64_t>(k));
    const int64_t sizes[] = {1, static_cast<int64_t>(tokens.size())};
    const dynamotor_tensor arguments[] = {{tokens.data(), DYNAMOTOR_INT64, 2, sizes, nullptr},
                                          {positions.data(), DYNAMOTOR_INT64, 1, sizes + 1, nullptr}};
    dynamotor_results *results = dynamotor_run(method, arguments, 2);
    if (!results) return -1;
    const dynamotor_tensor *logits = dynamotor_result(results, 0);  // of sizes 1, vocabulary
    const float *values = static_cast<const float *>(logits->data);
    int64_t best = 0;
    for (int64_t k = 1; k < logits->sizes[1]; k++)
        if (values[k * logits->strides[1]] > values[best * logits->strides[1]]) best = k;
    dynamotor_free_results(results);
    return best;
}

int main(int argc, char **argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: decode_package FILE LIBTORCH_CPU STEPS TOKEN...\n");
        return 2;
    }
    const auto start = std::chrono::steady_clock::now();
    dynamotor_package *package = dynamotor_load(argv[1], argv[2]);
    dynamotor_package *prefill = package ? dynamotor_method(package, "prefill") : nullptr;
    dynamotor_package *decode = prefill ? dynamotor_method(package, "decode") : nullptr;
    if (!decode) {
        std::fprintf(stderr, "%s\n", dynamotor_error());
        return 1;
    }
    const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - start;
    std::fprintf(stderr, "loaded in %.3f s\n", load_time.count());
    std::vector<int64_t> prompt;
    for (int k = 4; k < argc; k++) prompt.push_back(std::atoll(argv[k]));
    int64_t position = static_cast<int64_t>(prompt.size()), token = next_token(prefill, prompt, 0);
    for (int step = std::atoi(argv[3]); token >= 0; step--) {
        std::printf("%lld ", static_cast<long long>(token));
        if (step == 0) break;
        token = next_token(decode, {token}, position++);
    }
    if (token < 0) std::fprintf(stderr, "%s\n", dynamotor_error());
    std::printf("\n");
    dynamotor_unload(package);
    return token < 0;
}
