// Loads and runs packages; dynamotor_package.h says how it is used, tools/package_program.py writes what is read here.
//
// A package is a zip archive without compression: steps.txt, the shared objects of its kernels and the weights
// are used where they lie in the mapped file. Each line of steps.txt becomes a closure.
#include "dynamotor_package.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Ints = std::vector<int64_t>;
using Error = std::runtime_error;
thread_local std::string last_error;

// -- libtorch's stable C interface, looked up when a step needs it --------------------------------------------
using Handle = void *;
struct Torch {
    int32_t (*create)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, Handle *);
    int32_t (*again)(Handle, Handle *);
    int32_t (*destroy)(Handle);
    int32_t (*data)(Handle, void **);
    int32_t (*dim)(Handle, int64_t *);
    int32_t (*dtype)(Handle, int32_t *);
    int32_t (*sizes)(Handle, int64_t **);
    int32_t (*strides)(Handle, int64_t **);
    int32_t (*call)(const char *, const char *, uint64_t *, uint64_t);
    int32_t (*new_list)(size_t, Handle *);
    int32_t (*push)(Handle, uint64_t);
    int32_t (*new_string)(const char *, size_t, Handle *);
    bool (*grad_mode)();
    void (*set_grad_mode)(bool);
    const char *(*what)();
    uint64_t (*version)();
    void *library;

    template <class F> void find(F *&function, const char *name) {
        function = reinterpret_cast<F *>(dlsym(library, name));
        if (!function) throw Error(std::string("libtorch has no ") + name);
    }

    explicit Torch(const char *path) {
        const bool is_here = !path && dlsym(RTLD_DEFAULT, "torch_call_dispatcher");
        library = is_here ? RTLD_DEFAULT : dlopen(path ? path : "libtorch_cpu.so", RTLD_NOW | RTLD_GLOBAL);
        if (!is_here && !library) throw Error(std::string("the package calls libtorch, which cannot be loaded: ") + dlerror());
        find(create, "aoti_torch_create_tensor_from_blob");
        find(again, "aoti_torch_new_tensor_handle");
        find(destroy, "aoti_torch_delete_tensor_object");
        find(data, "aoti_torch_get_data_ptr");
        find(dim, "aoti_torch_get_dim");
        find(dtype, "aoti_torch_get_dtype");
        find(sizes, "aoti_torch_get_sizes");
        find(strides, "aoti_torch_get_strides");
        find(call, "torch_call_dispatcher");
        find(new_list, "torch_new_list_reserve_size");
        find(push, "torch_list_push_back");
        find(new_string, "torch_new_string_handle");
        find(grad_mode, "aoti_torch_grad_mode_is_enabled");
        find(set_grad_mode, "aoti_torch_grad_mode_set_enabled");
        what = reinterpret_cast<const char *(*)()>(dlsym(library, "torch_exception_get_what_without_backtrace"));
        find(version, "aoti_torch_abi_version");
    }

    void check(int32_t code, const std::string &op = "libtorch") const {
        if (code) throw Error(op + ": " + (what ? what() : "see standard error"));  // torch before 2.13 has no words for it
    }
};

struct WithoutGrad {  // nothing is recorded for a backward while a program runs
    const Torch *torch;
    bool before;
    explicit WithoutGrad(const Torch *torch) : torch(torch), before(torch && torch->grad_mode()) {
        if (before) torch->set_grad_mode(false);
    }
    ~WithoutGrad() {
        if (before) torch->set_grad_mode(true);
    }
};

// -- tensors --------------------------------------------------------------------------------------------------
struct Layout {
    int32_t dtype = -1;
    Ints sizes, strides;

