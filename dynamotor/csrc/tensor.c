/* Reading tensors without torch's headers: the place of at::Tensor inside the Python object is found once by comparing
 * with a handle that torch gives away, and the stable C shim of libtorch (aoti_torch_get_*) reads it from there. When
 * any step of the search is in doubt, `shim.ready` stays false and tensors are read through Python attributes. */
#include "dynamotor.h"
#include <dlfcn.h>

TensorShim shim;

enum { N_LIBRARIES = 3 };
static void *libraries[N_LIBRARIES];

enum { OBJECT_WORDS = 8, IMPL_WORDS = 23 }; /* torch 2.11 has the key set in the last of 23 words, 2.13 in the 22nd */

static void *impl_of_capsule(PyObject *aoti, PyObject *tensor) {
    PyObject *capsule = PyObject_CallMethod(aoti, "unsafe_alloc_void_ptr_from_tensor", "O", tensor);
    if (capsule == NULL) return NULL;
    void **handle = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    void *impl = handle != NULL ? *handle : NULL;
    if (handle != NULL) {
        PyObject *freed = PyObject_CallMethod(aoti, "alloc_tensor_by_stealing_from_void_ptr", "O", capsule);
        Py_XDECREF(freed);
        if (freed == NULL) PyErr_Clear();
    }
    Py_DECREF(capsule);
    return impl;
}

static bool raw_keys(PyObject *torch_c, PyObject *tensor, uint64_t *keys) {
    PyObject *set = PyObject_CallMethod(torch_c, "_dispatch_keys", "O", tensor);
    PyObject *raw = set != NULL ? PyObject_CallMethod(set, "raw_repr", NULL) : NULL;
    Py_XDECREF(set);
    if (raw == NULL) return false;
    *keys = PyLong_AsUnsignedLongLong(raw);
    Py_DECREF(raw);
    return !PyErr_Occurred();
}

/* Keep in `mask` (bit i: word i) only the words of `memory` that hold `wanted`. */
static uint32_t words_holding(const void *memory, int words, uint64_t wanted, uint32_t mask) {
    const uint64_t *word = memory;
    mask &= (1u << words) - 1;
    for (int i = 0; i < words; i++)
        if (word[i] != wanted) mask &= ~(1u << i);
    return mask;
}

static const char *SAMPLES =
    "(torch.ones(2, 3), torch.ones(4, dtype=torch.complex64).conj(), torch.nn.Parameter(torch.ones(5)),"
    " torch.empty(2, device='meta'), torch.ones(3).to_sparse(), torch.ones(2, 2)[1:], torch._neg_view(torch.ones(2)),"
    " torch._efficientzerotensor((2,)))";
enum { PLAIN = 0, CONJUGATE = 1, META = 3, SPARSE = 4, NEGATIVE = 6, ZEROS = 7, N_SAMPLES = 8 };

/* A tensor's keys as facts of its memory: it holds the elements (not in a sparse or packed form), and holds them as they are. */
static uint64_t dense_key, lazy_keys;

/* Whether its storage identifies the tensor; each copy of an xla tensor has another one, without memory. */
static bool lies_in_storage(int32_t device_type) { return device_type <= 1; /* c10::DeviceType: CPU, CUDA */ }

static PyObject *slow_storage(PyObject *tensor) {
    PyObject *is_cpu = PyObject_GetAttrString(tensor, "is_cpu"), *is_cuda = PyObject_GetAttrString(tensor, "is_cuda");
    bool stored = is_cpu == Py_True || is_cuda == Py_True;
    Py_XDECREF(is_cpu);
    Py_XDECREF(is_cuda);
    PyObject *storage = stored ? PyObject_CallMethod(tensor, "untyped_storage", NULL) : NULL;
    PyObject *number = storage != NULL ? PyObject_GetAttrString(storage, "_cdata") : NULL;
    Py_XDECREF(storage);
    if (number != NULL) return number;
    PyErr_Clear();
    return PyLong_FromLong(0);
}

