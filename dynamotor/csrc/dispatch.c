/* _C.Dispatcher, the callable that stands in for a user's function, and _C.Entry, one compiled version of it.
 * A call tries the entries: guards -> gather inputs -> run -> finish. When none fits, `miss` captures a new one. */
#include "dynamotor.h"
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    GuardProgram *program;
    PyObject *run;     /* callable on the inputs */
    PyObject *finish;  /* callable (outs, args), or NULL: the outs are the result */
    PyObject *kwnames; /* keywords in the order of the call */
    PyObject *info;    /* whatever Python keeps beside: guards, graph, reasons */
    Py_ssize_t n_positional;
    unsigned long long hits;
    char general; /* it has symbols in the place of sizes, and comes after the entries of fixed sizes */
} Entry;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *entries;  /* tuple, replaced and never changed: a running call keeps its own */
    PyObject *miss;     /* (dispatcher, args, kwnames) -> result */
    PyObject *original; /* called when disabled */
    PyObject *raised;   /* (entry, error, args, kwnames) -> result, when an entry's run raised; NULL: the error goes on */
    PyObject *name;
    PyObject *dict;
    PyObject *weakrefs;
    char disabled;
    unsigned long long misses;
} Dispatcher;

/* ---- Entry ---- */

static PyTypeObject Entry_Type;

static PyObject *entry_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"program", "run", "finish", "n_positional", "kwnames", "info", NULL};
    PyObject *program, *run, *finish, *kwnames, *info = Py_None;
    Py_ssize_t n_positional;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOnO!|O", names, &GuardProgram_Type, &program, &run, &finish,
                                     &n_positional, &PyTuple_Type, &kwnames, &info))
        return NULL;
    Entry *entry = (Entry *)type->tp_alloc(type, 0);
    if (entry == NULL) return NULL;
    entry->program = (GuardProgram *)Py_NewRef(program);
    entry->run = Py_NewRef(run);
    entry->finish = finish == Py_None ? NULL : Py_NewRef(finish);
    entry->kwnames = Py_NewRef(kwnames);
    entry->info = Py_NewRef(info);
    entry->n_positional = n_positional;
    return (PyObject *)entry;
}

static int entry_traverse(PyObject *self, visitproc visit, void *arg) {
    Entry *entry = (Entry *)self;
    Py_VISIT(entry->program);
    Py_VISIT(entry->run);
    Py_VISIT(entry->finish);
    Py_VISIT(entry->kwnames);
    Py_VISIT(entry->info);
    return 0;
}

static int entry_clear(PyObject *self) {
    Entry *entry = (Entry *)self;
    Py_CLEAR(entry->program);
    Py_CLEAR(entry->run);
    Py_CLEAR(entry->finish);
    Py_CLEAR(entry->kwnames);
    Py_CLEAR(entry->info);
    return 0;
}

static void entry_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    entry_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef entry_members[] = {
    {"program", T_OBJECT, offsetof(Entry, program), READONLY, "the guard program"},
    {"run", T_OBJECT, offsetof(Entry, run), 0, "the compiled callable on the inputs"},
    {"finish", T_OBJECT, offsetof(Entry, finish), 0, "(outs, args) -> result, or None"},
    {"kwnames", T_OBJECT, offsetof(Entry, kwnames), READONLY, "keywords of the calls it serves"},
    {"info", T_OBJECT, offsetof(Entry, info), 0, "what Python keeps beside"},
    {"n_positional", T_PYSSIZET, offsetof(Entry, n_positional), READONLY, "positional arguments of the calls it serves"},
    {"hits", T_ULONGLONG, offsetof(Entry, hits), READONLY, "calls served"},
    {"general", T_BOOL, offsetof(Entry, general), 0, "true: tried after the entries that are not"},
    {NULL},
};

static PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.Entry",
    .tp_doc = "Entry(program, run, finish, n_positional, kwnames, info=None): one compiled version of a function",
    .tp_basicsize = sizeof(Entry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = entry_new,
    .tp_traverse = entry_traverse,
    .tp_clear = entry_clear,
    .tp_dealloc = entry_dealloc,
    .tp_members = entry_members,
};

