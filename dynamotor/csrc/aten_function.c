/* _C.AtenFunction: a function of libtorch on tensors alone, called without Python's binding. */
#include "dynamotor.h"
#include <stddef.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    void *function;
    int n_in, n_out;
    PyObject *otherwise;
} AtenFunction;

enum { MOST_IN = 3, MOST_OUT = 2, FEW_ELEMENTS = 4096 };

bool call_aten_function(void *function, const void *const *in, int n_in, void **out, int n_out); /* aten_invoke.cpp */
static PyObject *(*wrap_new)(TensorHandle tensor); /* takes the tensor out of the handle */

/* The tensors' handles. A subclass may have a __torch_function__, which only the binding calls. */
static bool handles_of(const AtenFunction *self, PyObject *const *args, size_t nargsf, const PyObject *kwnames, const void **in) {
    if (PyVectorcall_NARGS(nargsf) != self->n_in || kwnames != NULL) return false;
    for (int i = 0; i < self->n_in; i++) {
        if (!Py_IS_TYPE(args[i], shim.tensor_type) && !Py_IS_TYPE(args[i], shim.parameter_type)) return false;
        in[i] = tensor_handle(args[i]);
    }
    return true;
}

/* Whether the call is over before another thread could begin: its operands have the same few elements. */
static bool is_short(const void *const *in, int n_in) {
    int64_t count = 1, ndim[2], *sizes[2];
    for (int i = 0; i < n_in; i++) {
        bool other = i > 0;
        if (shim.get_dim((TensorHandle)in[i], &ndim[other]) || shim.get_sizes((TensorHandle)in[i], &sizes[other])) return false;
        if (other && (ndim[1] != ndim[0] || memcmp(sizes[1], sizes[0], sizeof(int64_t) * (size_t)ndim[0]) != 0)) return false;
    }
    for (int64_t i = 0; i < ndim[0] && count <= FEW_ELEMENTS; i++) count *= sizes[0][i];
    return count <= FEW_ELEMENTS;
}

static PyObject *results_of(void **out, int n) {
    if (n == 1) return wrap_new(out);
    PyObject *results = PyTuple_New(n);
    for (int i = 0; i < n; i++) {
        PyObject *one = wrap_new(&out[i]);
        if (results != NULL && one != NULL) PyTuple_SET_ITEM(results, i, one);
        else Py_XDECREF(one);
    }
    if (PyErr_Occurred()) Py_CLEAR(results);
    return results;
}

/* The binding raises the errors of the function again. */
static PyObject *aten_function_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    const AtenFunction *self = (AtenFunction *)callable;
    const void *in[MOST_IN];
    void *out[MOST_OUT];
    bool done = false;
    if (LIKELY(handles_of(self, args, nargsf, kwnames, in))) {
        PyThreadState *state = is_short(in, self->n_in) ? NULL : PyEval_SaveThread();
        done = call_aten_function(self->function, in, self->n_in, out, self->n_out);
        if (state != NULL) PyEval_RestoreThread(state);
    }
    return LIKELY(done) ? results_of(out, self->n_out) : PyObject_Vectorcall(self->otherwise, args, nargsf, kwnames);
}

static PyObject *aten_function_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *symbol;
    int n_in, n_out;
    PyObject *otherwise;
    if (!PyArg_ParseTuple(args, "siiO", &symbol, &n_in, &n_out, &otherwise)) return NULL;
    void *function = torch_symbol(symbol);
    if (function == NULL || n_in < 1 || n_in > MOST_IN || n_out < 1 || n_out > MOST_OUT)
        return PyErr_Format(PyExc_ValueError, "no function %s of %d tensors with %d results", symbol, n_in, n_out);
    AtenFunction *self = (AtenFunction *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = aten_function_call;
    self->function = function;
    self->n_in = n_in;
    self->n_out = n_out;
    self->otherwise = Py_NewRef(otherwise);
    return (PyObject *)self;
}

static int aten_function_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((AtenFunction *)self)->otherwise);
    return 0;
}

static void aten_function_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((AtenFunction *)self)->otherwise);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject AtenFunction_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.AtenFunction",
    .tp_doc = "AtenFunction(symbol, n_in, n_out, otherwise)\n\n"
              "Callable on n_in tensors: calls libtorch's function of that symbol, which takes references to tensors and gives\n"
              "one new tensor or two. Other arguments, and those for which it throws, are `otherwise`'s.",
    .tp_basicsize = sizeof(AtenFunction),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(AtenFunction, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = aten_function_new,
    .tp_traverse = aten_function_traverse,
    .tp_dealloc = aten_function_dealloc,
};

int aten_function_init(PyObject *module) {
    wrap_new = torch_symbol("_Z16THPVariable_WrapON2at10TensorBaseE");
    if (PyType_Ready(&AtenFunction_Type) < 0) return -1;
    return PyModule_AddObjectRef(module, "AtenFunction", shim.ready && wrap_new ? (PyObject *)&AtenFunction_Type : Py_None);
}
