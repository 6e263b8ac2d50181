/* The PEP 523 hook: on only on a thread whose graph break is running user code, so that functions entered there are
 * captured too. Everywhere else it is not installed at all.
 *
 * A frame whose result a dispatcher has computed is not evaluated: its result is put on the frame's own stack, and
 * CPython's evaluator runs `RETURN_VALUE` on it, so that the frame is unlinked and cleared by CPython itself. */
#define Py_BUILD_CORE
#include "dynamotor.h"
#include <structmember.h>

/* _C.FrameHook: a callback and its answers. */
typedef struct {
    PyObject_HEAD
    PyObject *callback; /* (code, function) -> Dispatcher, None (native) or False (native with all that it calls) */
    PyObject *answers;  /* address of a code object -> (code, globals, Dispatcher or None) */
    PyObject *classes;  /* only frames with an instance of these among parameters and closure are asked for; NULL: all */
    PyObject *around;   /* calls dispatchers, (dispatcher, *args) -> result; NULL: they are called */
} FrameHook;

static PyTypeObject FrameHook_Type;
static __thread FrameHook *active; /* owned by this thread */
static int n_threads;              /* threads with an active hook; under the GIL */
static _PyFrameEvalFunction below = _PyEval_EvalFrameDefault; /* the function installed before ours: CPython's, or torch.compile's */
static __thread bool alone;        /* no other tool sees the frames of this thread */
static PyCodeObject *return_code;  /* RESUME, RETURN_VALUE */

static bool is_hookable(const PyCodeObject *code) {
    int body = CO_OPTIMIZED | CO_NEWLOCALS, generator = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR;
    return (code->co_flags & body) == body && (code->co_flags & (generator | FREE_CODE_FLAG)) == 0 && code->co_stacksize > 0;
}

static Py_ssize_t n_bound(const PyCodeObject *code) {
    return code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) + !!(code->co_flags & CO_VARKEYWORDS);
}

static bool is_instance(PyObject *value, PyObject *classes) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(classes); i++)
        if (PyObject_TypeCheck(value, (PyTypeObject *)PyTuple_GET_ITEM(classes, i))) return true;
    return false;
}

/* The value itself, an item of a list, tuple or dict, or an attribute of an instance of a Python class. */
static bool concerns(PyObject *value, PyObject *classes) {
    if (value == NULL) return false;
    if (is_instance(value, classes)) return true;
    if (PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE) && !PyType_Check(value) && !PyDict_Check(value)) {
        PyObject **attributes = _PyObject_GetDictPtr(value);
        if (attributes == NULL || *attributes == NULL) return false;
        value = *attributes;
    }
    if (PyTuple_Check(value) || PyList_Check(value)) {
        PyObject **items = PyTuple_Check(value) ? &PyTuple_GET_ITEM(value, 0) : ((PyListObject *)value)->ob_item;
        for (Py_ssize_t i = 0; i < Py_SIZE(value); i++)
            if (is_instance(items[i], classes)) return true;
    } else if (PyDict_Check(value)) {
        PyObject *item;
        Py_ssize_t position = 0;
        while (PyDict_Next(value, &position, NULL, &item))
            if (is_instance(item, classes)) return true;
    }
    return false;
}

static bool any_concerns(const FrameHook *hook, PyFunctionObject *function, PyObject *const *values, Py_ssize_t n) {
    if (hook->classes == NULL) return true;
    for (Py_ssize_t i = 0; i < n; i++)
        if (concerns(values[i], hook->classes)) return true;
    PyObject *closure = function->func_closure;
    for (Py_ssize_t i = 0; closure != NULL && i < PyTuple_GET_SIZE(closure); i++)
        if (concerns(PyCell_GET(PyTuple_GET_ITEM(closure, i)), hook->classes)) return true;
    return false;
}

/* New reference: the callback's answer for a function, asked once for each code object when the answer is None or the
 * function has no closure. */