    int64_t count() const {
        int64_t n = 1;
        for (int64_t size : sizes) n *= size;
        return n;
    }
    size_t itemsize() const {
        switch (dtype) {
        case DYNAMOTOR_UINT8: case DYNAMOTOR_INT8: case DYNAMOTOR_BOOL: return 1;
        case DYNAMOTOR_INT16: case DYNAMOTOR_FLOAT16: case DYNAMOTOR_BFLOAT16: return 2;
        case DYNAMOTOR_INT32: case DYNAMOTOR_FLOAT32: return 4;
        case DYNAMOTOR_INT64: case DYNAMOTOR_FLOAT64: return 8;
        }
        throw Error("a tensor of an unknown dtype");
    }
    size_t nbytes() const {  // from the first element to the last
        int64_t last = 0;
        for (size_t d = 0; d < sizes.size(); d++) last += (sizes[d] - 1) * strides[d];
        return count() ? (last + 1) * itemsize() : 0;
    }
    bool lies_as(const Layout &other) const {
        for (size_t d = 0; d < sizes.size(); d++)
            if (sizes[d] != 1 && strides[d] != other.strides[d]) return count() == 0;
        return true;
    }
};

Ints row_major(const Ints &sizes) {
    Ints strides(sizes.size());
    int64_t step = 1;
    for (size_t d = sizes.size(); d-- > 0; step *= sizes[d] > 1 ? sizes[d] : 1) strides[d] = step;
    return strides;
}

struct Tensor {
    Layout layout;
    char *data = nullptr;
    std::shared_ptr<void> memory;  // what keeps the data, where it is this tensor's
    std::shared_ptr<void> handle;  // libtorch's tensor, once an op was given it or gave it
};

std::shared_ptr<void> allocate(size_t nbytes) {
    void *memory = std::aligned_alloc(64, (nbytes / 64 + 1) * 64);
    if (!memory) throw Error("out of memory");
    return {memory, std::free};
}

Tensor fresh(Layout layout) {
    Tensor made;
    made.memory = allocate(layout.nbytes());
    made.data = static_cast<char *>(made.memory.get());
    made.layout = std::move(layout);
    return made;
}

Tensor laid_out(const Tensor &from, const Ints &strides) {
    Layout layout = from.layout;
    layout.strides = strides;
    Tensor made = fresh(layout);
    const size_t nbytes = layout.itemsize(), ndim = layout.sizes.size();
    Ints at(ndim, 0);
    int64_t source = 0, target = 0;
    for (int64_t n = layout.count(); n-- > 0;) {
        std::memcpy(made.data + target * nbytes, from.data + source * nbytes, nbytes);
        for (size_t d = ndim; d-- > 0;) {
            source += from.layout.strides[d], target += strides[d];
            if (++at[d] < layout.sizes[d]) break;
            source -= at[d] * from.layout.strides[d], target -= at[d] * strides[d], at[d] = 0;
        }
    }
    return made;
}

// -- the file -------------------------------------------------------------------------------------------------
struct Member {
    char *data;
    size_t nbytes;
};

uint32_t crc_of(const Member &member) {
    static const std::vector<uint32_t> table = [] {
        std::vector<uint32_t> made(256);
        for (uint32_t n = 0; n < 256; n++) {
            uint32_t c = n;
            for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            made[n] = c;
        }
        return made;
    }();
    uint32_t crc = ~0u;
    for (size_t i = 0; i < member.nbytes; i++) crc = table[(crc ^ static_cast<unsigned char>(member.data[i])) & 255] ^ (crc >> 8);
    return ~crc;
}

struct File {
    char *start = nullptr;
    size_t nbytes = 0;
    std::map<std::string, Member> members;