static bool find_offsets(PyObject *torch) {
    PyObject *torch_c = PyObject_GetAttrString(torch, "_C");
    PyObject *aoti = torch_c != NULL ? PyObject_GetAttrString(torch_c, "_aoti") : NULL;
    PyObject *names = PyDict_New();
    PyObject *samples = NULL;
    uint32_t in_object = (1u << OBJECT_WORDS) - 1, in_impl = (1u << IMPL_WORDS) - 1, of_storage = in_impl;
    uint64_t keys[N_SAMPLES];
    bool ok = false;
    if (aoti == NULL || names == NULL || PyDict_SetItemString(names, "torch", torch) < 0) goto done;
    samples = PyRun_String(SAMPLES, Py_eval_input, names, names);
    if (samples == NULL) goto done;
    for (Py_ssize_t i = 0; i < N_SAMPLES; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(samples, i);
        void *impl = impl_of_capsule(aoti, tensor);
        if (impl == NULL || !raw_keys(torch_c, tensor, &keys[i])) goto done;
        int words = (int)(Py_TYPE(tensor)->tp_basicsize / (Py_ssize_t)sizeof(void *));
        in_object = words_holding(tensor, words < OBJECT_WORDS ? words : OBJECT_WORDS, (uint64_t)(uintptr_t)impl, in_object);
        in_impl = words_holding(impl, IMPL_WORDS, keys[i], in_impl);
        if (i == SPARSE || i == META) continue;
        PyObject *storage = slow_storage(tensor);
        if (storage != NULL) of_storage = words_holding(impl, IMPL_WORDS, (uint64_t)PyLong_AsUnsignedLongLong(storage), of_storage);
        Py_XDECREF(storage);
    }
    dense_key = keys[PLAIN] & ~keys[SPARSE];
    lazy_keys = (keys[CONJUGATE] | keys[NEGATIVE] | keys[ZEROS]) & ~keys[PLAIN];
    /* Exactly one word of each must be left. */
    if (__builtin_popcount(in_object) == 1 && __builtin_popcount(in_impl) == 1 && __builtin_popcount(of_storage) == 1 &&
        __builtin_popcountll(dense_key) == 1) {
        shim.offset = (Py_ssize_t)sizeof(void *) * __builtin_ctz(in_object);
        shim.keys_offset = (Py_ssize_t)sizeof(void *) * __builtin_ctz(in_impl);
        shim.storage_offset = (Py_ssize_t)sizeof(void *) * __builtin_ctz(of_storage);
        ok = true;
    }
done:
    PyErr_Clear();
    Py_XDECREF(torch_c);
    Py_XDECREF(aoti);
    Py_XDECREF(names);
    Py_XDECREF(samples);
    return ok;
}

/* torch loads its libraries privately, so they are looked up by their files (already loaded: nothing is loaded here). */
void *torch_symbol(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    for (int i = 0; found == NULL && i < N_LIBRARIES; i++)
        if (libraries[i] != NULL) found = dlsym(libraries[i], name);
    return found;
}

static void open_libraries(PyObject *torch) {
    static const char *names[N_LIBRARIES] = {"libtorch_cpu.so", "libc10.so", "libtorch_python.so"};
    PyObject *file = PyModule_GetFilenameObject(torch);
    const char *text = file != NULL ? PyUnicode_AsUTF8(file) : NULL, *slash = text != NULL ? strrchr(text, '/') : NULL;
    for (int i = 0; slash != NULL && i < N_LIBRARIES; i++) {
        char path[4096];
        int length = snprintf(path, sizeof(path), "%.*s/lib/%s", (int)(slash - text), text, names[i]);
        if (length < (int)sizeof(path)) libraries[i] = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    }
    Py_XDECREF(file);
    PyErr_Clear();
}