static bool same_keywords(PyObject *call, PyObject *entry) {
    if (call == entry) return true;
    Py_ssize_t n = call == NULL ? 0 : PyTuple_GET_SIZE(call);
    if (n != PyTuple_GET_SIZE(entry)) return false;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *a = PyTuple_GET_ITEM(call, i), *b = PyTuple_GET_ITEM(entry, i);
        if (a != b && PyUnicode_Compare(a, b) != 0) return false;
    }
    return true;
}

/* ---- calls ---- */

static bool force_eager; /* every dispatcher that compiles calls its original */

/* torch.compiler.set_stance stores its stance in the module torch._dynamo.eval_frame, which is not imported for this:
 * until a program does so itself, the version of sys.modules says that there is none; then that of the module's dict
 * says that the stance is the one read last. A call compares one word. */
static struct {
    PyObject *watched; /* sys.modules, then the dict of eval_frame */
    uint64_t version;
    bool is_module, force_eager;
} torch_stance;

static bool watch_for_stance(PyObject *dict, bool is_module) {
    if (dict_watch(dict) < 0) return false;
    torch_stance.is_module = is_module;
    Py_XSETREF(torch_stance.watched, Py_NewRef(dict));
    return true;
}

static bool reads_force_eager(void) {
    static PyObject *module_name;
    if (module_name == NULL) module_name = PyUnicode_InternFromString("torch._dynamo.eval_frame");
    PyObject *module = torch_stance.is_module ? NULL : PyDict_GetItemWithError(torch_stance.watched, module_name);
    if (module != NULL && PyModule_Check(module) && !watch_for_stance(PyModule_GetDict(module), true)) return false;
    torch_stance.version = *dict_version_word(torch_stance.watched) & DICT_VERSION_BITS;
    PyObject *stance = torch_stance.is_module ? PyDict_GetItemString(torch_stance.watched, "_stance") : NULL;
    PyObject *name = stance != NULL ? PyObject_GetAttrString(stance, "stance") : NULL;
    bool eager = name != NULL && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "force_eager") == 0;
    Py_XDECREF(name);
    return eager;
}

static bool torch_forces_eager(void) {
    if (UNLIKELY((*dict_version_word(torch_stance.watched) & DICT_VERSION_BITS) != torch_stance.version)) {
        torch_stance.force_eager = reads_force_eager();
        PyErr_Clear(); /* a PyTorch that has no such stance */
    }
    return torch_stance.force_eager;
}

static bool calls_are_eager(void) { return force_eager || torch_forces_eager(); }

static PyObject *py_set_force_eager(PyObject *self, PyObject *on) {
    bool before = force_eager;
    force_eager = PyObject_IsTrue(on) == 1;
    return PyBool_FromLong(before);
}

/* The `finish` of a function that returns several results as one of PyTorch's named tuples; `self` is their class. */
static PyObject *py_named_results(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n == 2) return PyObject_CallOneArg(self, args[0]);
    PyErr_SetString(PyExc_TypeError, "the function takes outs and args");
    return NULL;
}

static PyMethodDef named_results_method = {"named_results", (PyCFunction)(void (*)(void))py_named_results, METH_FASTCALL,
                                           "named_results(outs, args): the class of these results, called on outs"};

static PyObject *py_named_by(PyObject *module, PyObject *cls) {
    (void)module;
    return PyCFunction_New(&named_results_method, cls);
}

static PyMethodDef dispatch_functions[] = {
    {"set_force_eager", py_set_force_eager, METH_O, "set_force_eager(on) -> before: compiled callables call their originals"},
    {"named_by", py_named_by, METH_O, "named_by(class) -> finish(outs, args): the class called on outs"},
    {NULL, NULL, 0, NULL},
};

static PyObject *flat_arguments(PyObject *const *args, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    return tuple;
}

/* The `finish` of most functions. */
static PyObject *first_result;

static PyObject *py_first_result(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n == 2) return PySequence_GetItem(args[0], 0);
    PyErr_SetString(PyExc_TypeError, "first_result takes outs and args");
    return NULL;
}

static PyMethodDef first_result_method = {"first_result", (PyCFunction)(void (*)(void))py_first_result, METH_FASTCALL,
                                          "first_result(outs, args): the first of outs"};

