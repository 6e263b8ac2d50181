// Loads and runs packages; dynamotor_package.h says how it is used, tools/package_program.py writes what is read here.
//
// A package is a zip archive without compression: steps.txt, the shared objects of its kernels and the weights
// are used where they lie in the mapped file, whose pages are this process's own once they are written: so are
// tensors that programs write, the package's state. Each line of steps.txt becomes a closure.
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
    bool is_borrowed = false;      // the memory is the caller's, or the package's: no result may show it
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

void copy(const Tensor &from, const Tensor &to) {  // tensors of the same sizes
    const Layout &layout = to.layout;
    const size_t nbytes = layout.itemsize(), ndim = layout.sizes.size();
    Ints at(ndim, 0);
    int64_t source = 0, target = 0;
    for (int64_t n = layout.count(); n-- > 0;) {
        std::memcpy(to.data + target * nbytes, from.data + source * nbytes, nbytes);
        for (size_t d = ndim; d-- > 0;) {
            source += from.layout.strides[d], target += layout.strides[d];
            if (++at[d] < layout.sizes[d]) break;
            source -= at[d] * from.layout.strides[d], target -= at[d] * layout.strides[d], at[d] = 0;
        }
    }
}

Tensor laid_out(const Tensor &from, const Ints &strides) {
    Layout layout = from.layout;
    layout.strides = strides;
    Tensor made = fresh(layout);
    copy(from, made);
    return made;
}

bool overlap(const Tensor &a, const Tensor &b) {
    const size_t na = a.layout.nbytes(), nb = b.layout.nbytes();
    return na && nb && a.data < b.data + nb && b.data < a.data + na;
}

// A size of a program: a number, or the place of one that differs between calls.
struct Size {
    int64_t value = 0;
    bool differs = false;
};
using Sizes = std::vector<Size>;

struct Shape {  // how a tensor is laid out, once the sizes are known
    Layout fixed;
    Sizes sizes, strides;
    bool differs = false;
};

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
        const Shape found = shape();
        if (found.differs) throw Error("a step is not whole");
        return found.fixed;
    }
    Size size() {
        const std::string word = next<std::string>();
        if (word.empty()) throw Error("a step is not whole");
        Words number{{std::string_view(word).substr(word[0] == '$')}};
        return {number.next<int64_t>(), word[0] == '$'};
    }
    Sizes sizes(int64_t n) {
        Sizes found;
        while (n-- > 0) found.push_back(size());
        return found;
    }
    Shape shape() {
        Shape found;
        found.fixed.dtype = next<int32_t>();
        const int64_t ndim = next<int64_t>();
        found.sizes = sizes(ndim), found.strides = sizes(ndim);
        for (const Sizes *some : {&found.sizes, &found.strides})
            for (const Size &one : *some) {
                found.differs |= one.differs;
                (some == &found.sizes ? found.fixed.sizes : found.fixed.strides).push_back(one.differs ? -1 : one.value);
            }
        return found;
    }
    std::string last() {  // the words that are left
        const std::string found(text.rest);
        text.rest = {};
        return found;
    }
};

}  // namespace

// -- a package ------------------------------------------------------------------------------------------------
struct dynamotor_results {
    std::vector<Tensor> tensors;
    std::vector<dynamotor_tensor> shown;
};

namespace {

// What the programs of a package share.
struct Shared {
    File file;
    std::string torch_library, torch_version;
    bool torch_is_anywhere;
    std::unique_ptr<Torch> torch;
    std::map<std::string, void *> libraries;  // kernels stay loaded: threads of OpenMP may still be in them
    Ints offsets;                             // of weights
    char *weights = nullptr;
    std::vector<std::string> state_names;
    std::vector<Tensor> state;
    std::mutex running;

    Shared(const char *path, const char *library)
        : file(path), torch_library(library ? library : ""), torch_is_anywhere(!library) {
        const Member &stored = file.member("weights.safetensors");
        uint64_t header;
        std::memcpy(&header, stored.data, 8);
        weights = stored.data + 8 + header;
    }