static PyObject *ask(FrameHook *hook, PyFunctionObject *function) {
    PyObject *code = function->func_code, *key = PyLong_FromVoidPtr(code);
    if (key == NULL) return NULL;
    PyObject *known = PyDict_GetItemWithError(hook->answers, key), *answer = NULL;
    if (known != NULL) {
        PyObject *value = PyTuple_GET_ITEM(known, 2);
        if (value == Py_None || value == Py_False || PyTuple_GET_ITEM(known, 1) == function->func_globals) answer = Py_NewRef(value);
    }
    if (answer == NULL && !PyErr_Occurred()) {
        PyObject *args[2] = {code, (PyObject *)function};
        answer = PyObject_Vectorcall(hook->callback, args, 2, NULL);
        if (answer != NULL && answer != Py_None && answer != Py_False && !Py_IS_TYPE(answer, &Dispatcher_Type)) {
            PyErr_Format(PyExc_TypeError, "a frame hook returns a Dispatcher or None or False, not %R", answer);
            Py_CLEAR(answer);
        }
        if (answer != NULL && (answer == Py_None || answer == Py_False || function->func_closure == NULL)) {
            PyObject *entry = PyTuple_Pack(3, code, function->func_globals, answer);
            if (entry == NULL || PyDict_SetItem(hook->answers, key, entry) < 0) Py_CLEAR(answer);
            Py_XDECREF(entry);
        }
    }
    Py_DECREF(key);
    return answer;
}

/* End a frame that has not started with a result (owned) or, when it is NULL, with the exception that is set. */
static PyObject *end_frame(PyThreadState *tstate, _PyInterpreterFrame *frame, PyObject *result) {
    /* Thrown into before its first instruction, where no handler is: it unwinds. */
    if (result == NULL) return _PyEval_EvalFrameDefault(tstate, frame, 1);
    frame_become(frame, return_code, result);
    return _PyEval_EvalFrameDefault(tstate, frame, 0);
}

/* To the hook below ours. torch.compile's, put on again above ours, takes ours for the one below it: what comes back is CPython's. */
static PyObject *pass_on(PyThreadState *tstate, _PyInterpreterFrame *frame, int throwing) {
    static __thread _PyInterpreterFrame *passed;
    _PyInterpreterFrame *before = passed;
    if (below == _PyEval_EvalFrameDefault || passed == frame) return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    passed = frame;
    PyObject *result = below(tstate, frame, throwing);
    passed = before;
    return result;
}

static PyObject *call_dispatcher(FrameHook *hook, PyObject *dispatcher, PyObject *const *args, Py_ssize_t n) {
    if (hook->around == NULL || hook->around == Py_None) return PyObject_Vectorcall(dispatcher, args, (size_t)n, NULL);
    PyObject *around = Py_NewRef(hook->around), *all = PyTuple_New(n + 1), *result = NULL;
    for (Py_ssize_t i = 0; all != NULL && i <= n; i++) PyTuple_SET_ITEM(all, i, Py_NewRef(i == 0 ? dispatcher : args[i - 1]));
    if (all != NULL) result = PyObject_Call(around, all, NULL);
    Py_XDECREF(all);
    Py_DECREF(around);
    return result;
}

static PyObject *evaluate(PyThreadState *tstate, _PyInterpreterFrame *frame, int throwing) {
    FrameHook *hook = active;
    if (hook == NULL) return pass_on(tstate, frame, throwing);
    PyObject *function = frame_function(frame);
    PyCodeObject *code = frame_code(frame);
    if (throwing || !is_hookable(code) || !PyFunction_Check(function) || ((PyFunctionObject *)function)->func_code != (PyObject *)code)
        return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    Py_ssize_t n = n_bound(code);
    PyObject *room[n + 1];
    PyObject *const *arguments = frame_slots(frame, n, room);
    if (!any_concerns(hook, (PyFunctionObject *)function, arguments, n)) return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    active = NULL; /* frames of the callback and the dispatcher are ours */
    PyObject *dispatcher = ask(hook, (PyFunctionObject *)function), *result = NULL;
    if (dispatcher == Py_False) { /* natively, and so is everything that it calls */
        Py_DECREF(dispatcher);
        result = _PyEval_EvalFrameDefault(tstate, frame, 0);
        active = hook;
        return result;
    }
    if (dispatcher == NULL || dispatcher == Py_None || dispatcher_is_disabled(dispatcher)) {
        active = hook;
        if (dispatcher == NULL) return end_frame(tstate, frame, NULL);
        Py_DECREF(dispatcher);
        return _PyEval_EvalFrameDefault(tstate, frame, 0);
    }
    /* The frame keeps its references while the dispatcher runs: user code may replace none of them, it has not started. */
    result = call_dispatcher(hook, dispatcher, arguments, n);
    active = hook;
    Py_DECREF(dispatcher);
    return end_frame(tstate, frame, result);
}