static PyObject *finish_call(Entry *entry, PyObject *outs, PyObject *const *args, Py_ssize_t n) {
    if (entry->finish == NULL) return outs;
    if (entry->finish == first_result) {
        bool plain = PyTuple_CheckExact(outs) && PyTuple_GET_SIZE(outs) > 0;
        PyObject *first = plain ? Py_NewRef(PyTuple_GET_ITEM(outs, 0)) : PySequence_GetItem(outs, 0);
        Py_DECREF(outs);
        return first;
    }
    PyObject *flat = flat_arguments(args, n), *result = NULL;
    if (flat != NULL) {
        PyObject *pair[2] = {outs, flat};
        result = PyObject_Vectorcall(entry->finish, pair, 2, NULL);
        Py_DECREF(flat);
    }
    Py_DECREF(outs);
    return result;
}

/* As PyObject_Vectorcall. Classes written in Python do not say that they inherit it (CPython 3.11). */
static inline PyObject *call_run(PyObject *run, PyObject *const *inputs, size_t nargsf) {
    PyTypeObject *type = Py_TYPE(run);
    if (type->tp_call != PyVectorcall_Call || type->tp_vectorcall_offset <= 0) return PyObject_Vectorcall(run, inputs, nargsf, NULL);
    vectorcallfunc call = *(vectorcallfunc *)((char *)run + type->tp_vectorcall_offset);
    return call(run, inputs, nargsf, NULL);
}

enum { INPUTS_ON_STACK = 512 };

/* 1: *result is the call's result (NULL with an exception); 0: the guards do not hold; 2: `run` raised. */
static int try_entry(Entry *entry, PyObject *const *args, Py_ssize_t n, PyObject **result) {
    PyObject *few[INPUTS_ON_STACK + 1], **room = few;
    Py_ssize_t n_inputs = guard_program_n_inputs(entry->program);
    if (n_inputs > INPUTS_ON_STACK) room = PyMem_Malloc(sizeof(PyObject *) * (size_t)(n_inputs + 1));
    *result = NULL;
    if (room == NULL) {
        PyErr_NoMemory();
        return 1;
    }
    /* The place before the first input is the callee's to use (PY_VECTORCALL_ARGUMENTS_OFFSET). */
    int holds = guard_program_run(entry->program, args, n, room + 1);
    if (holds == 1) {
        entry->hits++;
        PyObject *outs = call_run(entry->run, room + 1, (size_t)n_inputs | PY_VECTORCALL_ARGUMENTS_OFFSET);
        for (Py_ssize_t i = 1; i <= n_inputs; i++) Py_DECREF(room[i]);
        if (outs != NULL) *result = finish_call(entry, outs, args, n);
        else holds = 2;
    }
    if (room != few) PyMem_Free(room);
    return holds < 0 ? 1 : holds;
}