    void check_machine(Text &lines) {
        const std::string format(lines.line());
        if (format != "dynamotor-package-4") throw Error("a package of another format: " + format);
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

    Tensor weight(int64_t k, Layout layout) {
        Tensor tensor;
        tensor.layout = std::move(layout);
        tensor.data = weights + offsets.at(k);
        tensor.is_borrowed = true;
        if (tensor.data + tensor.layout.nbytes() > file.start + file.nbytes) throw Error("the package is not whole");
        return tensor;
    }

    void *library(const std::string &key) {
        void *&found = libraries[key];
        if (found) return found;
        const Member &member = file.member(key + ".so");
        const int memory = memfd_create(key.substr(0, 16).c_str(), 0);  // stays open: the loader knows libraries by path
        for (size_t done = 0; done < member.nbytes;) {
            const ssize_t n = write(memory, member.data + done, member.nbytes - done);
            if (n <= 0) throw Error("no memory for the package's kernels");
            done += n;
        }
        found = dlopen(("/proc/self/fd/" + std::to_string(memory)).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!found) throw Error(std::string("the package's kernels cannot be loaded: ") + dlerror());
        return found;
    }
};

// A size that an argument has at a call, and the range that the program takes.
struct Given {
    int64_t place;
    size_t argument, dim;
    bool is_stride;
    int64_t lo, hi;
};

[[noreturn]] void not_built_for(const std::string &what) { throw Error("[DM115] the package was not built for " + what); }

struct Program {
    using Step = std::function<void(Program &)>;
    using Word = std::function<uint64_t(Program &)>;  // an argument as the dispatcher takes it, which then owns it

    Shared &shared;
    Torch *torch = nullptr;
    std::vector<void *> libraries;
    std::vector<Tensor> slots;
    std::shared_ptr<void> block;
    std::vector<int64_t> argument_slots;
    std::vector<Shape> argument_shapes;
    std::vector<std::string> argument_names;
    std::vector<std::pair<size_t, size_t>> same, distinct, apart;  // arguments that must be one tensor, two, or apart in memory
    std::vector<size_t> written;
    std::vector<std::pair<size_t, Tensor>> written_copies;  // of arguments that came in another layout
    std::vector<dynamotor_tensor> arguments;
    std::vector<Given> given_sizes;
    Ints numbers, latest;  // the sizes that differ between calls, and those of the latest call
    std::vector<Step> sizing, steps;
    std::vector<int64_t> results;
    size_t omitted = 0;  // the step that the sizes of this call choose another one for
    bool asks_strides = false;  // the program looks at its arguments' strides, also of dimensions of size 1
    bool once = true;

    explicit Program(Shared &shared) : shared(shared) {}

    void add(std::string_view line) {
        if (line == "run") {
            once = false;
            return;
        }
        Words words{{line}};
        const std::string name = words.next<std::string>();
        const Step step = step_of(name, words);
        const bool sizes = name == "number" || name == "holds" || name == "block" || name == "scratch";
        if (!step) return;
        if (sizes && !given_sizes.empty()) sizing.push_back(step);
        else if (once || sizes) {
            const WithoutGrad quiet(torch);
            step(*this);
        } else steps.push_back(step);
    }

    void close() {
        for (const Shape &shape : argument_shapes)
            arguments.push_back({nullptr, shape.fixed.dtype, static_cast<int32_t>(shape.sizes.size()), shape.fixed.sizes.data(),
                                 shape.fixed.strides.data()});
    }

    Torch &with_torch() {
        torch = &shared.with_torch();
        return *torch;
    }

    int64_t at(const Size &size) const { return size.differs ? numbers.at(size.value) : size.value; }
    Ints at(const Sizes &sizes) const {
        Ints found;
        found.reserve(sizes.size());
        for (const Size &size : sizes) found.push_back(at(size));
        return found;
    }
    Layout at(const Shape &shape) const {
        return shape.differs ? Layout{shape.fixed.dtype, at(shape.sizes), at(shape.strides)} : shape.fixed;
    }