    explicit File(const char *path) {
        const int file = open(path, O_RDONLY | O_CLOEXEC);
        struct stat status;
        if (file < 0 || fstat(file, &status) < 0) throw Error(std::string(path) + " cannot be read");
        nbytes = status.st_size;
        void *mapped = nbytes ? mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0) : MAP_FAILED;
        close(file);
        if (mapped == MAP_FAILED) throw Error(std::string(path) + " cannot be mapped");
        start = static_cast<char *>(mapped);
        try {
            index();
        } catch (...) {
            munmap(start, nbytes);
            throw;
        }
    }
    ~File() { munmap(start, nbytes); }
    File(const File &) = delete;

    template <class T> T at(uint64_t place) const {
        T value;
        if (place > nbytes || nbytes - place < sizeof(T)) throw Error("the package is not whole");
        std::memcpy(&value, start + place, sizeof(T));
        return value;
    }

    // The archive's directory, with the numbers of 64 bits that large files have.
    void index() {
        if (nbytes < 22) throw Error("no package");
        uint64_t end = nbytes - 22;
        while (at<uint32_t>(end) != 0x06054b50u) if (end-- == 0) throw Error("no package");
        uint64_t count = at<uint16_t>(end + 10), place = at<uint32_t>(end + 16);
        if (place == 0xFFFFFFFFu || count == 0xFFFFu) {
            const uint64_t large = at<uint64_t>(end - 20 + 8);
            count = at<uint64_t>(large + 32), place = at<uint64_t>(large + 48);
        }
        for (; count-- > 0;) {
            if (at<uint32_t>(place) != 0x02014b50u) throw Error("the package is not whole");
            const uint32_t crc = at<uint32_t>(place + 16);
            uint64_t packed = at<uint32_t>(place + 20), size = at<uint32_t>(place + 24), local = at<uint32_t>(place + 42);
            const uint16_t method = at<uint16_t>(place + 10), name = at<uint16_t>(place + 28), extra = at<uint16_t>(place + 30);
            uint64_t field = place + 46 + name;
            const uint64_t stop = field + extra;
            for (uint64_t next; field + 4 <= stop; field = next) {
                next = field + 4 + at<uint16_t>(field + 2);
                if (at<uint16_t>(field) != 1) continue;
                uint64_t value = field + 4;
                for (uint64_t *number : {&size, &packed, &local})
                    if (*number == 0xFFFFFFFFu) *number = at<uint64_t>(value), value += 8;
            }
            const uint64_t data = local + 30 + at<uint16_t>(local + 26) + at<uint16_t>(local + 28);
            if (data > nbytes || nbytes - data < packed || place + 46 + name > nbytes) throw Error("the package is not whole");
            const std::string called(start + place + 46, name);
            const Member member{start + data, static_cast<size_t>(size)};
            if (method == 0) {
                if (called != "weights.safetensors" && crc_of(member) != crc) throw Error(called + " is damaged");
                members[called] = member;
            }
            place = stop + at<uint16_t>(place + 32);
        }
    }

    const Member &member(const std::string &name) const {
        const auto found = members.find(name);
        if (found == members.end()) throw Error("the package has no " + name);
        return found->second;
    }
};

// -- lines and words ------------------------------------------------------------------------------------------
// By hand: streams go by the locale of the program around, and crash where it has two C++ libraries.
struct Text {
    std::string_view rest;

    bool cut(char end, std::string_view &part) {  // the next part, up to the character
        if (rest.empty()) return false;
        const size_t n = std::min(rest.find(end), rest.size());
        part = rest.substr(0, n);
        rest.remove_prefix(std::min(n + 1, rest.size()));
        return true;
    }
    std::string_view line() {
        std::string_view found;
        if (!cut('\n', found)) throw Error("the package is not whole");
        return found;
    }
};

std::string processor() {  // as dynamotor names it
    std::string all, found;
    if (FILE *file = std::fopen("/proc/cpuinfo", "r")) {
        char some[4096];
        while (const size_t n = std::fread(some, 1, sizeof some, file)) all.append(some, n);
        std::fclose(file);
    }
    Text text{all};
    for (std::string_view line; text.cut('\n', line) && !line.empty();)
        for (const std::string_view begin : {"model", "flags", "Features", "CPU", "vendor_id"})
            if (line.substr(0, begin.size()) == begin) {
                found.append(found.empty() ? "" : "\n").append(line);
                break;
            }
    return found;
}

struct Words {
    Text text;

    template <class T> T next() {
        std::string_view word;
        if (!text.cut(' ', word)) throw Error("a step is not whole");
        if constexpr (std::is_same_v<T, std::string>) {
            return std::string(word);
        } else {
            T value;
            const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
            if (error != std::errc() || end != word.data() + word.size()) throw Error("a step is not whole");
            return value;
        }
    }
    Ints ints(int64_t n) {
        Ints found;
        while (n-- > 0) found.push_back(next<int64_t>());
        return found;
    }
    Ints list() { return ints(next<int64_t>()); }
    Layout layout() {
        Layout found;
        found.dtype = next<int32_t>();
        const int64_t ndim = next<int64_t>();
        found.sizes = ints(ndim), found.strides = ints(ndim);
        return found;
    }
};

}  // namespace