/* What `raised` makes of the exception that an entry's run has set. */
static PyObject *handle_raised(Dispatcher *self, Entry *entry, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    if (self->raised == NULL || !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyObject *type, *error, *traceback, *result = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    PyObject *flat = flat_arguments(args, n), *names = kwnames != NULL ? Py_NewRef(kwnames) : PyTuple_New(0);
    if (flat != NULL && names != NULL) {
        PyObject *passed[4] = {(PyObject *)entry, error, flat, names};
        result = PyObject_Vectorcall(self->raised, passed, 4, NULL);
    }
    Py_XDECREF(flat);
    Py_XDECREF(names);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

/* Where an entry goes: to the front of its kind. */
static Py_ssize_t front_of(PyObject *entries, const Entry *entry) {
    Py_ssize_t n = PyTuple_GET_SIZE(entries), i = 0;
    while (entry->general && i < n && !((Entry *)PyTuple_GET_ITEM(entries, i))->general) i++;
    return i;
}

/* The entry that hit goes to the front, so that the next call meets it first. */
static void move_to_front(Dispatcher *self, PyObject *entries, Py_ssize_t index) {
    if (index == 0 || self->entries != entries) return;
    Py_ssize_t n = PyTuple_GET_SIZE(entries), front = front_of(entries, (Entry *)PyTuple_GET_ITEM(entries, index));
    if (index == front) return;
    PyObject *moved = PyTuple_New(n);
    if (moved == NULL) {
        PyErr_Clear();
        return;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t from = i == front ? index : i > front && i <= index ? i - 1 : i;
        PyTuple_SET_ITEM(moved, i, Py_NewRef(PyTuple_GET_ITEM(entries, from)));
    }
    Py_SETREF(self->entries, moved);
}

static PyObject *dispatcher_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Dispatcher *self = (Dispatcher *)callable;
    if (UNLIKELY(other_hooks_see_frames())) return call_unseen(callable, args, nargsf, kwnames);
    if (UNLIKELY((self->disabled || (calls_are_eager() && self->miss != Py_None)) && self->original != NULL)) return PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    if (UNLIKELY(self->entries == NULL)) {
        PyErr_SetString(PyExc_ReferenceError, "the compiled function was called while it was being destroyed");
        return NULL;
    }
    Py_ssize_t n_positional = PyVectorcall_NARGS(nargsf);
    Py_ssize_t n = n_positional + (kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0);
    PyObject *entries = Py_NewRef(self->entries), *result = NULL, *hook = frame_hook_suspend();
    Py_INCREF(callable); /* the call may drop the last reference to it */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); i++) {
        Entry *entry = (Entry *)PyTuple_GET_ITEM(entries, i);
        if (entry->n_positional != n_positional || !same_keywords(kwnames, entry->kwnames)) continue;
        int served = try_entry(entry, args, n, &result);
        if (served) {
            if (served == 2) result = handle_raised(self, entry, args, n, kwnames);
            if (result != NULL) move_to_front(self, entries, i);
            goto done;
        }
    }
    self->misses++;
    PyObject *flat = flat_arguments(args, n);
    PyObject *names = kwnames != NULL ? Py_NewRef(kwnames) : PyTuple_New(0);
    if (flat != NULL && names != NULL) {
        PyObject *passed[3] = {callable, flat, names};
        result = PyObject_Vectorcall(self->miss, passed, 3, NULL);
    }
    Py_XDECREF(flat);
    Py_XDECREF(names);
done:
    frame_hook_restore(hook);
    Py_DECREF(entries);
    Py_DECREF(callable);
    return result;
}

/* The call of an entry whose guards were found to hold for these arguments, and that gave these inputs. */
static PyObject *dispatcher_serve(PyObject *callable, PyObject *args) {
    Dispatcher *self = (Dispatcher *)callable;
    PyObject *served, *inputs, *flat;
    if (!PyArg_ParseTuple(args, "O!O!O!", &Entry_Type, &served, &PyTuple_Type, &inputs, &PyTuple_Type, &flat)) return NULL;
    PyObject *const *items = &PyTuple_GET_ITEM(flat, 0);
    Py_ssize_t n = PyTuple_GET_SIZE(flat);
    if (other_hooks_see_frames() || self->disabled || calls_are_eager() || self->entries == NULL)
        return dispatcher_call(callable, items, (size_t)n, NULL);
    Entry *entry = (Entry *)served;
    PyObject *hook = frame_hook_suspend();
    Py_INCREF(callable);
    entry->hits++;
    PyObject *outs = call_run(entry->run, &PyTuple_GET_ITEM(inputs, 0), (size_t)PyTuple_GET_SIZE(inputs));
    PyObject *result = outs != NULL ? finish_call(entry, outs, items, n) : handle_raised(self, entry, items, n, NULL);
    frame_hook_restore(hook);
    Py_DECREF(callable);
    return result;
}

bool dispatcher_is_disabled(PyObject *dispatcher) { return ((Dispatcher *)dispatcher)->disabled; }

/* ---- Dispatcher ---- */

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"miss", "original", "name", "raised", NULL};
    PyObject *miss, *original, *name = NULL, *raised = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|UO", names, &miss, &original, &name, &raised)) return NULL;
    Dispatcher *self = (Dispatcher *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = dispatcher_call;
    self->miss = Py_NewRef(miss);
    self->original = Py_NewRef(original);
    self->raised = Py_XNewRef(raised);
    self->name = name != NULL ? Py_NewRef(name) : PyUnicode_FromString("compiled");
    self->entries = PyTuple_New(0);
    if (self->name == NULL || self->entries == NULL) Py_CLEAR(self);
    return (PyObject *)self;
}