PyObject *frame_hook_suspend(void) {
    FrameHook *hook = active;
    active = NULL;
    return (PyObject *)hook;
}

void frame_hook_restore(PyObject *hook) { active = (FrameHook *)hook; }

/* torch.compile's frame hook sees every Python frame on its thread: the compiler itself and compiled code are none of its. */
bool other_hooks_see_frames(void) {
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
    return UNLIKELY(now != _PyEval_EvalFrameDefault && (now != evaluate || below != _PyEval_EvalFrameDefault)) && !alone;
}

/* torch.compile's callback for this thread becomes `callback`; a new reference to the previous one. */
static PyObject *set_torch_callback(PyObject *callback) {
    PyObject *module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
    PyObject *previous = module != NULL ? PyObject_CallMethod(module, "set_eval_frame", "O", callback) : NULL;
    Py_XDECREF(module);
    return previous;
}

PyObject *call_unseen(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    PyObject *callback = set_torch_callback(Py_None);
    if (callback == NULL) return NULL;
    alone = true;
    PyObject *result = PyObject_Vectorcall(callable, args, nargsf, kwnames), *type, *value, *traceback;
    alone = false;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *ours = set_torch_callback(callback);
    Py_DECREF(callback);
    if (ours == NULL) Py_CLEAR(result);
    else PyErr_Restore(type, value, traceback);
    Py_XDECREF(ours);
    return result;
}

/* Takes over the reference to `hook`; gives the previous one to the caller. */
static FrameHook *exchange(FrameHook *hook) {
    FrameHook *previous = active;
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (hook != NULL && previous == NULL && n_threads++ == 0 && now != evaluate) {
        below = now;
        _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluate);
    }
    if (hook == NULL && previous != NULL && --n_threads == 0 && now == evaluate) {
        _PyInterpreterState_SetEvalFrameFunc(interpreter, below);
        below = _PyEval_EvalFrameDefault;
    }
    active = hook;
    return previous;
}

static PyObject *py_set_frame_hook(PyObject *self, PyObject *hook) {
    if (hook != Py_None && !Py_IS_TYPE(hook, &FrameHook_Type))
        return PyErr_Format(PyExc_TypeError, "set_frame_hook takes a FrameHook or None, not %R", hook);
    FrameHook *previous = exchange(hook == Py_None ? NULL : (FrameHook *)Py_NewRef(hook));
    return previous != NULL ? (PyObject *)previous : Py_NewRef(Py_None);
}

/* FrameHook.call(function, *args): call it with this hook on. */
static PyObject *hook_call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "call takes a function and its arguments");
        return NULL;
    }
    FrameHook *previous = exchange((FrameHook *)Py_NewRef(self));
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1), NULL);
    Py_XDECREF(exchange(previous));
    return result;
}

/* FrameHook.skip(code): functions of this code run natively, without asking. */
static PyObject *hook_skip(PyObject *self, PyObject *code) {
    PyObject *key = PyLong_FromVoidPtr(code), *entry = PyTuple_Pack(3, code, Py_None, Py_None);
    int failed = key == NULL || entry == NULL || PyDict_SetItem(((FrameHook *)self)->answers, key, entry) < 0;
    Py_XDECREF(key);
    Py_XDECREF(entry);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *callback, *classes = NULL;
    if (!PyArg_ParseTuple(args, "O|O!", &callback, &PyTuple_Type, &classes)) return NULL;
    for (Py_ssize_t i = 0; classes != NULL && i < PyTuple_GET_SIZE(classes); i++)
        if (!PyType_Check(PyTuple_GET_ITEM(classes, i))) return PyErr_Format(PyExc_TypeError, "FrameHook takes a tuple of classes");
    FrameHook *hook = (FrameHook *)type->tp_alloc(type, 0);
    if (hook == NULL) return NULL;
    hook->callback = Py_NewRef(callback);
    hook->classes = Py_XNewRef(classes);
    hook->answers = PyDict_New();
    if (hook->answers == NULL) Py_CLEAR(hook);
    return (PyObject *)hook;
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((FrameHook *)self)->callback);
    Py_VISIT(((FrameHook *)self)->answers);
    Py_VISIT(((FrameHook *)self)->classes);
    Py_VISIT(((FrameHook *)self)->around);
    return 0;
}