// -- a package ------------------------------------------------------------------------------------------------
struct dynamotor_results {
    std::vector<Tensor> tensors;
    std::vector<dynamotor_tensor> shown;
};

struct dynamotor_package {
    using Step = std::function<void(dynamotor_package &)>;
    using Word = std::function<uint64_t(dynamotor_package &)>;  // an argument as the dispatcher takes it, which then owns it

    File file;
    std::string torch_library, torch_version;
    bool torch_is_anywhere;
    std::unique_ptr<Torch> torch;
    std::vector<void *> libraries;  // kernels stay loaded: threads of OpenMP may still be in them
    Ints offsets;                   // of weights
    char *weights = nullptr;
    std::vector<Tensor> slots;
    std::shared_ptr<void> block;
    std::vector<int64_t> argument_slots;
    std::vector<Layout> argument_layouts;
    std::vector<std::pair<size_t, size_t>> same, distinct;  // arguments that must be one tensor, or two
    std::vector<dynamotor_tensor> arguments;
    std::vector<Step> steps;
    std::vector<int64_t> results;
    std::mutex running;

    dynamotor_package(const char *path, const char *library)
        : file(path), torch_library(library ? library : ""), torch_is_anywhere(!library) {
        const Member &text = file.member("steps.txt");
        Text lines{{text.data, text.nbytes}};
        check_machine(lines);
        const Member &stored = file.member("weights.safetensors");
        uint64_t header;
        std::memcpy(&header, stored.data, 8);
        weights = stored.data + 8 + header;
        bool once = true;
        for (std::string_view line; lines.cut('\n', line);) {
            if (line == "run") {
                once = false;
                continue;
            }
            Words words{{line}};
            const Step step = step_of(words.next<std::string>(), words);
            if (step && once) {
                const WithoutGrad quiet(torch.get());
                step(*this);
            } else if (step) {
                steps.push_back(step);
            }
        }
        for (size_t k = 0; k < argument_slots.size(); k++) {
            const Layout &layout = argument_layouts[k];
            arguments.push_back({nullptr, layout.dtype, static_cast<int32_t>(layout.sizes.size()), layout.sizes.data(),
                                 layout.strides.data()});
        }
    }

    void check_machine(Text &lines) {
        const std::string format(lines.line());
        if (format != "dynamotor-package-3") throw Error("a package of another format: " + format);
        torch_version = lines.line();
        std::string built;
        for (int count = Words{{lines.line()}}.next<int>(); count-- > 0;) built.append(built.empty() ? "" : "\n").append(lines.line());
        if (built != processor()) throw Error("the package was built for another processor: export it on one like this");
    }

    Torch &with_torch() {
        if (!torch) {
            auto found = std::make_unique<Torch>(torch_is_anywhere ? nullptr : torch_library.c_str());
            const uint64_t here = found->version();
            const std::string number = std::to_string(here >> 56) + "." + std::to_string(here >> 48 & 255) + ".";
            if (torch_version.rfind(number, 0) != 0)
                throw Error("the package was built for torch " + torch_version + ", and libtorch here is " + number + "x");
            torch = std::move(found);
        }
        return *torch;
    }

    Tensor &slot(int64_t number) {
        if (number < 0 || number > 1 << 24) throw Error("a step is not whole");
        if (static_cast<size_t>(number) >= slots.size()) slots.resize(number + 1);
        return slots[number];
    }

    // A tensor's data; what an op gave is asked for it.
    char *data_of(Tensor &tensor) {
        if (!tensor.data && tensor.handle) {
            void *found;
            torch->check(torch->data(tensor.handle.get(), &found));
            tensor.data = static_cast<char *>(found);
        }
        return tensor.data;
    }

    std::shared_ptr<void> owned(Handle handle) {
        return {handle, [destroy = torch->destroy](void *one) { destroy(one); }};
    }

