/* _C.GpuKernel: a function on a GPU as a callable on tensors, launched through the driver. */
#include "dynamotor.h"
#include <structmember.h>

typedef int (*LaunchFunction)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                              void **extra);
typedef int (*SetContext)(void *context);

/* The driver's CUlaunchConfig and CUlaunchAttribute, and its number of a launch that may begin before the one before it ends. */
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
typedef struct {
    int id;
    char pad[4];
    union {
        char room[64];
        int allowed;
    } value;
} LaunchAttribute;
typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void *stream;
    LaunchAttribute *attributes;
    unsigned n_attributes;
} LaunchConfig;
typedef int (*LaunchExFunction)(const LaunchConfig *config, void *function, void **parameters, void **extra);

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    void *launch; /* cuLaunchKernel, or cuLaunchKernelEx for code that waits for the kernel before it itself */
    SetContext set_context;
    void *function, *context;
    unsigned grid, threads, shared_bytes;
    Py_ssize_t n_tensors, n_numbers, n_extra;
    int64_t *numbers;
    PyObject *unaligned; /* called instead when a pointer is no multiple of 16, or None: any pointer will do */
    PyObject *owner;
    int scratch; /* the last tensor is memory of the kernel's own, which it expects as the first extra parameter */
    int overlaps; /* the launch may begin before the one before it in its stream ends */
} GpuKernel;

enum { MOST_PARAMETERS = 512, INVALID_CONTEXT = 201, SCRATCH_ALIGNMENT = 128 };

static int launch(const GpuKernel *kernel, void *stream, void **parameters) {
    if (!kernel->overlaps)
        return ((LaunchFunction)kernel->launch)(kernel->function, kernel->grid, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes,
                                                stream, parameters, NULL);
    LaunchAttribute attribute = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
    LaunchConfig config = {kernel->grid, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes, stream, &attribute, 1};
    return ((LaunchExFunction)kernel->launch)(&config, kernel->function, parameters, NULL);
}

/* kernel(*tensors, stream) */
static PyObject *gpu_kernel_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    GpuKernel *kernel = (GpuKernel *)self;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), n = kernel->n_tensors, at = n - kernel->scratch;
    if (UNLIKELY(nargs != n + 1 || (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0)))
        return PyErr_Format(PyExc_TypeError, "this kernel takes %zd tensors and a stream; %zd arguments were given", n, nargs);
    void *pointers[MOST_PARAMETERS], *parameters[MOST_PARAMETERS], *nothing = NULL;
    uintptr_t all = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (UNLIKELY(tensor_data_ptr(args[i], &pointers[i]) < 0)) return NULL;
        parameters[i] = &pointers[i];
        all |= (uintptr_t)pointers[i];
    }
    if (UNLIKELY((all & 15) != 0 && kernel->unaligned != Py_None))
        return PyObject_Vectorcall(kernel->unaligned, args, (size_t)nargs, NULL);
    void *stream = PyLong_AsVoidPtr(args[n]);
    if (UNLIKELY(stream == NULL && PyErr_Occurred())) return NULL;
    for (Py_ssize_t i = 0; i < kernel->n_numbers; i++) parameters[at++] = &kernel->numbers[i];
    if (kernel->scratch) {
        uintptr_t start = (uintptr_t)pointers[n - 1] + SCRATCH_ALIGNMENT - 1;
        pointers[n - 1] = (void *)(start - start % SCRATCH_ALIGNMENT);
        parameters[at++] = &pointers[n - 1];
    }
    for (Py_ssize_t i = 0; i < kernel->n_extra - kernel->scratch; i++) parameters[at++] = &nothing;
    int status = INVALID_CONTEXT;
    for (int attempt = 0; attempt < 2 && status == INVALID_CONTEXT; attempt++) {
        if (attempt > 0 && kernel->set_context(kernel->context) != 0) break; /* a thread that has not used CUDA yet */
        status = launch(kernel, stream, parameters);
    }
    if (UNLIKELY(status != 0)) return PyErr_Format(PyExc_RuntimeError, "CUDA error %d when a generated kernel was launched", status);
    Py_RETURN_NONE;
}

