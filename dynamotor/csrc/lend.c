/* _C.Lender: tensors over a storage that a pool keeps, one at a time. */
#include "dynamotor.h"
#include <stddef.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *tensor, *storage; /* the pool's own */
    PyObject *handle, *use_count; /* use_count(handle): how many own the storage */
    void *pointer;
    int64_t nbytes;
    long owners;           /* while nothing is lent */
    Py_ssize_t references; /* to `storage`: users may hold that object alone */
} Lender;

enum { MOST_DIMS = 64 };

static int32_t (*reinterpret)(TensorHandle self, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t offset,
                              TensorHandle *made);
static int32_t (*delete_handle)(TensorHandle handle);
static int32_t (*storage_size)(TensorHandle self, int64_t *nbytes);
static PyObject *(*wrap)(TensorHandle tensor);

static long owners_of(const Lender *lender) {
    PyObject *count = PyObject_CallOneArg(lender->use_count, lender->handle);
    long owners = count != NULL ? PyLong_AsLong(count) : -1;
    Py_XDECREF(count);
    return owners;
}

static int numbers_of(PyObject *tuple, int64_t *numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *number = PyTuple_GET_ITEM(tuple, i);
        bool few_digits = PyLong_CheckExact(number) && LONG_IS_COMPACT((PyLongObject *)number);
        numbers[i] = few_digits ? (int64_t)LONG_COMPACT_VALUE((PyLongObject *)number) : PyLong_AsLongLong(number);
        if (numbers[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Whether the memory is where it was: it may have been moved to shared memory, or resized. */
static bool is_intact(const Lender *lender, TensorHandle tensor) {
    void *pointer;
    int64_t nbytes;
    return shim.get_data_ptr(tensor, &pointer) == 0 && pointer == lender->pointer && storage_size(tensor, &nbytes) == 0 &&
           nbytes == lender->nbytes;
}

static PyObject *lender_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    const Lender *lender = (Lender *)self;
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS];
    bool two = PyVectorcall_NARGS(nargsf) == 2 && kwnames == NULL && PyTuple_Check(args[0]) && PyTuple_Check(args[1]);
    if (!two || PyTuple_GET_SIZE(args[0]) != PyTuple_GET_SIZE(args[1]) || PyTuple_GET_SIZE(args[0]) > MOST_DIMS)
        return PyErr_Format(PyExc_TypeError, "a lender takes a tuple of sizes and one of as many strides");
    if (numbers_of(args[0], sizes) < 0 || numbers_of(args[1], strides) < 0) return NULL;
    long owners = owners_of(lender);
    if (owners < 0 && PyErr_Occurred()) return NULL;
    TensorHandle own = tensor_handle(lender->tensor), made;
    if (owners != lender->owners || Py_REFCNT(lender->storage) != lender->references || !is_intact(lender, own)) Py_RETURN_NONE;
    if (reinterpret(own, PyTuple_GET_SIZE(args[0]), sizes, strides, 0, &made))
        return PyErr_Format(PyExc_RuntimeError, "no tensor of sizes %R and strides %R", args[0], args[1]);
    PyObject *tensor = wrap(made);
    delete_handle(made);
    return tensor;
}

static PyObject *lender_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *tensor, *storage, *handle, *use_count;
    if (!PyArg_ParseTuple(args, "OOO!O", &tensor, &storage, &PyLong_Type, &handle, &use_count)) return NULL;
    if (!is_tensor(tensor)) return PyErr_Format(PyExc_TypeError, "a lender takes a tensor first");
    Lender *lender = (Lender *)type->tp_alloc(type, 0);
    if (lender == NULL) return NULL;
    lender->vectorcall = lender_call;
    lender->tensor = Py_NewRef(tensor);
    lender->storage = Py_NewRef(storage);
    lender->handle = Py_NewRef(handle);
    lender->use_count = Py_NewRef(use_count);
    if (shim.get_data_ptr(tensor_handle(tensor), &lender->pointer) || storage_size(tensor_handle(tensor), &lender->nbytes)) {
        PyErr_SetString(PyExc_ValueError, "a lender takes a tensor with storage");
        Py_CLEAR(lender);
    }
    return (PyObject *)lender;
}

static PyObject *lender_settle(PyObject *self, PyObject *unused) {
    Lender *lender = (Lender *)self;
    lender->owners = owners_of(lender);
    lender->references = Py_REFCNT(lender->storage);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static int lender_traverse(PyObject *self, visitproc visit, void *arg) {
    Lender *lender = (Lender *)self;
    Py_VISIT(lender->tensor);
    Py_VISIT(lender->storage);
    Py_VISIT(lender->use_count);
    return 0;
}

static int lender_clear(PyObject *self) {
    Lender *lender = (Lender *)self;
    Py_CLEAR(lender->tensor);
    Py_CLEAR(lender->storage);
    Py_CLEAR(lender->use_count);
    return 0;
}

static void lender_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    lender_clear(self);
    Py_CLEAR(((Lender *)self)->handle);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef lender_methods[] = {
    {"settle", lender_settle, METH_NOARGS, "settle(): who refers to the storage now are the pool's own"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Lender_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.Lender",
    .tp_doc = "Lender(tensor, storage, handle, use_count)\n\n"
              "Callable on sizes and strides: a tensor over the tensor's storage, or None while others refer to that,\n"
              "or when its memory was moved. `settle` is called once, when the pool has its own references.",
    .tp_basicsize = sizeof(Lender),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Lender, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = lender_new,
    .tp_methods = lender_methods,
    .tp_traverse = lender_traverse,
    .tp_clear = lender_clear,
    .tp_dealloc = lender_dealloc,
};

int lend_init(PyObject *module) {
    reinterpret = torch_symbol("aoti_torch__reinterpret_tensor");
    delete_handle = torch_symbol("aoti_torch_delete_tensor_object");
    storage_size = torch_symbol("aoti_torch_get_storage_size");
    wrap = torch_symbol("_Z16THPVariable_WrapRKN2at10TensorBaseE");
    bool lends = shim.ready && reinterpret && delete_handle && storage_size && wrap;
    if (PyType_Ready(&Lender_Type) < 0) return -1;
    return PyModule_AddObjectRef(module, "Lender", lends ? (PyObject *)&Lender_Type : Py_None);
}