    Handle handle_of(Tensor &tensor) {
        if (!tensor.handle) {
            const Layout &layout = tensor.layout;
            Handle made;
            torch->check(torch->create(tensor.data, layout.sizes.size(), layout.sizes.data(), layout.strides.data(), 0,
                                       layout.dtype, 0, 0, &made));
            tensor.handle = owned(made);
        }
        return tensor.handle.get();
    }

    Step step_of(const std::string &name, Words &words);
    Step call_of(Words &words);
    Step convolution_of(Words &words);
    Word word_of(Words &words);
    void expect(int64_t slot, const Layout &layout);
    dynamotor_results *run(const dynamotor_tensor *given, size_t n);
    void take_argument(size_t k, const dynamotor_tensor &given);
};

dynamotor_package::Word dynamotor_package::word_of(Words &words) {
    using Package = dynamotor_package;
    const std::string word = words.next<std::string>(), rest = word.substr(1);
    switch (word[0]) {
    case 'n': return [](Package &) -> uint64_t { return 0; };
    case 'i': return [value = std::strtoll(rest.c_str(), nullptr, 10)](Package &) { return static_cast<uint64_t>(value); };
    case 't': return [number = std::stoll(rest)](Package &self) {
        Handle given;
        self.torch->check(self.torch->again(self.handle_of(self.slot(number)), &given));
        return reinterpret_cast<uint64_t>(given);
    };
    case 's': return [rest](Package &self) {
        Handle made;
        self.torch->check(self.torch->new_string(rest.data(), rest.size(), &made));
        return reinterpret_cast<uint64_t>(made);
    };
    case '?': return [inner = word_of(words)](Package &self) { return reinterpret_cast<uint64_t>(new uint64_t(inner(self))); };
    case 'L': {
        std::vector<Word> items;
        for (int64_t n = std::stoll(rest); n-- > 0;) items.push_back(word_of(words));
        return [items](Package &self) {
            Handle list;
            self.torch->check(self.torch->new_list(items.size(), &list));
            for (const Word &item : items) self.torch->check(self.torch->push(list, item(self)));
            return reinterpret_cast<uint64_t>(list);
        };
    }
    }
    throw Error("an argument that this loader does not know: " + word);
}

dynamotor_package::Step dynamotor_package::call_of(Words &words) {
    const std::string op = words.next<std::string>(), name = words.next<std::string>();
    const std::string overload = name == "-" ? "" : name;
    std::vector<Word> given;
    for (int64_t n = words.next<int64_t>(); n-- > 0;) given.push_back(word_of(words));
    const Ints made = words.list();
    with_torch();
    return [=](dynamotor_package &self) {
        std::vector<uint64_t> stack;
        for (const Word &word : given) stack.push_back(word(self));
        stack.resize(std::max(stack.size(), made.size()) + 1);
        self.torch->check(self.torch->call(op.c_str(), overload.c_str(), stack.data(), self.torch->version()), op);
        for (size_t k = 0; k < made.size(); k++) {
            auto handle = self.owned(reinterpret_cast<Handle>(stack[k]));
            if (made[k] < 0) continue;
            Tensor result;
            result.handle = std::move(handle);
            self.slot(made[k]) = std::move(result);
        }
    };
}

