/* _C.Kernel: a generated C function `void f(void **pointers, const int64_t *numbers)` as a callable on tensors. Behind the
 * tensors' pointers stands one more, to a number of this call's own that the function sets when a position is out of range. */
#include "dynamotor.h"
#include <structmember.h>

typedef void (*KernelFunction)(void **pointers, const int64_t *numbers);

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    KernelFunction function;
    Py_ssize_t n_tensors;
    Py_ssize_t n_numbers;
    int64_t *numbers;
    bool release_gil;
    PyObject *owner; /* keeps the loaded library */
} Kernel;

enum { ON_STACK = 64 };

/* Tensors without memory (zeros that autograd makes up) are read nowhere; those without elements may have none. */
static int refuse_elements(PyObject *tensor) {
    PyObject *numel = PyObject_CallMethod(tensor, "numel", NULL);
    long count = numel != NULL ? PyLong_AsLong(numel) : -1;
    Py_XDECREF(numel);
    if (count > 0) PyErr_SetString(PyExc_RuntimeError, "a kernel was given a tensor that has elements and no memory");
    return count == 0 ? 0 : -1;
}

/* The address of an operand: a tensor's data, or an address (an int) in memory that the program has planned. */
static inline int operand_pointer(PyObject *operand, void **pointer) {
    if (UNLIKELY(PyLong_CheckExact(operand))) {
        *pointer = PyLong_AsVoidPtr(operand);
        return *pointer == NULL ? -1 : 0;
    }
    if (UNLIKELY(tensor_data_ptr(operand, pointer) < 0)) return -1;
    return LIKELY(*pointer != NULL) ? 0 : refuse_elements(operand);
}

static inline int number_from(PyObject *size, int64_t *number) {
    if (LIKELY(PyLong_CheckExact(size) && LONG_IS_COMPACT((PyLongObject *)size))) {
        *number = LONG_COMPACT_VALUE((PyLongObject *)size);
        return 0;
    }
    *number = PyLong_AsLongLong(size);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *kernel_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Kernel *kernel = (Kernel *)self;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    if (UNLIKELY(nargs < kernel->n_tensors || (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0)))
        return PyErr_Format(PyExc_TypeError, "this kernel takes %zd tensors, then integers; %zd arguments were given",
                            kernel->n_tensors, nargs);
    void *few_pointers[ON_STACK], **pointers = few_pointers;
    int64_t few_numbers[ON_STACK], *numbers = kernel->numbers;
    Py_ssize_t extra = nargs - kernel->n_tensors;
    int64_t out_of_range = 0;
    PyObject *result = NULL;
    if (kernel->n_tensors >= ON_STACK) pointers = PyMem_Malloc(sizeof(void *) * (size_t)(kernel->n_tensors + 1));
    if (extra > 0) {
        numbers = few_numbers;
        if (kernel->n_numbers + extra > ON_STACK) numbers = PyMem_Malloc(sizeof(int64_t) * (size_t)(kernel->n_numbers + extra));
    }
    if (UNLIKELY(pointers == NULL || (extra > 0 && numbers == NULL))) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < kernel->n_tensors; i++)
        if (UNLIKELY(operand_pointer(args[i], &pointers[i]) < 0)) goto done;
    pointers[kernel->n_tensors] = &out_of_range;
    if (extra > 0) {
        for (Py_ssize_t i = 0; i < kernel->n_numbers; i++) numbers[i] = kernel->numbers[i];
        for (Py_ssize_t i = 0; i < extra; i++)
            if (UNLIKELY(number_from(args[kernel->n_tensors + i], &numbers[kernel->n_numbers + i]) < 0)) goto done;
    }
    if (kernel->release_gil) {
        Py_BEGIN_ALLOW_THREADS;
        kernel->function(pointers, numbers);
        Py_END_ALLOW_THREADS;
    } else {
        kernel->function(pointers, numbers);
    }
    if (LIKELY(!out_of_range))
        result = Py_NewRef(Py_None);
    else
        PyErr_SetString(PyExc_IndexError, "index out of range in self"); /* aten's own words */
done:
    if (pointers != few_pointers) PyMem_Free(pointers);
    if (extra > 0 && numbers != few_numbers) PyMem_Free(numbers);
    return result;
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"address", "n_tensors", "numbers", "release_gil", "owner", NULL};
    PyObject *address, *numbers = NULL, *owner = NULL;
    Py_ssize_t n_tensors;
    int release_gil = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|OpO", names, &address, &n_tensors, &numbers, &release_gil, &owner))
        return NULL;
    void *function = PyLong_AsVoidPtr(address);
    if (function == NULL || n_tensors < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a kernel needs the address of a function and a tensor count");
        return NULL;
    }
    PyObject *fixed = numbers != NULL ? PySequence_Tuple(numbers) : PyTuple_New(0);
    if (fixed == NULL) return NULL;
    Kernel *kernel = (Kernel *)type->tp_alloc(type, 0);
    if (kernel != NULL) {
        kernel->vectorcall = kernel_call;
        kernel->function = (KernelFunction)function;
        kernel->n_tensors = n_tensors;
        kernel->release_gil = release_gil;
        kernel->owner = Py_XNewRef(owner);
        kernel->n_numbers = PyTuple_GET_SIZE(fixed);
        kernel->numbers = PyMem_Malloc(sizeof(int64_t) * (size_t)(kernel->n_numbers + 1));
        if (kernel->numbers == NULL) PyErr_NoMemory();
        for (Py_ssize_t i = 0; kernel->numbers != NULL && i < kernel->n_numbers; i++)
            kernel->numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(fixed, i));
        if (PyErr_Occurred()) Py_CLEAR(kernel);
    }
    Py_DECREF(fixed);
    return (PyObject *)kernel;
}

static int kernel_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Kernel *)self)->owner);
    return 0;
}

static int kernel_clear(PyObject *self) {
    Py_CLEAR(((Kernel *)self)->owner);
    return 0;
}

static void kernel_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    PyMem_Free(((Kernel *)self)->numbers);
    kernel_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef kernel_members[] = {
    {"n_tensors", T_PYSSIZET, offsetof(Kernel, n_tensors), READONLY, "how many tensors a call takes"},
    {NULL},
};

static PyTypeObject Kernel_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.Kernel",
    .tp_doc = "Kernel(address, n_tensors, numbers=(), release_gil=False, owner=None)\n\n"
              "Callable on n_tensors tensors, then integers: runs `void f(void **pointers, const int64_t *numbers)` at the\n"
              "address on the tensors' data pointers and on the fixed numbers followed by the integers. `owner` is kept alive.\n"
              "The pointer behind the tensors' is to an int64_t of 0; a function that sets it makes the call an IndexError.",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Kernel, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = kernel_new,
    .tp_traverse = kernel_traverse,
    .tp_clear = kernel_clear,
    .tp_dealloc = kernel_dealloc,
    .tp_members = kernel_members,
};

int launch_init(PyObject *module) {
    return PyModule_AddType(module, &Kernel_Type);
}