static bool find_functions(void) {
    shim.get_data_ptr = torch_symbol("aoti_torch_get_data_ptr");
    if (shim.get_data_ptr == NULL) return false;
    shim.get_dtype = torch_symbol("aoti_torch_get_dtype");
    shim.get_device_type = torch_symbol("aoti_torch_get_device_type");
    shim.get_device_index = torch_symbol("aoti_torch_get_device_index");
    shim.get_dim = torch_symbol("aoti_torch_get_dim");
    shim.get_sizes = torch_symbol("aoti_torch_get_sizes");
    shim.get_strides = torch_symbol("aoti_torch_get_strides");
    shim.element_size = torch_symbol("aoti_torch_dtype_element_size");
    /* No shim function reads requires_grad. Newer builds export c10::TensorImpl::requires_grad() const, older ones leave the
     * C function behind Python's attribute. */
    shim.requires_grad = torch_symbol("_ZNK3c1010TensorImpl13requires_gradEv");
    PyObject *attribute = shim.tensor_type != NULL ? PyObject_GetAttrString((PyObject *)shim.tensor_type, "requires_grad") : NULL;
    if (attribute != NULL && Py_IS_TYPE(attribute, &PyGetSetDescr_Type))
        shim.requires_grad_attribute = ((PyGetSetDescrObject *)attribute)->d_getset;
    PyErr_Clear(); /* the type keeps its descriptor alive */
    Py_XDECREF(attribute);
    return shim.get_dtype && shim.get_device_type && shim.get_device_index && shim.get_dim && shim.get_sizes &&
           shim.get_strides && (shim.requires_grad || shim.requires_grad_attribute);
}

static bool tensor_requires_grad(PyObject *tensor, void *impl) {
    if (LIKELY(shim.requires_grad != NULL)) return shim.requires_grad(impl);
    PyObject *answer = shim.requires_grad_attribute->get(tensor, shim.requires_grad_attribute->closure);
    if (answer == NULL) PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_True;
}

static bool same_device(TensorHandle handle, const TensorFacts *facts) {
    int32_t device_type, device_index;
    return !shim.get_device_type(handle, &device_type) && !shim.get_device_index(handle, &device_index) &&
           device_type == facts->device_type && device_index == facts->device_index;
}

static bool same_dims(TensorHandle handle, const TensorFacts *facts) {
    int32_t dtype;
    int64_t ndim, *sizes, *strides;
    if (shim.get_dtype(handle, &dtype) || dtype != facts->dtype) return false;
    if (shim.get_dim(handle, &ndim) || ndim != facts->ndim) return false;
    if (shim.get_sizes(handle, &sizes) || shim.get_strides(handle, &strides)) return false;
    const int64_t *want_size = facts->dims, *want_stride = facts->dims + ndim;
    for (int64_t i = 0; i < ndim; i++) {
        if (sizes[i] != want_size[i] && want_size[i] != -1) return false;
        if (strides[i] != want_stride[i] && want_stride[i] != -1) return false;
    }
    return true;
}

bool tensor_matches(PyObject *tensor, const TensorFacts *facts) {
    if (Py_TYPE(tensor) != facts->cls) return false;
    void *impl = tensor_impl(tensor);
    if (*(uint64_t *)((char *)impl + shim.keys_offset) != facts->keys) return false;
    TensorHandle handle = tensor_handle(tensor);
    if (!same_dims(handle, facts) || tensor_requires_grad(tensor, impl) != facts->requires_grad) return false;
    /* The keys give the backend; only the index of a device can still differ. */
    return facts->device_index < 0 || same_device(handle, facts);
}

bool tensor_has_layout(PyObject *tensor, const TensorFacts *facts) {
    uint64_t keys = *(uint64_t *)((char *)tensor_impl(tensor) + shim.keys_offset);
    TensorHandle handle = tensor_handle(tensor);
    return (keys & dense_key) != 0 && (keys & lazy_keys) == 0 && same_dims(handle, facts) && same_device(handle, facts);
}

