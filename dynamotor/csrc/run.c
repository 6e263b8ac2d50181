/* _C.Program: calls of a compiled graph, without a frame of Python around the function of its text. */
#include "dynamotor.h"
#include <stddef.h>

/* c10::impl::ExcludeDispatchKeyGuard, which is a pointer and a word. */
typedef struct {
    void *tls;
    uint64_t keys;
} KeyGuard;

static void (*exclude_keys)(KeyGuard *guard, uint64_t keys);
static void (*restore_keys)(KeyGuard *guard);

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *direct;      /* the function of the text, where all calls share it; else NULL */
    PyObject *interferes;  /* () -> bool: this call is not for `direct`; None: asks for a profiler in C */
    uint64_t excluded;     /* dispatch keys that its calls of PyTorch pass over */
} Program;

static bool (*profiler_enabled)(void); /* NULL in builds that do not export it */

static int interferes(const Program *program) {
    if (LIKELY(program->interferes == Py_None)) return profiler_enabled();
    PyObject *answer = PyObject_CallNoArgs(program->interferes);
    int yes = answer == Py_False ? 0 : answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes;
}

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    static PyObject *method;
    if (method == NULL && (method = PyUnicode_InternFromString("_run")) == NULL) return NULL;
    PyObject *inputs = PyTuple_New(n);
    if (inputs == NULL) return NULL;
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(inputs, i, Py_NewRef(args[i]));
    PyObject *result = PyObject_CallMethodOneArg(self, method, inputs);
    Py_DECREF(inputs);
    return result;
}

static PyObject *program_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Program *program = (Program *)self;
    if (UNLIKELY(kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0)) {
        PyErr_SetString(PyExc_TypeError, "a program takes no keywords");
        return NULL;
    }
    int other = program->direct == NULL ? 1 : interferes(program);
    if (UNLIKELY(other != 0)) return other < 0 ? NULL : run(self, args, PyVectorcall_NARGS(nargsf));
    PyObject *direct = Py_NewRef(program->direct);
    KeyGuard guard;
    bool below = program->excluded != 0;
    if (below) exclude_keys(&guard, program->excluded);
    PyObject *result = PyObject_Vectorcall(direct, args, nargsf, NULL);
    if (below) restore_keys(&guard);
    Py_DECREF(direct);
    return result;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Program *program = (Program *)type->tp_alloc(type, 0);
    if (program != NULL) program->vectorcall = program_call;
    return (PyObject *)program;
}

static PyObject *program_call_by(PyObject *self, PyObject *args) {
    Program *program = (Program *)self;
    PyObject *direct, *interferes;
    unsigned long long excluded;
    if (!PyArg_ParseTuple(args, "OOK", &direct, &interferes, &excluded)) return NULL;
    bool unknown = interferes == Py_None && profiler_enabled == NULL;
    if (unknown) return PyErr_Format(PyExc_ValueError, "this build of PyTorch does not say whether a profiler runs");
    if (excluded != 0 && (exclude_keys == NULL || restore_keys == NULL)) Py_RETURN_FALSE;
    program->excluded = excluded;
    Py_XSETREF(program->interferes, Py_NewRef(interferes));
    Py_XSETREF(program->direct, Py_NewRef(direct));
    Py_RETURN_TRUE;
}

static int program_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Program *)self)->direct);
    Py_VISIT(((Program *)self)->interferes);
    return 0;
}

static int program_clear(PyObject *self) {
    Py_CLEAR(((Program *)self)->direct);
    Py_CLEAR(((Program *)self)->interferes);
    return 0;
}

static void program_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    program_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef program_methods[] = {
    {"call_by", program_call_by, METH_VARARGS,
     "call_by(function, interferes, excluded) -> bool: calls go to the function from now on while `interferes()` is false,\n"
     "or where that is None (see reads_profiler) while no profiler runs, without the dispatch keys of the bits `excluded`; False: this build of PyTorch cannot exclude them from C"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Program_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.Program",
    .tp_doc = "The base of callables on tensors: `_run(inputs)` of the subclass serves calls until `call_by`",
    .tp_basicsize = sizeof(Program),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_BASETYPE,
    .tp_vectorcall_offset = offsetof(Program, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = program_new,
    .tp_methods = program_methods,
    .tp_traverse = program_traverse,
    .tp_clear = program_clear,
    .tp_dealloc = program_dealloc,
};

int run_init(PyObject *module) {
    exclude_keys = torch_symbol("_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE");
    restore_keys = torch_symbol("_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev");
    profiler_enabled = torch_symbol("_ZN5torch8profiler4impl15profilerEnabledEv");
    if (PyModule_AddObjectRef(module, "reads_profiler", profiler_enabled != NULL ? Py_True : Py_False) < 0) return -1;
    return PyModule_AddType(module, &Program_Type);
}