static int hook_clear(PyObject *self) {
    Py_CLEAR(((FrameHook *)self)->callback);
    Py_CLEAR(((FrameHook *)self)->answers);
    Py_CLEAR(((FrameHook *)self)->classes);
    Py_CLEAR(((FrameHook *)self)->around);
    return 0;
}

static void hook_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef hook_methods[] = {
    {"call", (PyCFunction)(void (*)(void))hook_call, METH_FASTCALL, "call(function, *args): call it with this hook on"},
    {"skip", hook_skip, METH_O, "skip(code): run functions of this code object natively, without asking"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef hook_members[] = {
    {"around", T_OBJECT, offsetof(FrameHook, around), 0, "what calls dispatchers, (dispatcher, *args) -> result; None: nothing does"},
    {"answers", T_OBJECT, offsetof(FrameHook, answers), READONLY, "id of a code object -> (code, globals, answer)"},
    {NULL},
};

static PyTypeObject FrameHook_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.FrameHook",
    .tp_doc = "FrameHook(callback, classes=None): asks callback(code, function) -> Dispatcher | None | False for each function\n"
              "entered while on (None: native; False: native with all it calls); with a tuple of classes only where a parameter or closure variable,\nor an item or attribute of one, is an instance of these.\n\n"
              "A Dispatcher gets the frame's bound parameters in the order of co_varnames (*args and **kwargs as one each).",
    .tp_basicsize = sizeof(FrameHook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = hook_new,
    .tp_traverse = hook_traverse,
    .tp_clear = hook_clear,
    .tp_dealloc = hook_dealloc,
    .tp_methods = hook_methods,
    .tp_members = hook_members,
};

static PyMethodDef methods[] = {
    {"set_frame_hook", py_set_frame_hook, METH_O, "set_frame_hook(hook or None) -> the previous one; for this thread"},
    {NULL, NULL, 0, NULL},
};

/* A code object with one stack slot that ends in RETURN_VALUE; its first instructions are replaced by just that. */
static PyCodeObject *make_return_code(void) {
    PyObject *code = Py_CompileString("lambda x: x", "<dynamotor>", Py_eval_input), *result = NULL;
    PyObject *consts = code != NULL ? PyObject_GetAttrString(code, "co_consts") : NULL;
    PyObject *lambda = consts != NULL ? PyTuple_GetItem(consts, 0) : NULL; /* RESUME, LOAD_FAST 0, RETURN_VALUE */
    PyObject *bytes = lambda != NULL ? PyObject_GetAttrString(lambda, "co_code") : NULL;
    if (bytes != NULL && PyBytes_GET_SIZE(bytes) == 6) {
        const char *old = PyBytes_AS_STRING(bytes);
        char data[6] = {old[0], old[1], old[4], old[5], old[4], old[5]};
        PyObject *replace = PyObject_GetAttrString(lambda, "replace");
        PyObject *none = PyTuple_New(0), *kwargs = Py_BuildValue("{s:y#}", "co_code", data, (Py_ssize_t)6);
        if (replace != NULL && none != NULL && kwargs != NULL) result = PyObject_Call(replace, none, kwargs);
        Py_XDECREF(replace);
        Py_XDECREF(none);
        Py_XDECREF(kwargs);
    } else if (bytes != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "DM201: this Python's bytecode is not the one dynamotor was built for");
    }
    Py_XDECREF(bytes);
    Py_XDECREF(consts);
    Py_XDECREF(code);
    return (PyCodeObject *)result;
}

int frame_hook_init(PyObject *module) {
    return_code = make_return_code();
    if (return_code == NULL || PyModule_AddFunctions(module, methods) < 0) return -1;
    return PyModule_AddType(module, &FrameHook_Type);
}