bool tensor_dim(PyObject *tensor, bool stride, Py_ssize_t dim, int64_t *value) {
    if (UNLIKELY(!is_tensor(tensor))) return false;
    if (LIKELY(shim.ready)) {
        TensorHandle handle = tensor_handle(tensor);
        int64_t ndim, *numbers;
        if (shim.get_dim(handle, &ndim) || dim >= ndim) return false;
        if (stride ? shim.get_strides(handle, &numbers) : shim.get_sizes(handle, &numbers)) return false;
        *value = numbers[dim];
        return true;
    }
    PyObject *number = PyObject_CallMethod(tensor, stride ? "stride" : "size", "n", dim);
    *value = number != NULL ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    bool read = !PyErr_Occurred();
    PyErr_Clear();
    return read;
}

int tensor_data_ptr(PyObject *tensor, void **pointer) {
    if (UNLIKELY(!is_tensor(tensor))) {
        PyErr_Format(PyExc_TypeError, "expected a tensor, got %s", Py_TYPE(tensor)->tp_name);
        return -1;
    }
    if (LIKELY(shim.ready)) {
        if (LIKELY(shim.get_data_ptr(tensor_handle(tensor), pointer) == 0)) return 0;
        PyErr_SetString(PyExc_RuntimeError, "the tensor has no storage");
        return -1;
    }
    PyObject *number = PyObject_CallMethod(tensor, "data_ptr", NULL);
    if (number == NULL) return -1;
    *pointer = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int64_t span(int64_t ndim, const int64_t *sizes, const int64_t *strides) {
    int64_t extent = 1;
    for (int64_t i = 0; i < ndim; i++) {
        if (sizes[i] == 0) return 0;
        extent += (sizes[i] - 1) * strides[i];
    }
    return extent;
}

static int64_t number_of(PyObject *object, const char *method) {
    PyObject *result = PyObject_CallMethod(object, method, NULL);
    int64_t value = result != NULL ? PyLong_AsLongLong(result) : -1;
    Py_XDECREF(result);
    return value;
}

enum { MAX_DIMS = 64 };

static int64_t slow_span_in_bytes(PyObject *tensor) {
    PyObject *sizes = PyObject_CallMethod(tensor, "size", NULL), *strides = PyObject_CallMethod(tensor, "stride", NULL);
    int64_t itemsize = number_of(tensor, "element_size"), numbers[2 * MAX_DIMS], bytes = -1;
    Py_ssize_t ndim = sizes != NULL ? PyTuple_GET_SIZE(sizes) : 0;
    if (sizes != NULL && strides != NULL && ndim <= MAX_DIMS) {
        for (Py_ssize_t i = 0; i < ndim; i++) {
            numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
            numbers[ndim + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
        }
        bytes = span(ndim, numbers, numbers + ndim) * itemsize;
    }
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return PyErr_Occurred() ? -1 : bytes;
}

static int64_t span_in_bytes(PyObject *tensor) {
    TensorHandle handle = tensor_handle(tensor);
    int64_t ndim, *sizes, *strides;
    int32_t dtype;
    if (!shim.ready || shim.element_size == NULL) return slow_span_in_bytes(tensor);
    if (shim.get_dim(handle, &ndim) || shim.get_sizes(handle, &sizes) || shim.get_strides(handle, &strides) ||
        shim.get_dtype(handle, &dtype))
        return -1;
    return span(ndim, sizes, strides) * (int64_t)shim.element_size(dtype);
}

/* Tensors without storage (a class with `_memory_token`) say by a number whose memory they are: tensors that share memory
 * give the same one. 1 when found, 0 when the tensor has storage, -1 with an exception. */
static int memory_token(PyObject *tensor, uintptr_t *token) {
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("_memory_token")) == NULL) return -1;
    if (Py_TYPE(tensor)->tp_dict == NULL || !PyDict_Contains(Py_TYPE(tensor)->tp_dict, name)) return 0;
    PyObject *number = PyObject_CallMethodNoArgs(tensor, name);
    if (number == NULL) return -1;
    *token = (uintptr_t)PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 1;
}