// oneDNN's convolution with what follows it: X, (another operand,) W, B, padding, stride, dilation, groups, what follows.
dynamotor_package::Step dynamotor_package::convolution_of(Words &words) {
    const std::string name = words.next<std::string>();
    const bool binary = name.find("_binary") != std::string::npos;
    const int64_t made = words.next<int64_t>(), x = words.next<int64_t>(), other = binary ? words.next<int64_t>() : 0,
                  w = words.next<int64_t>();
    const std::string given_bias = words.next<std::string>();
    const int64_t b = given_bias == "n" ? -1 : std::stoll(given_bias);
    const Ints padding = words.list(), stride = words.list(), dilation = words.list();
    const int64_t groups = words.next<int64_t>();
    const std::string attr = words.next<std::string>(), alpha = binary ? words.next<std::string>() : "n",
                      unary = binary ? words.next<std::string>() : "n";
    const Ints bits = words.list();
    const std::string algorithm = words.next<std::string>();
    void (*function)();
    with_torch().find(function, name.c_str());
    return [=](dynamotor_package &self) {
        const auto text = [](const std::string &word) { return word.c_str() + 1; };
        const char *unary_text = text(unary), *algorithm_text = text(algorithm);
        const char **unary_given = unary == "n" ? nullptr : &unary_text, **algorithm_given = algorithm == "n" ? nullptr : &algorithm_text;
        std::vector<double> scalars(bits.size());
        if (!bits.empty()) std::memcpy(scalars.data(), bits.data(), bits.size() * sizeof(double));
        std::vector<const double *> pointers;
        for (const double &scalar : scalars) pointers.push_back(&scalar);
        Handle bias = b < 0 ? nullptr : self.handle_of(self.slot(b)), *bias_given = b < 0 ? nullptr : &bias, result;
        const int64_t p = padding.size(), s = stride.size(), d = dilation.size(), n = pointers.size();
        if (binary) {
            using Binary = int32_t(Handle, Handle, Handle, Handle *, const int64_t *, int64_t, const int64_t *, int64_t,
                                   const int64_t *, int64_t, int64_t, const char *, double *, const char **,
                                   const double **, int64_t, const char **, Handle *);
            double factor = 1;
            const int64_t factor_bits = alpha == "n" ? 0 : std::stoll(alpha);
            if (alpha != "n") std::memcpy(&factor, &factor_bits, sizeof factor);
            self.torch->check(reinterpret_cast<Binary *>(function)(
                self.handle_of(self.slot(x)), self.handle_of(self.slot(other)), self.handle_of(self.slot(w)), bias_given,
                padding.data(), p, stride.data(), s, dilation.data(), d, groups, text(attr),
                alpha == "n" ? nullptr : &factor, unary_given, pointers.data(), n, algorithm_given, &result));
        } else {
            using Unary = int32_t(Handle, Handle, Handle *, const int64_t *, int64_t, const int64_t *, int64_t,
                                  const int64_t *, int64_t, int64_t, const char *, const double **, int64_t,
                                  const char **, Handle *);
            self.torch->check(reinterpret_cast<Unary *>(function)(
                self.handle_of(self.slot(x)), self.handle_of(self.slot(w)), bias_given, padding.data(), p,
                stride.data(), s, dilation.data(), d, groups, text(attr), pointers.data(), n, algorithm_given, &result));
        }
        Tensor tensor;
        tensor.handle = self.owned(result);
        self.slot(made) = std::move(tensor);
    };
}

// What an op gave is as the program was compiled for, or only its strides differ and it is laid out anew.
void dynamotor_package::expect(int64_t number, const Layout &layout) {
    Tensor &tensor = slot(number);
    const Handle handle = handle_of(tensor);
    int64_t ndim, *sizes, *strides;
    Layout found;
    torch->check(torch->dim(handle, &ndim));
    torch->check(torch->dtype(handle, &found.dtype));
    torch->check(torch->sizes(handle, &sizes));
    torch->check(torch->strides(handle, &strides));
    found.sizes.assign(sizes, sizes + ndim), found.strides.assign(strides, strides + ndim);
    if (found.dtype != layout.dtype || found.sizes != layout.sizes) throw Error("an op gave a tensor of another shape or dtype");
    data_of(tensor);
    tensor.layout = found;
    if (!found.lies_as(layout)) tensor = laid_out(tensor, layout.strides);
    tensor.layout = layout;
}

