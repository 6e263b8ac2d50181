/* Calls functions of libtorch: tensors in, new tensors out. C++: for their exceptions, and their results of classes. */
#include <cstddef>
#include <tuple>

namespace {

/* As at::Tensor in memory: a pointer. That it is copied and destroyed by functions decides how it is returned. */
struct Tensor {
    void *impl;
    Tensor(const Tensor &other) : impl(other.impl) {}
    ~Tensor() {}
};

typedef std::tuple<Tensor, Tensor> Pair;
typedef const void *In; /* a reference to an at::Tensor */

template <class Result> Result invoke(void *function, const In *in, int n) {
    switch (n) {
    case 1: return reinterpret_cast<Result (*)(In)>(function)(in[0]);
    case 2: return reinterpret_cast<Result (*)(In, In)>(function)(in[0], in[1]);
    default: return reinterpret_cast<Result (*)(In, In, In)>(function)(in[0], in[1], in[2]);
    }
}

} // namespace

/* `function` on 1 to 3 tensors, with one or two results, which are the caller's. Whether it threw nothing. */
extern "C" bool call_aten_function(void *function, const In *in, int n_in, void **out, int n_out) {
    try {
        if (n_out == 1) {
            out[0] = invoke<Tensor>(function, in, n_in).impl;
        } else {
            const Pair pair = invoke<Pair>(function, in, n_in);
            out[0] = std::get<0>(pair).impl;
            out[1] = std::get<1>(pair).impl;
        }
        return true;
    } catch (...) {
        return false;
    }
}
