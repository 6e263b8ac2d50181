/* _C.OneCall: a graph that is one call of PyTorch, without a frame of Python around it. */
#include "dynamotor.h"
#include <stddef.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function;
    PyObject *arguments; /* a tuple; those of the graph's inputs are None here */
    PyObject *names;     /* of the last arguments, or NULL */
    PyObject *checks;    /* a tuple: each lets one result through */
    Py_ssize_t n_inputs;
    Py_ssize_t *inputs; /* for each argument the input that it is, or -1 */
    Py_ssize_t *places; /* for each check the place of its result in the call's, or -1: it is the call's */
} OneCall;

enum { MOST_ARGUMENTS = 32 };

static PyObject *result_at(PyObject *found, Py_ssize_t place) {
    if (place < 0) return Py_NewRef(found);
    return PyTuple_Check(found) && place < PyTuple_GET_SIZE(found) ? Py_NewRef(PyTuple_GET_ITEM(found, place))
                                                                   : PySequence_GetItem(found, place);
}

static PyObject *one_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    const OneCall *call = (OneCall *)self;
    if (UNLIKELY(PyVectorcall_NARGS(nargsf) != call->n_inputs || (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0)))
        return PyErr_Format(PyExc_TypeError, "this graph takes %zd inputs and no keywords", call->n_inputs);
    PyObject *room[MOST_ARGUMENTS + 1], **passed = room + 1; /* PY_VECTORCALL_ARGUMENTS_OFFSET */
    Py_ssize_t n = PyTuple_GET_SIZE(call->arguments), named = call->names != NULL ? PyTuple_GET_SIZE(call->names) : 0;
    for (Py_ssize_t i = 0; i < n; i++)
        passed[i] = call->inputs[i] < 0 ? PyTuple_GET_ITEM(call->arguments, i) : args[call->inputs[i]];
    PyObject *found = PyObject_Vectorcall(call->function, passed, (size_t)(n - named) | PY_VECTORCALL_ARGUMENTS_OFFSET, call->names);
    if (found == NULL) return NULL;
    PyObject *results = PyTuple_New(PyTuple_GET_SIZE(call->checks));
    for (Py_ssize_t i = 0; results != NULL && i < PyTuple_GET_SIZE(call->checks); i++) {
        PyObject *one = result_at(found, call->places[i]);
        PyObject *checked = one != NULL ? PyObject_CallOneArg(PyTuple_GET_ITEM(call->checks, i), one) : NULL;
        Py_XDECREF(one);
        if (checked != NULL) PyTuple_SET_ITEM(results, i, checked);
        else Py_CLEAR(results);
    }
    Py_DECREF(found);
    return results;
}

/* Numbers of a tuple, each at least -1 and below `limit`; NULL with an exception. */
static Py_ssize_t *numbers_below(PyObject *tuple, Py_ssize_t limit) {
    Py_ssize_t n = PyTuple_GET_SIZE(tuple), *numbers = PyMem_Calloc((size_t)n + 1, sizeof(Py_ssize_t));
    if (numbers == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; numbers != NULL && i < n; i++) {
        numbers[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
        if (!PyErr_Occurred() && (numbers[i] < -1 || numbers[i] >= limit)) PyErr_SetString(PyExc_ValueError, "no such place");
    }
    return numbers;
}

static int fill(OneCall *call, PyObject *inputs, PyObject *places, PyObject *names) {
    Py_ssize_t n = PyTuple_GET_SIZE(call->arguments), named = PyTuple_GET_SIZE(names);
    bool alike = n <= MOST_ARGUMENTS && n >= named && PyTuple_GET_SIZE(inputs) == n &&
                 PyTuple_GET_SIZE(places) == PyTuple_GET_SIZE(call->checks);
    if (!alike) PyErr_SetString(PyExc_ValueError, "a call needs an input or -1 for each argument, and a place for each check");
    else if (named > 0) call->names = Py_NewRef(names);
    if (alike && (call->inputs = numbers_below(inputs, call->n_inputs)) != NULL)
        call->places = numbers_below(places, PY_SSIZE_T_MAX);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *one_call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *function, *arguments, *inputs, *names, *checks, *places;
    Py_ssize_t n_inputs;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!O!n", &function, &PyTuple_Type, &arguments, &PyTuple_Type, &inputs, &PyTuple_Type, &names,
                          &PyTuple_Type, &checks, &PyTuple_Type, &places, &n_inputs))
        return NULL;
    OneCall *call = (OneCall *)type->tp_alloc(type, 0);
    if (call == NULL) return NULL;
    call->vectorcall = one_call;
    call->function = Py_NewRef(function);
    call->arguments = Py_NewRef(arguments);
    call->checks = Py_NewRef(checks);
    call->n_inputs = n_inputs;
    if (fill(call, inputs, places, names) < 0) Py_CLEAR(call);
    return (PyObject *)call;
}

static int one_call_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((OneCall *)self)->function);
    Py_VISIT(((OneCall *)self)->arguments);
    Py_VISIT(((OneCall *)self)->names);
    Py_VISIT(((OneCall *)self)->checks);
    return 0;
}

/* The arguments and checks stay: a call that runs reads them. */
static int one_call_clear(PyObject *self) {
    Py_CLEAR(((OneCall *)self)->function);
    return 0;
}

static void one_call_dealloc(PyObject *self) {
    OneCall *call = (OneCall *)self;
    PyObject_GC_UnTrack(self);
    one_call_clear(self);
    Py_XDECREF(call->arguments);
    Py_XDECREF(call->names);
    Py_XDECREF(call->checks);
    PyMem_Free(call->inputs);
    PyMem_Free(call->places);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject OneCall_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.OneCall",
    .tp_doc = "OneCall(function, arguments, inputs, names, checks, places, n_inputs)\n\n"
              "Callable on n_inputs values: calls the function on the arguments, the last ones by `names`; `inputs` says for\n"
              "each which value takes its place, or -1. Gives a tuple: `checks[i]` of the call's result, or of the one at places[i].",
    .tp_basicsize = sizeof(OneCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(OneCall, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = one_call_new,
    .tp_traverse = one_call_traverse,
    .tp_clear = one_call_clear,
    .tp_dealloc = one_call_dealloc,
};

int one_call_init(PyObject *module) {
    return PyModule_AddType(module, &OneCall_Type);
}