static int dispatcher_traverse(PyObject *object, visitproc visit, void *arg) {
    Dispatcher *self = (Dispatcher *)object;
    Py_VISIT(self->entries);
    Py_VISIT(self->miss);
    Py_VISIT(self->original);
    Py_VISIT(self->raised);
    Py_VISIT(self->dict);
    return 0;
}

static int dispatcher_clear_references(PyObject *object) {
    Dispatcher *self = (Dispatcher *)object;
    Py_CLEAR(self->entries);
    Py_CLEAR(self->miss);
    Py_CLEAR(self->original);
    Py_CLEAR(self->raised);
    Py_CLEAR(self->dict);
    return 0;
}

static void dispatcher_dealloc(PyObject *object) {
    Dispatcher *self = (Dispatcher *)object;
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(object);
    dispatcher_clear_references(object);
    Py_CLEAR(self->name);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *dispatcher_add(PyObject *object, PyObject *entry) {
    Dispatcher *self = (Dispatcher *)object;
    if (!Py_IS_TYPE(entry, &Entry_Type)) return PyErr_Format(PyExc_TypeError, "add takes an Entry, not %R", entry);
    PyObject *list = PySequence_List(self->entries);
    bool added = list != NULL && PyList_Insert(list, front_of(self->entries, (Entry *)entry), entry) == 0;
    PyObject *all = added ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    if (all == NULL) return NULL;
    Py_SETREF(self->entries, all);
    Py_RETURN_NONE;
}

static PyObject *dispatcher_remove(PyObject *object, PyObject *entry) {
    Dispatcher *self = (Dispatcher *)object;
    PyObject *kept = PySequence_List(self->entries);
    if (kept == NULL) return NULL;
    for (Py_ssize_t i = PyList_GET_SIZE(kept) - 1; i >= 0; i--)
        if (PyList_GET_ITEM(kept, i) == entry && PySequence_DelItem(kept, i) < 0) break;
    PyObject *all = PyErr_Occurred() ? NULL : PyList_AsTuple(kept);
    Py_DECREF(kept);
    if (all == NULL) return NULL;
    Py_SETREF(self->entries, all);
    Py_RETURN_NONE;
}

static PyObject *dispatcher_clear(PyObject *object, PyObject *unused) {
    PyObject *none = PyTuple_New(0);
    if (none == NULL) return NULL;
    Py_SETREF(((Dispatcher *)object)->entries, none);
    Py_RETURN_NONE;
}

static PyObject *dispatcher_hits(PyObject *object, void *unused) {
    PyObject *entries = ((Dispatcher *)object)->entries;
    unsigned long long hits = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); i++) hits += ((Entry *)PyTuple_GET_ITEM(entries, i))->hits;
    return PyLong_FromUnsignedLongLong(hits);
}

/* A compiled function or method is one to isinstance: torch.jit.script and torch.export take no other callables. */
static PyObject *dispatcher_class(PyObject *object, void *unused) {
    PyObject *original = ((Dispatcher *)object)->original;
    bool plain = original != NULL && (PyFunction_Check(original) || PyMethod_Check(original));
    return Py_NewRef(plain ? Py_TYPE(original) : Py_TYPE(object));
}