dynamotor_package::Step dynamotor_package::step_of(const std::string &name, Words &words) {
    using Package = dynamotor_package;
    if (name == "refused") throw Error("only Python runs this package: " + std::string(words.text.rest));
    if (name == "weights") {
        offsets = words.list();
        return {};
    }
    if (name == "arguments") {
        argument_slots.resize(words.next<int64_t>());
        argument_layouts.resize(argument_slots.size());
        return {};
    }
    if (name == "same" || name == "distinct") {
        const size_t a = words.next<size_t>(), b = words.next<size_t>();
        if (std::max(a, b) >= argument_slots.size()) throw Error("a step is not whole");
        (name == "same" ? same : distinct).emplace_back(a, b);
        return {};
    }
    if (name == "library") {
        const std::string key = words.next<std::string>();
        const Member &member = file.member(key + ".so");
        const int memory = memfd_create(key.substr(0, 16).c_str(), 0);  // stays open: the loader knows libraries by path
        for (size_t done = 0; done < member.nbytes;) {
            const ssize_t n = write(memory, member.data + done, member.nbytes - done);
            if (n <= 0) throw Error("no memory for the package's kernels");
            done += n;
        }
        libraries.push_back(dlopen(("/proc/self/fd/" + std::to_string(memory)).c_str(), RTLD_NOW | RTLD_LOCAL));
        if (!libraries.back()) throw Error(std::string("the package's kernels cannot be loaded: ") + dlerror());
        return {};
    }
    if (name == "block") {
        block = allocate(words.next<int64_t>());
        return {};
    }
    if (name == "return") {
        results = words.list();
        return {};
    }
    if (name == "kernel") {
        const size_t library = words.next<size_t>();
        const std::string called = words.next<std::string>();
        const Ints operands = words.list(), numbers = words.list();
        using Kernel = void(void **, const int64_t *);
        auto *kernel = reinterpret_cast<Kernel *>(dlsym(libraries.at(library), called.c_str()));
        if (!kernel) throw Error("the package has no kernel " + called);
        return [=](Package &self) {
            std::vector<void *> pointers;
            for (int64_t operand : operands) pointers.push_back(self.data_of(self.slot(operand)));
            int64_t out_of_range = 0;
            pointers.push_back(&out_of_range);
            kernel(pointers.data(), numbers.data());
            if (out_of_range) throw Error("index out of range in self");
        };
    }
    if (name == "call") return call_of(words);
    if (name == "convolution") return convolution_of(words);
    if (name == "product") {
        using Product = int32_t(Handle, Handle, Handle, Handle, double, double);
        Product *product;
        with_torch().find(product, words.next<std::string>().c_str());
        const Ints operands = words.ints(4);
        const Ints bits = words.ints(2);
        return [=](Package &self) {
            Handle handles[4];
            double numbers[2];
            for (int k = 0; k < 4; k++) handles[k] = self.handle_of(self.slot(operands[k]));
            std::memcpy(numbers, bits.data(), sizeof numbers);
            self.torch->check(product(handles[0], handles[1], handles[2], handles[3], numbers[0], numbers[1]));
        };
    }
    const int64_t made = words.next<int64_t>();
    if (name == "argument") {
        const size_t k = words.next<size_t>();
        argument_slots.at(k) = made;
        argument_layouts.at(k) = words.layout();
        return {};
    }
    if (name == "weight") {
        const int64_t k = words.next<int64_t>();
        Tensor &tensor = slot(made);
        tensor.layout = words.layout();
        tensor.data = weights + offsets.at(k);
        if (tensor.data + tensor.layout.nbytes() > file.start + file.nbytes) throw Error("the package is not whole");
        return {};
    }
    if (name == "scratch") {
        Tensor &tensor = slot(made);
        tensor.data = static_cast<char *>(block.get()) + words.next<int64_t>();
        tensor.layout = words.layout();
        return {};
    }
    if (name == "new") return [made, layout = words.layout()](Package &self) { self.slot(made) = fresh(layout); };
    if (name == "free") return [made](Package &self) { self.slot(made) = Tensor(); };
    if (name == "expect") return [made, layout = words.layout()](Package &self) { self.expect(made, layout); };
    if (name == "copied") {
        const int64_t from = words.next<int64_t>();
        const Ints strides = words.list();
        return [=](Package &self) {
            self.data_of(self.slot(from));
            self.slot(made) = laid_out(self.slot(from), strides);
        };
    }
    if (name == "view") {
        const int64_t base = words.next<int64_t>(), offset = words.next<int64_t>();
        const Layout layout = words.layout();
        return [=](Package &self) {
            Tensor view = self.slot(base);
            const int32_t dtype = view.layout.dtype;
            const auto keeps = view.memory ? view.memory : view.handle;
            view.data = self.data_of(self.slot(base)) + offset * static_cast<int64_t>(view.layout.itemsize());
            view.layout = layout;
            if (layout.dtype < 0) view.layout.dtype = dtype;
            view.handle = nullptr;
            view.memory = keeps;
            self.slot(made) = std::move(view);
        };
    }
    throw Error("a step that this loader does not know: " + name);
}