    int64_t &number(int64_t place) {
        if (place < 0 || place > 1 << 24) throw Error("a step is not whole");
        if (static_cast<size_t>(place) >= numbers.size()) numbers.resize(place + 1);
        return numbers[place];
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
    Step sizing_of(const std::string &name, Words &words);
    dynamotor_results *run(const dynamotor_tensor *given, size_t n);
    void read_sizes(const dynamotor_tensor *given);
    void take_argument(size_t k, const dynamotor_tensor &given);
    void check_memory() const;
};

Program::Word Program::word_of(Words &words) {
    const std::string word = words.next<std::string>(), rest = word.substr(1);
    switch (word[0]) {
    case 'n': return [](Program &) -> uint64_t { return 0; };
    case 'i': return [value = std::strtoll(rest.c_str(), nullptr, 10)](Program &) { return static_cast<uint64_t>(value); };
    case 'v': return [size = Words{{rest}}.size()](Program &self) { return static_cast<uint64_t>(self.at(size)); };
    case 't': return [number = std::stoll(rest)](Program &self) {
        Handle given;
        self.torch->check(self.torch->again(self.handle_of(self.slot(number)), &given));
        return reinterpret_cast<uint64_t>(given);
    };
    case 's': return [rest](Program &self) {
        Handle made;
        self.torch->check(self.torch->new_string(rest.data(), rest.size(), &made));
        return reinterpret_cast<uint64_t>(made);
    };
    case '?': return [inner = word_of(words)](Program &self) { return reinterpret_cast<uint64_t>(new uint64_t(inner(self))); };
    case 'L': {
        std::vector<Word> items;
        for (int64_t n = std::stoll(rest); n-- > 0;) items.push_back(word_of(words));
        return [items](Program &self) {
            Handle list;
            self.torch->check(self.torch->new_list(items.size(), &list));
            for (const Word &item : items) self.torch->check(self.torch->push(list, item(self)));
            return reinterpret_cast<uint64_t>(list);
        };
    }
    }
    throw Error("an argument that this loader does not know: " + word);
}

Program::Step Program::call_of(Words &words) {
    const std::string op = words.next<std::string>(), name = words.next<std::string>();
    const std::string overload = name == "-" ? "" : name;
    std::vector<Word> given;
    for (int64_t n = words.next<int64_t>(); n-- > 0;) given.push_back(word_of(words));
    const Ints made = words.list();
    with_torch();
    return [=](Program &self) {
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
Program::Step Program::convolution_of(Words &words) {
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
    return [=](Program &self) {
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
void Program::expect(int64_t number, const Layout &layout) {
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

Program::Step Program::step_of(const std::string &name, Words &words) {
    if (name == "refused") throw Error("only Python runs this package: " + std::string(words.text.rest));
    if (name == "arguments") {
        argument_slots.resize(words.next<int64_t>());
        argument_shapes.resize(argument_slots.size());
        argument_names.resize(argument_slots.size());
        return {};
    }
    if (name == "named") {
        const size_t k = words.next<size_t>();
        argument_names.at(k) = words.last();
        return {};
    }
    if (name == "same" || name == "distinct" || name == "apart") {
        const size_t a = words.next<size_t>(), b = words.next<size_t>();
        if (std::max(a, b) >= argument_slots.size()) throw Error("a step is not whole");
        (name == "same" ? same : name == "distinct" ? distinct : apart).emplace_back(a, b);
        return {};
    }
    if (name == "asks") {
        asks_strides = true;
        return {};
    }
    if (name == "written") {
        written.push_back(words.next<size_t>());
        return {};
    }
    if (name == "size" || name == "stride") {
        const Size place = words.size();
        const size_t argument = words.next<size_t>(), dim = words.next<size_t>();
        const int64_t lo = words.next<int64_t>(), hi = words.next<int64_t>();
        if (!place.differs || argument >= argument_slots.size()) throw Error("a step is not whole");
        given_sizes.push_back({place.value, argument, dim, name == "stride", lo, hi});
        number(place.value) = -1;
        return {};
    }
    if (name == "number" || name == "holds" || name == "block" || name == "scratch") return sizing_of(name, words);
    if (name == "library") {
        libraries.push_back(shared.library(words.next<std::string>()));
        return {};
    }
    if (name == "return") {
        results = words.list();
        return {};
    }
    if (name == "kernel") {
        const size_t library = words.next<size_t>();
        const std::string called = words.next<std::string>();
        const Ints operands = words.list();
        const Sizes given = words.sizes(words.next<int64_t>());
        bool differs = false;
        for (const Size &size : given) differs |= size.differs;
        const Ints fixed = differs ? Ints() : at(given);
        using Kernel = void(void **, const int64_t *);
        auto *kernel = reinterpret_cast<Kernel *>(dlsym(libraries.at(library), called.c_str()));
        if (!kernel) throw Error("the package has no kernel " + called);
        return [=](Program &self) {
            std::vector<void *> pointers;
            for (int64_t operand : operands) pointers.push_back(self.data_of(self.slot(operand)));
            int64_t out_of_range = 0;
            pointers.push_back(&out_of_range);
            if (differs) kernel(pointers.data(), self.at(given).data());
            else kernel(pointers.data(), fixed.data());
            if (out_of_range) throw Error("index out of range in self");
        };
    }
    if (name == "either") {  // the next step up to a size, the one behind it for others
        const Size size = words.size();
        const int64_t most = words.next<int64_t>();
        return [size, most, next = steps.size() + 1](Program &self) {
            const int64_t value = self.at(size);
            self.omitted = 0 < value && value <= most ? next + 1 : next;
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
        return [=](Program &self) {
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
        argument_shapes.at(k) = words.shape();
        return {};
    }
    if (name == "weight") {
        const int64_t k = words.next<int64_t>();
        slot(made) = shared.weight(k, words.layout());
        return {};
    }
    if (name == "new") return [made, shape = words.shape()](Program &self) { self.slot(made) = fresh(self.at(shape)); };
    if (name == "free") return [made](Program &self) { self.slot(made) = Tensor(); };
    if (name == "expect") return [made, shape = words.shape()](Program &self) { self.expect(made, self.at(shape)); };
    if (name == "copied") {
        const int64_t from = words.next<int64_t>();
        const Sizes strides = words.sizes(words.next<int64_t>());
        return [=](Program &self) {
            self.data_of(self.slot(from));
            self.slot(made) = laid_out(self.slot(from), self.at(strides));
        };
    }
    if (name == "view") {
        const int64_t base = words.next<int64_t>();
        const Size offset = words.size();
        const Shape shape = words.shape();
        return [=](Program &self) {
            Tensor view = self.slot(base);
            const int32_t dtype = view.layout.dtype;
            const auto keeps = view.memory ? view.memory : view.handle;
            view.data = self.data_of(self.slot(base)) + self.at(offset) * static_cast<int64_t>(view.layout.itemsize());
            view.layout = self.at(shape);
            if (view.layout.dtype < 0) view.layout.dtype = dtype;
            view.handle = nullptr;
            view.memory = keeps;
            self.slot(made) = std::move(view);
        };
    }
    throw Error("a step that this loader does not know: " + name);
}

// Steps that are taken when sizes differ from those of the latest call, before all others; once, if none may differ.
Program::Step Program::sizing_of(const std::string &name, Words &words) {
    if (name == "holds") {
        const std::string kind = words.next<std::string>();
        const Size size = words.size();
        return [kind, size, text = words.last()](Program &self) {
            const int64_t value = self.at(size);
            if (kind == ">=" ? value < 0 : (value == 0) != (kind == "==")) not_built_for("sizes for which " + text);
        };
    }
    if (name == "block")
        return [nbytes = words.size()](Program &self) { self.block = allocate(self.at(nbytes)); };
    if (name == "scratch") {
        const int64_t made = words.next<int64_t>();
        const Size offset = words.size();
        const Shape shape = words.shape();
        return [=](Program &self) {
            Tensor tensor;
            tensor.data = static_cast<char *>(self.block.get()) + self.at(offset);
            tensor.layout = self.at(shape);
            tensor.is_borrowed = true;
            self.slot(made) = std::move(tensor);
        };
    }
    const Size made = words.size();
    std::vector<std::string> code;
    for (std::string_view word; words.text.cut(' ', word);) code.emplace_back(word);
    number(made.value);
    return [=](Program &self) {
        Ints stack;
        for (const std::string &word : code) {
            if (word[0] == '$' || word[0] == '-' || (word[0] >= '0' && word[0] <= '9')) {
                stack.push_back(self.at(Words{{word}}.size()));
                continue;
            }
            if (stack.size() < 2) throw Error("a step is not whole");
            const int64_t b = stack.back();
            stack.pop_back();
            int64_t &a = stack.back();
            const bool divides = word == "floordiv" || word == "mod";
            if (divides && b == 0) not_built_for("sizes of which one is divided by zero");
            const int64_t rest = divides ? a % b : 0, wrong = rest && (rest < 0) != (b < 0);  // as Python's
            if (word == "add") a += b;
            else if (word == "sub") a -= b;
            else if (word == "mul") a *= b;
            else if (word == "min") a = std::min(a, b);
            else if (word == "max") a = std::max(a, b);
            else if (word == "floordiv") a = a / b - wrong;
            else if (word == "mod") a = rest + (wrong ? b : 0);
            else throw Error("an operation that this loader does not know: " + word);
        }
        if (stack.size() != 1) throw Error("a step is not whole");
        self.number(made.value) = stack.back();
    };
}

void Program::read_sizes(const dynamotor_tensor *given) {
    if (given_sizes.empty()) return;
    Ints now;
    for (const Given &size : given_sizes) {
        const dynamotor_tensor &tensor = given[size.argument];
        const std::string which = argument_names[size.argument];
        if (static_cast<size_t>(tensor.ndim) != argument_shapes[size.argument].sizes.size())
            not_built_for(which + ", which has another shape: it has " + std::to_string(tensor.ndim) + " dimensions");
        int64_t n = tensor.sizes[size.dim];
        if (size.is_stride) n = tensor.strides ? tensor.strides[size.dim] : row_major(Ints(tensor.sizes, tensor.sizes + tensor.ndim))[size.dim];
        if (n < size.lo || n > size.hi)
            not_built_for(which + " of " + (size.is_stride ? "stride " : "size ") + std::to_string(n) + " in dimension " +
                          std::to_string(size.dim) + ", but for " + std::to_string(size.lo) +
                          (size.hi < INT64_C(1) << 62 ? " to " + std::to_string(size.hi) : " or more"));
        now.push_back(n);
    }
    if (now == latest) return;
    latest.clear();
    for (size_t k = 0; k < now.size(); k++) number(given_sizes[k].place) = now[k];
    for (const Step &step : sizing) step(*this);
    latest = now;
}

void Program::take_argument(size_t k, const dynamotor_tensor &given) {
    const Layout layout = at(argument_shapes[k]);
    const std::string which = argument_names[k];
    Tensor tensor;
    tensor.layout.dtype = given.dtype;
    tensor.layout.sizes.assign(given.sizes, given.sizes + given.ndim);
    if (given.dtype != layout.dtype) not_built_for(which + " of another dtype than at the export");
    if (tensor.layout.sizes != layout.sizes) {
        std::string where;
        for (size_t d = 0; d < layout.sizes.size() && tensor.layout.sizes.size() == layout.sizes.size(); d++)
            if (where.empty() && tensor.layout.sizes[d] != layout.sizes[d])
                where = ": the size in dimension " + std::to_string(d) + " is " + std::to_string(tensor.layout.sizes[d]) +
                        ", and " + std::to_string(layout.sizes[d]) + " was expected";
        not_built_for(which + " of another shape than at the export" + where);
    }
    if (!given.data && layout.count()) throw Error(which + " has no data");
    if (given.strides) tensor.layout.strides.assign(given.strides, given.strides + given.ndim);
    else tensor.layout.strides = row_major(layout.sizes);  // of elements alone, which are laid out as at the export
    if (given.strides && tensor.layout.strides != layout.strides && (asks_strides || !tensor.layout.lies_as(layout))) not_built_for(which + " with other strides than at the export");
    tensor.data = static_cast<char *>(given.data);
    tensor.is_borrowed = true;
    if (!tensor.layout.lies_as(layout)) {
        Tensor made = laid_out(tensor, layout.strides);
        if (std::find(written.begin(), written.end(), k) != written.end()) written_copies.emplace_back(k, tensor);
        tensor = std::move(made);
    }
    tensor.layout = layout;
    slot(argument_slots[k]) = std::move(tensor);
}

// What is written shares no memory with what else is read.
void Program::check_memory() const {
    const auto tensor = [this](size_t k) -> const Tensor & {
        for (const auto &[copied, before] : written_copies)
            if (copied == k) return before;
        return slots[argument_slots[k]];
    };
    for (const auto &[a, b] : apart)
        if (overlap(tensor(a), tensor(b)))
            not_built_for(argument_names[a] + " and " + argument_names[b] + " that share memory, of which one is written");
    for (size_t k = 0; k < argument_slots.size(); k++)
        for (const Tensor &state : shared.state)
            if (overlap(tensor(k), state)) not_built_for(argument_names[k] + " that shares memory with the package's state");
}

dynamotor_results *Program::run(const dynamotor_tensor *given, size_t n) {
    const std::lock_guard<std::mutex> alone(shared.running);
    if (n != argument_slots.size()) throw Error("the package takes " + std::to_string(argument_slots.size()) + " tensors");
    for (const auto &[a, b] : same)
        if (given[a].data != given[b].data)
            not_built_for(argument_names[a] + " and " + argument_names[b] + " that are two tensors: they were one tensor at the export");
    for (const auto &[a, b] : distinct)
        if (given[a].data == given[b].data && given[a].data)
            not_built_for(argument_names[a] + " and " + argument_names[b] + " that are one tensor: they were two tensors at the export");
    written_copies.clear();
    read_sizes(given);
    for (size_t k = 0; k < n; k++) take_argument(k, given[k]);
    check_memory();
    const WithoutGrad quiet(torch);
    omitted = steps.size();
    for (size_t k = 0; k < steps.size(); k++)
        if (k != omitted) steps[k](*this);
    for (const auto &[k, to] : written_copies) copy(slot(argument_slots[k]), to);
    auto found = std::make_unique<dynamotor_results>();
    for (int64_t number : results) {
        Tensor &tensor = slot(number);
        data_of(tensor);
        found->tensors.push_back(tensor.is_borrowed ? laid_out(tensor, tensor.layout.strides) : tensor);
    }
    for (const Tensor &tensor : found->tensors) {
        const Layout &layout = tensor.layout;
        found->shown.push_back({tensor.data, layout.dtype, static_cast<int32_t>(layout.sizes.size()), layout.sizes.data(),
                                layout.strides.data()});
    }
    return found.release();
}

}  // namespace

// Of a method of a package, or of all of it: then `program` is that of the only one.
struct dynamotor_package {
    std::shared_ptr<Shared> shared;
    std::shared_ptr<Program> program;
    std::map<std::string, std::unique_ptr<dynamotor_package>> methods;
    std::vector<dynamotor_tensor> state;

    dynamotor_package(std::shared_ptr<Shared> shared, std::shared_ptr<Program> program)
        : shared(std::move(shared)), program(std::move(program)) {}

    dynamotor_package(const char *path, const char *library) : shared(std::make_shared<Shared>(path, library)) {
        const Member &text = shared->file.member("steps.txt");
        Text lines{{text.data, text.nbytes}};
        shared->check_machine(lines);
        std::shared_ptr<Program> open;
        for (std::string_view line; lines.cut('\n', line);) {
            Words words{{line}};
            const std::string name = words.next<std::string>();
            if (name == "weights") shared->offsets = words.list();
            else if (name == "state") {
                const int64_t k = words.next<int64_t>();
                const Layout layout = words.layout();
                shared->state.push_back(shared->weight(k, layout));
                shared->state_names.push_back(words.last());
            } else if (name == "method") {
                const std::string called = words.last();
                open = std::make_shared<Program>(*shared);
                methods[called] = std::make_unique<dynamotor_package>(shared, open);
                if (called == "forward") program = open;
            } else if (open) open->add(line);
            else throw Error("the package is not whole");
        }
        for (auto &[called, method] : methods) method->program->close();
        for (const Tensor &tensor : shared->state) {
            const Layout &layout = tensor.layout;
            state.push_back({tensor.data, layout.dtype, static_cast<int32_t>(layout.sizes.size()), layout.sizes.data(),
                             layout.strides.data()});
        }
    }

    Program &one() const {
        if (!program) throw Error("[DM115] the package has several methods: call dynamotor_method");
        return *program;
    }
    dynamotor_package *method(const char *name) const {
        const auto found = methods.find(name);
        if (found != methods.end()) return found->second.get();
        throw Error("[DM115] the package has no method " + std::string(name));
    }
};

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
dynamotor_package *dynamotor_method(dynamotor_package *package, const char *name) {
    return guarded([=] { return package->method(name); });
}
size_t dynamotor_n_arguments(const dynamotor_package *package) { return package->program ? package->program->arguments.size() : 0; }
const dynamotor_tensor *dynamotor_argument(const dynamotor_package *package, size_t k) {
    return guarded([=]() -> const dynamotor_tensor * { return &package->one().arguments.at(k); });
}
size_t dynamotor_n_states(const dynamotor_package *package) { return package->state.size(); }
const char *dynamotor_state_name(const dynamotor_package *package, size_t k) {
    return guarded([=] { return package->shared->state_names.at(k).c_str(); });
}
const dynamotor_tensor *dynamotor_state(const dynamotor_package *package, size_t k) {
    return guarded([=] { return &package->state.at(k); });
}
dynamotor_results *dynamotor_run(dynamotor_package *package, const dynamotor_tensor *arguments, size_t n) {
    return guarded([=] { return package->one().run(arguments, n); });
}
size_t dynamotor_n_results(const dynamotor_results *results) { return results->shown.size(); }
const dynamotor_tensor *dynamotor_result(const dynamotor_results *results, size_t k) { return &results->shown.at(k); }
void dynamotor_free_results(dynamotor_results *results) { delete results; }
const char *dynamotor_error(void) { return last_error.c_str(); }