/* The first byte and the byte past the last that the tensor may touch. */
int tensor_range(PyObject *tensor, uintptr_t *start, uintptr_t *stop) {
    void *pointer;
    int opaque = memory_token(tensor, start);
    if (UNLIKELY(opaque != 0)) {
        *stop = *start + 1;
        return opaque < 0 ? -1 : 0;
    }
    if (tensor_data_ptr(tensor, &pointer) < 0) return -1;
    int64_t bytes = span_in_bytes(tensor);
    *start = (uintptr_t)pointer;
    *stop = *start + (uintptr_t)bytes;
    return bytes < 0 ? -1 : 0;
}

/* dtype and device as the shim numbers them: read from an empty tensor, remembered for the pair met last. */
static int read_codes(PyObject *dtype, PyObject *device, TensorFacts *facts) {
    static PyObject *last_dtype, *last_device;
    static TensorFacts last;
    if (dtype == last_dtype && last_device != NULL && PyObject_RichCompareBool(device, last_device, Py_EQ) == 1) {
        facts->dtype = last.dtype;
        facts->device_type = last.device_type;
        facts->device_index = last.device_index;
        return 0;
    }
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *empty = torch != NULL ? PyObject_GetAttrString(torch, "empty_strided") : NULL;
    PyObject *args = Py_BuildValue("((i)(i))", 0, 1), *kwargs = Py_BuildValue("{s:O,s:O}", "dtype", dtype, "device", device);
    PyObject *sample = empty != NULL && args != NULL && kwargs != NULL ? PyObject_Call(empty, args, kwargs) : NULL;
    Py_XDECREF(torch);
    Py_XDECREF(empty);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    if (sample == NULL) return -1;
    TensorHandle handle = tensor_handle(sample);
    int failed = shim.get_dtype(handle, &facts->dtype) || shim.get_device_type(handle, &facts->device_type) ||
                 shim.get_device_index(handle, &facts->device_index);
    Py_DECREF(sample);
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "the tensor's dtype or device cannot be read");
        return -1;
    }
    Py_XSETREF(last_dtype, Py_NewRef(dtype));
    Py_XSETREF(last_device, Py_NewRef(device));
    last = *facts;
    return 0;
}

int tensor_facts_from(PyObject *encoded, TensorFacts *facts) {
    PyObject *cls, *sizes, *strides, *dtype, *device;
    int requires_grad;
    unsigned long long keys;
    if (!PyArg_ParseTuple(encoded, "O!O!O!OOpK", &PyType_Type, &cls, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype,
                          &device, &requires_grad, &keys))
        return -1;
    facts->cls = (PyTypeObject *)cls; /* the encoded tuple is kept by the program and keeps the class */
    facts->keys = keys;
    facts->requires_grad = requires_grad;
    return tensor_layout_from(sizes, strides, dtype, device, facts);
}