void dynamotor_package::take_argument(size_t k, const dynamotor_tensor &given) {
    const Layout &layout = argument_layouts[k];
    const std::string which = "argument " + std::to_string(k);
    Tensor tensor;
    tensor.layout.dtype = given.dtype;
    tensor.layout.sizes.assign(given.sizes, given.sizes + given.ndim);
    if (given.dtype != layout.dtype || tensor.layout.sizes != layout.sizes)
        throw Error(which + " has another shape or dtype than at the export");
    if (!given.data && layout.count()) throw Error(which + " has no data");
    if (given.strides) tensor.layout.strides.assign(given.strides, given.strides + given.ndim);
    else tensor.layout.strides = row_major(layout.sizes);  // of elements alone, which are laid out as at the export
    if (given.strides && tensor.layout.strides != layout.strides) throw Error(which + " has other strides than at the export");
    tensor.data = static_cast<char *>(given.data);
    if (!tensor.layout.lies_as(layout)) tensor = laid_out(tensor, layout.strides);
    tensor.layout = layout;
    slot(argument_slots[k]) = std::move(tensor);
}

dynamotor_results *dynamotor_package::run(const dynamotor_tensor *given, size_t n) {
    const std::lock_guard<std::mutex> alone(running);
    if (n != argument_slots.size()) throw Error("the package takes " + std::to_string(argument_slots.size()) + " tensors");
    for (const auto &[a, b] : same)
        if (given[a].data != given[b].data)
            throw Error("arguments " + std::to_string(a) + " and " + std::to_string(b) + " were one tensor at the export");
    for (const auto &[a, b] : distinct)
        if (given[a].data == given[b].data && given[a].data)
            throw Error("arguments " + std::to_string(a) + " and " + std::to_string(b) + " were two tensors at the export");
    for (size_t k = 0; k < n; k++) take_argument(k, given[k]);
    const WithoutGrad quiet(torch.get());
    for (const Step &step : steps) step(*this);
    auto found = std::make_unique<dynamotor_results>();
    for (int64_t number : results) {
        Tensor &tensor = slot(number);
        data_of(tensor);
        found->tensors.push_back(tensor);
    }
    for (const Tensor &tensor : found->tensors) {
        const Layout &layout = tensor.layout;
        found->shown.push_back({tensor.data, layout.dtype, static_cast<int32_t>(layout.sizes.size()), layout.sizes.data(),
                                layout.strides.data()});
    }
    return found.release();
}

namespace {

template <class F> auto guarded(F function) -> decltype(function()) {
    try {
        return function();
    } catch (const std::exception &error) {
        last_error = error.what();
    }
    return nullptr;
}

}  // namespace

dynamotor_package *dynamotor_load(const char *path, const char *torch_library) {
    return guarded([=] { return new dynamotor_package(path, torch_library); });
}
void dynamotor_unload(dynamotor_package *package) { delete package; }
size_t dynamotor_n_arguments(const dynamotor_package *package) { return package->arguments.size(); }
const dynamotor_tensor *dynamotor_argument(const dynamotor_package *package, size_t k) { return &package->arguments.at(k); }
dynamotor_results *dynamotor_run(dynamotor_package *package, const dynamotor_tensor *arguments, size_t n) {
    return guarded([=] { return package->run(arguments, n); });
}
size_t dynamotor_n_results(const dynamotor_results *results) { return results->shown.size(); }
const dynamotor_tensor *dynamotor_result(const dynamotor_results *results, size_t k) { return &results->shown.at(k); }
void dynamotor_free_results(dynamotor_results *results) { delete results; }
const char *dynamotor_error(void) { return last_error.c_str(); }