static PyObject *gpu_kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"launch", "set_context", "context", "function", "grid", "threads", "shared_bytes",
                            "n_tensors", "numbers", "n_extra", "unaligned", "owner", "scratch", "overlaps", NULL};
    unsigned long long launch, set_context, context, function;
    unsigned grid, threads, shared_bytes;
    Py_ssize_t n_tensors, n_extra;
    PyObject *numbers, *unaligned, *owner;
    int scratch = 0, overlaps = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKIIInO!nOO|pp", names, &launch, &set_context, &context, &function, &grid,
                                     &threads, &shared_bytes, &n_tensors, &PyTuple_Type, &numbers, &n_extra, &unaligned, &owner,
                                     &scratch, &overlaps))
        return NULL;
    Py_ssize_t n_numbers = PyTuple_GET_SIZE(numbers);
    if (launch == 0 || n_tensors < scratch || n_extra < scratch || n_tensors + n_numbers + n_extra > MOST_PARAMETERS) {
        PyErr_SetString(PyExc_ValueError, "a kernel needs the address of a launch function and at most 512 parameters");
        return NULL;
    }
    GpuKernel *kernel = (GpuKernel *)type->tp_alloc(type, 0);
    if (kernel == NULL) return NULL;
    kernel->vectorcall = gpu_kernel_call;
    kernel->launch = (void *)(uintptr_t)launch;
    kernel->set_context = (SetContext)(uintptr_t)set_context;
    kernel->context = (void *)(uintptr_t)context;
    kernel->function = (void *)(uintptr_t)function;
    kernel->grid = grid, kernel->threads = threads, kernel->shared_bytes = shared_bytes;
    kernel->n_tensors = n_tensors, kernel->n_numbers = n_numbers, kernel->n_extra = n_extra;
    kernel->scratch = scratch, kernel->overlaps = overlaps;
    kernel->unaligned = Py_NewRef(unaligned);
    kernel->owner = Py_NewRef(owner);
    kernel->numbers = PyMem_Malloc(sizeof(int64_t) * (size_t)(n_numbers + 1));
    if (kernel->numbers == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; kernel->numbers != NULL && i < n_numbers; i++)
        kernel->numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i));
    if (PyErr_Occurred()) Py_CLEAR(kernel);
    return (PyObject *)kernel;
}

static int gpu_kernel_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((GpuKernel *)self)->unaligned);
    Py_VISIT(((GpuKernel *)self)->owner);
    return 0;
}

static int gpu_kernel_clear(PyObject *self) {
    Py_CLEAR(((GpuKernel *)self)->unaligned);
    Py_CLEAR(((GpuKernel *)self)->owner);
    return 0;
}

static void gpu_kernel_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    PyMem_Free(((GpuKernel *)self)->numbers);
    gpu_kernel_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject GpuKernel_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.GpuKernel",
    .tp_doc = "GpuKernel(launch, set_context, context, function, grid, threads, shared_bytes, n_tensors, numbers, n_extra,\n"
              "          unaligned, owner, scratch=False, overlaps=False)\n\n"
              "Callable on n_tensors tensors and a stream (a number): launches the function on `grid` blocks of `threads`\n"
              "with the tensors' data pointers, the fixed 64-bit numbers and n_extra null pointers. The first four are\n"
              "addresses: of cuLaunchKernel and cuCtxSetCurrent, of the device's context and of the function. scratch: the last\n"
              "tensor is memory of the kernel's own; its start rounded up to 128 is passed in place of the first null pointer.\n"
              "overlaps: the first address is that of cuLaunchKernelEx, and the launch may begin before the one before it ends.",
    .tp_basicsize = sizeof(GpuKernel),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(GpuKernel, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = gpu_kernel_new,
    .tp_traverse = gpu_kernel_traverse,
    .tp_clear = gpu_kernel_clear,
    .tp_dealloc = gpu_kernel_dealloc,
};

int gpu_launch_init(PyObject *module) {
    return PyModule_AddType(module, &GpuKernel_Type);
}