int tensor_layout_from(PyObject *sizes, PyObject *strides, PyObject *dtype, PyObject *device, TensorFacts *facts) {
    if (shim.ready && read_codes(dtype, device, facts) < 0) return -1;
    if (PyTuple_GET_SIZE(sizes) != PyTuple_GET_SIZE(strides)) {
        PyErr_SetString(PyExc_ValueError, "as many strides as sizes are needed");
        return -1;
    }
    facts->ndim = (int32_t)PyTuple_GET_SIZE(sizes);
    facts->dims = PyMem_Malloc(sizeof(int64_t) * 2 * (size_t)(facts->ndim + 1));
    if (facts->dims == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < facts->ndim; i++) {
        facts->dims[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
        facts->dims[facts->ndim + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_data_ptrs(PyObject *self, PyObject *tensors) {
    PyObject *items = PySequence_Fast(tensors, "data_ptrs takes a sequence of tensors");
    if (items == NULL) return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
    PyObject *result = PyTuple_New(n);
    for (Py_ssize_t i = 0; result != NULL && i < n; i++) {
        void *pointer;
        PyObject *number =
            tensor_data_ptr(PySequence_Fast_GET_ITEM(items, i), &pointer) == 0 ? PyLong_FromVoidPtr(pointer) : NULL;
        if (number == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyTuple_SET_ITEM(result, i, number);
    }
    Py_DECREF(items);
    return result;
}

/* Copies the memory of CPU tensors to `bytes`, one after the other, or back; the bytes that they have together, or -1 with an
 * exception. `bytes` NULL: only counts. */
static Py_ssize_t move_memory(PyObject *items, char *bytes, bool back) {
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++) {
        uintptr_t start, stop;
        if (tensor_range(PySequence_Fast_GET_ITEM(items, i), &start, &stop) < 0) return -1;
        if (bytes != NULL) memcpy(back ? (char *)start : bytes + total, back ? bytes + total : (char *)start, stop - start);
        total += (Py_ssize_t)(stop - start);
    }
    return total;
}

static PyObject *py_saved_memory(PyObject *self, PyObject *tensors) {
    PyObject *items = PySequence_Fast(tensors, "saved_memory takes a sequence of tensors"), *saved = NULL;
    Py_ssize_t total = items == NULL ? -1 : move_memory(items, NULL, false);
    if (total >= 0 && (saved = PyBytes_FromStringAndSize(NULL, total)) != NULL)
        move_memory(items, PyBytes_AS_STRING(saved), false);
    Py_XDECREF(items);
    return saved;
}

static PyObject *py_put_memory_back(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "put_memory_back takes tensors and their saved memory");
        return NULL;
    }
    PyObject *items = PySequence_Fast(args[0], "put_memory_back takes a sequence of tensors");
    if (items == NULL) return NULL;
    Py_ssize_t total = move_memory(items, NULL, true);
    if (total >= 0 && total != PyBytes_GET_SIZE(args[1])) {
        PyErr_SetString(PyExc_ValueError, "the saved memory is that of other tensors");
        total = -1;
    }
    if (total >= 0) move_memory(items, PyBytes_AS_STRING(args[1]), true);
    Py_DECREF(items);
    if (total < 0) return NULL;
    Py_RETURN_NONE;
}

/* Counts in-place writes; inference tensors keep no count. */
static int tensor_version(PyObject *tensor, uint64_t *version) {
    PyObject *number = shim.version != NULL ? shim.version(tensor, shim.version_closure)
                                            : PyObject_GetAttrString(tensor, "_version");
    *version = 0;
    if (number == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return 0;
    }
    if (number == NULL) return -1;
    *version = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_tensor_stamps(PyObject *self, PyObject *tensors) {
    PyObject *items = PySequence_Fast(tensors, "tensor_stamps takes a sequence of tensors");
    if (items == NULL) return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
    PyObject *result = PyBytes_FromStringAndSize(NULL, n * 2 * (Py_ssize_t)sizeof(uint64_t));
    for (Py_ssize_t i = 0; result != NULL && i < n; i++) {
        PyObject *tensor = PySequence_Fast_GET_ITEM(items, i);
        void *pointer;
        uint64_t stamp[2];
        if (tensor_data_ptr(tensor, &pointer) < 0 || tensor_version(tensor, &stamp[1]) < 0) {
            Py_CLEAR(result);
            break;
        }
        stamp[0] = (uint64_t)(uintptr_t)pointer;
        memcpy(PyBytes_AS_STRING(result) + (size_t)i * sizeof(stamp), stamp, sizeof(stamp));
    }
    Py_DECREF(items);
    return result;
}

static PyObject *slow_layouts(PyObject *items) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
    PyObject *result = PyTuple_New(n);
    for (Py_ssize_t i = 0; result != NULL && i < n; i++) {
        PyObject *tensor = PySequence_Fast_GET_ITEM(items, i);
        PyObject *dtype = PyObject_GetAttrString(tensor, "dtype");
        PyObject *sizes = dtype != NULL ? PyObject_CallMethod(tensor, "size", NULL) : NULL;
        PyObject *strides = sizes != NULL ? PyObject_CallMethod(tensor, "stride", NULL) : NULL;
        PyObject *storage = strides != NULL ? slow_storage(tensor) : NULL;
        PyObject *layout = storage != NULL ? PyTuple_Pack(4, storage, dtype, sizes, strides) : NULL;
        Py_XDECREF(storage);
        Py_XDECREF(dtype);
        Py_XDECREF(sizes);
        Py_XDECREF(strides);
        if (layout == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, i, layout);
    }
    return result;
}

enum { LAYOUT_WORDS = 4, MAX_LAYOUT = LAYOUT_WORDS + 2 * MAX_DIMS };

/* The words of a tensor's layout: its storage; whether memory holds something else than the tensor shows,
 * its dtype and device, the number of dimensions, sizes, strides. Returns how many there are; sparse tensors have none. */
static Py_ssize_t layout_words(PyObject *tensor, int64_t *words) {
    int64_t ndim, *sizes, *strides;
    int32_t dtype, device_type, device_index;
    if (UNLIKELY(!is_tensor(tensor))) return 0;
    TensorHandle handle = tensor_handle(tensor);
    if (shim.get_dtype(handle, &dtype) || shim.get_device_type(handle, &device_type) ||
        shim.get_device_index(handle, &device_index) || shim.get_dim(handle, &ndim) || shim.get_sizes(handle, &sizes) ||
        shim.get_strides(handle, &strides))
        return 0;
    if (words != NULL) {
        uint64_t keys = *(uint64_t *)((char *)tensor_impl(tensor) + shim.keys_offset);
        *words++ = lies_in_storage(device_type) ? *(int64_t *)((char *)tensor_impl(tensor) + shim.storage_offset) : 0;
        *words++ = (int64_t)(keys & lazy_keys);
        *words++ = dtype + ((int64_t)device_type << 16) + ((int64_t)device_index << 32);
        *words++ = ndim;
        memcpy(words, sizes, sizeof(int64_t) * (size_t)ndim);
        memcpy(words + ndim, strides, sizeof(int64_t) * (size_t)ndim);
    }
    return (Py_ssize_t)(LAYOUT_WORDS + 2 * ndim);
}

static PyObject *py_tensor_layouts(PyObject *self, PyObject *tensors) {
    PyObject *items = PySequence_Fast(tensors, "tensor_layouts takes a sequence of tensors"), *result = NULL;
    if (items == NULL) return NULL;
    if (LIKELY(shim.ready)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(items), count = 0;
        for (Py_ssize_t i = 0; i < n; i++) count += layout_words(PySequence_Fast_GET_ITEM(items, i), NULL);
        result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
        int64_t *words = result != NULL ? (int64_t *)PyBytes_AS_STRING(result) : NULL;
        for (Py_ssize_t i = 0; words != NULL && i < n; i++) words += layout_words(PySequence_Fast_GET_ITEM(items, i), words);
    } else {
        result = slow_layouts(items);
    }
    Py_DECREF(items);
    return result;
}

static bool lie_as_noted(PyObject *items, const int64_t *noted, Py_ssize_t left) {
    int64_t words[MAX_LAYOUT];
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++) {
        Py_ssize_t n = layout_words(PySequence_Fast_GET_ITEM(items, i), NULL);
        if (n > MAX_LAYOUT || n > left) return false;
        layout_words(PySequence_Fast_GET_ITEM(items, i), words);
        if (memcmp(words, noted, sizeof(int64_t) * (size_t)n) != 0) return false;
        noted += n;
        left -= n;
    }
    return left == 0;
}

static PyObject *py_lie_as_noted(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2) return PyErr_Format(PyExc_TypeError, "lie_as_noted takes tensors and what tensor_layouts gave");
    if (UNLIKELY(!shim.ready || !PyBytes_Check(args[1]))) Py_RETURN_FALSE;
    PyObject *items = PySequence_Fast(args[0], "lie_as_noted takes a sequence of tensors");
    if (items == NULL) return NULL;
    bool same = lie_as_noted(items, (const int64_t *)PyBytes_AS_STRING(args[1]),
                             PyBytes_GET_SIZE(args[1]) / (Py_ssize_t)sizeof(int64_t));
    Py_DECREF(items);
    return PyBool_FromLong(same);
}

