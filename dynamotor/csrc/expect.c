/* _C.Expect: lets a tensor through that is laid out as the program was compiled for, a few ns each. */
#include "dynamotor.h"
#include <stddef.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    TensorFacts facts;
    PyObject *otherwise;
} Expect;

static PyObject *expect_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Expect *expect = (Expect *)self;
    if (UNLIKELY(PyVectorcall_NARGS(nargsf) != 1 || (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0))) {
        PyErr_SetString(PyExc_TypeError, "Expect takes one value");
        return NULL;
    }
    if (LIKELY(shim.ready && is_tensor(args[0]) && tensor_has_layout(args[0], &expect->facts))) return Py_NewRef(args[0]);
    return PyObject_CallOneArg(expect->otherwise, args[0]);
}

static PyObject *expect_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"sizes", "strides", "dtype", "device", "otherwise", NULL};
    PyObject *sizes, *strides, *dtype, *device, *otherwise;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOO", names, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype,
                                     &device, &otherwise))
        return NULL;
    Expect *expect = (Expect *)type->tp_alloc(type, 0);
    if (expect == NULL) return NULL;
    expect->vectorcall = expect_call;
    expect->otherwise = Py_NewRef(otherwise);
    if (tensor_layout_from(sizes, strides, dtype, device, &expect->facts) < 0) Py_CLEAR(expect);
    return (PyObject *)expect;
}

static int expect_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Expect *)self)->otherwise);
    return 0;
}

static int expect_clear(PyObject *self) {
    Py_CLEAR(((Expect *)self)->otherwise);
    return 0;
}

static void expect_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    PyMem_Free(((Expect *)self)->facts.dims);
    expect_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject Expect_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.Expect",
    .tp_doc = "Expect(sizes, strides, dtype, device, otherwise)\n\n"
              "Callable on one value: gives it back when it is a tensor with exactly these sizes, strides, dtype and device,\n"
              "and `otherwise(value)` when it is anything else.",
    .tp_basicsize = sizeof(Expect),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Expect, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = expect_new,
    .tp_traverse = expect_traverse,
    .tp_clear = expect_clear,
    .tp_dealloc = expect_dealloc,
};

int expect_init(PyObject *module) {
    return PyModule_AddType(module, &Expect_Type);
}