static PyObject *dispatcher_bind(PyObject *self, PyObject *object, PyObject *type) {
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

/* Attributes that are not the dispatcher's own are those of the callable that it stands for, so that both names of a
 * function see attributes set on one of them. Special names are not set there: `functools.update_wrapper` sets them here. */
static bool is_special(PyObject *name) {
    return PyUnicode_GET_LENGTH(name) > 2 && PyUnicode_READ_CHAR(name, 0) == '_' && PyUnicode_READ_CHAR(name, 1) == '_';
}

static PyObject *dispatcher_getattr(PyObject *object, PyObject *name) {
    PyObject *found = PyObject_GenericGetAttr(object, name), *original = ((Dispatcher *)object)->original;
    bool other = found == NULL && original != NULL && PyErr_ExceptionMatches(PyExc_AttributeError);
    bool plain = original != NULL && (PyFunction_Check(original) || PyMethod_Check(original));
    if (!other || (is_special(name) && !plain)) return found;
    PyErr_Clear();
    return PyObject_GetAttr(original, name);
}

static int dispatcher_setattr(PyObject *object, PyObject *name, PyObject *value) {
    Dispatcher *self = (Dispatcher *)object;
    int own = self->dict == NULL ? 0 : PyDict_Contains(self->dict, name);
    if (own < 0) return -1;
    if (own || is_special(name) || self->original == NULL || _PyType_Lookup(Py_TYPE(object), name) != NULL)
        return PyObject_GenericSetAttr(object, name, value);
    if (PyObject_SetAttr(self->original, name, value) == 0) return 0;
    if (value == NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear(); /* a builtin or a bound method takes no attributes */
    return PyObject_GenericSetAttr(object, name, value);
}

static PyObject *dispatcher_repr(PyObject *object) {
    Dispatcher *self = (Dispatcher *)object;
    return PyUnicode_FromFormat("<dynamotor Dispatcher %U: %zd entries>", self->name, PyTuple_GET_SIZE(self->entries));
}

static PyMethodDef dispatcher_methods[] = {
    {"add", dispatcher_add, METH_O, "add(entry): try this entry first from now on, a general one first of the general ones"},
    {"remove", dispatcher_remove, METH_O, "remove(entry): forget an entry"},
    {"serve", dispatcher_serve, METH_VARARGS, "serve(entry, inputs, args): run an entry that `entry.program.check(args)` gave these inputs"},
    {"clear", dispatcher_clear, METH_NOARGS, "clear(): forget all entries"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef dispatcher_members[] = {
    {"entries", T_OBJECT, offsetof(Dispatcher, entries), READONLY, "tuple of entries, the last hit first"},
    {"miss", T_OBJECT, offsetof(Dispatcher, miss), 0, "called as (dispatcher, args, kwnames) when no entry fits"},
    {"original", T_OBJECT, offsetof(Dispatcher, original), 0, "called instead while disabled"},
    {"name", T_OBJECT, offsetof(Dispatcher, name), READONLY, "for people"},
    {"disabled", T_BOOL, offsetof(Dispatcher, disabled), 0, "true: every call goes to original"},
    {"misses", T_ULONGLONG, offsetof(Dispatcher, misses), READONLY, "calls that no entry served"},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Dispatcher, weakrefs), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Dispatcher, dict), READONLY, NULL},
    {NULL},
};
static PyGetSetDef dispatcher_getset[] = {
    {"hits", dispatcher_hits, NULL, "calls that an entry served", NULL},
    {"__class__", dispatcher_class, NULL, "that of the function or method", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

PyTypeObject Dispatcher_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.Dispatcher",
    .tp_doc = "Dispatcher(miss, original, name='compiled', raised=None): tries its entries, then miss(dispatcher, args, kwnames);\n"
              "raised(entry, error, args, kwnames) gives the result when an entry's run raises",
    .tp_basicsize = sizeof(Dispatcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Dispatcher, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = dispatcher_bind,
    .tp_getattro = dispatcher_getattr,
    .tp_setattro = dispatcher_setattr,
    .tp_repr = dispatcher_repr,
    .tp_new = dispatcher_new,
    .tp_traverse = dispatcher_traverse,
    .tp_clear = dispatcher_clear_references,
    .tp_dealloc = dispatcher_dealloc,
    .tp_weaklistoffset = offsetof(Dispatcher, weakrefs),
    .tp_dictoffset = offsetof(Dispatcher, dict),
    .tp_methods = dispatcher_methods,
    .tp_members = dispatcher_members,
    .tp_getset = dispatcher_getset,
};

int dispatch_init(PyObject *module) {
    if (!watch_for_stance(PyImport_GetModuleDict(), false)) return -1;
    torch_stance.force_eager = reads_force_eager();
    if (PyErr_Occurred()) return -1;
    if (PyModule_AddFunctions(module, dispatch_functions) < 0) return -1;
    if ((first_result = PyCFunction_New(&first_result_method, NULL)) == NULL) return -1;
    if (PyModule_AddObjectRef(module, "first_result", first_result) < 0) return -1;
    return PyModule_AddType(module, &Entry_Type) < 0 ? -1 : PyModule_AddType(module, &Dispatcher_Type);
}