static PyObject *py_tensor_reads_are_direct(PyObject *self, PyObject *unused) { return PyBool_FromLong(shim.ready); }

/* Whether attributes of tensors are all None. The descriptors' getters are called directly, since a step asks hundreds of
 * tensors; the caller has checked that no subclass overrides these attributes. */
static PyObject *py_are_none(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "are_none takes a tuple of tensors and a tuple of getset descriptors");
        return NULL;
    }
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(args[1]); j++) {
        PyGetSetDescrObject *attribute = (PyGetSetDescrObject *)PyTuple_GET_ITEM(args[1], j);
        if (!Py_IS_TYPE((PyObject *)attribute, &PyGetSetDescr_Type)) {
            PyErr_SetString(PyExc_TypeError, "an attribute is no getset descriptor");
            return NULL;
        }
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); i++) {
            PyObject *tensor = PyTuple_GET_ITEM(args[0], i);
            if (!PyObject_TypeCheck(tensor, attribute->d_common.d_type)) {
                PyErr_SetString(PyExc_TypeError, "an object is of another type than the attribute");
                return NULL;
            }
            PyObject *found = attribute->d_getset->get(tensor, attribute->d_getset->closure);
            if (found == NULL) return NULL;
            Py_DECREF(found);
            if (found != Py_None) Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"are_none", (PyCFunction)(void (*)(void))py_are_none, METH_FASTCALL,
     "are_none(tensors, getset descriptors) -> whether these attributes are None of all of them"},
    {"data_ptrs", py_data_ptrs, METH_O, "data_ptrs(tensors) -> tuple of their data pointers as integers"},
    {"saved_memory", py_saved_memory, METH_O, "saved_memory(CPU tensors) -> the bytes from the first to the last element of each"},
    {"put_memory_back", (PyCFunction)(void (*)(void))py_put_memory_back, METH_FASTCALL,
     "put_memory_back(tensors, saved) writes what saved_memory gave back into the tensors"},
    {"tensor_stamps", py_tensor_stamps, METH_O,
     "tensor_stamps(tensors) -> bytes of (data pointer, version) of each: equal bytes, unchanged data"},
    {"tensor_layouts", py_tensor_layouts, METH_O,
     "tensor_layouts(tensors) -> bytes of (storage, lazy, dtype and device, ndim, *sizes, *strides) of each; a tuple of\n"
     "(storage, dtype, sizes, strides) where tensors are not read in C"},
    {"lie_as_noted", (PyCFunction)(void (*)(void))py_lie_as_noted, METH_FASTCALL,
     "lie_as_noted(tensors, layouts) -> whether they lie where and as tensor_layouts noted; false where tensors are not read\n"
     "in C"},
    {"tensor_reads_are_direct", py_tensor_reads_are_direct, METH_NOARGS,
     "Whether tensors are read in C (true) or through Python attributes"},
    {NULL, NULL, 0, NULL},
};

static void find_version_getter(void) {
    PyObject *descriptor = PyObject_GetAttrString((PyObject *)shim.tensor_type, "_version");
    if (descriptor != NULL && Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
        shim.version = ((PyGetSetDescrObject *)descriptor)->d_getset->get;
        shim.version_closure = ((PyGetSetDescrObject *)descriptor)->d_getset->closure;
    }
    Py_XDECREF(descriptor); /* the class keeps it */
    PyErr_Clear();
}

int tensor_init(PyObject *module, PyObject *torch) {
    PyObject *tensor_type = PyObject_GetAttrString(torch, "Tensor");
    if (tensor_type == NULL) return -1;
    shim.tensor_type = (PyTypeObject *)tensor_type; /* kept for good */
    PyObject *nn = PyObject_GetAttrString(torch, "nn");
    shim.parameter_type = nn != NULL ? (PyTypeObject *)PyObject_GetAttrString(nn, "Parameter") : NULL;
    Py_XDECREF(nn);
    if (shim.parameter_type == NULL) return -1;
    open_libraries(torch);
    find_version_getter();
    shim.ready = find_functions() && find_offsets(torch);
    return PyModule_AddFunctions(module, methods);
}
