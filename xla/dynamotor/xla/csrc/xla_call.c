/* _C.XlaCall: a call of an XLA executable on xla tensors. bridge.py derives `Program` from it, which says by
 * methods rare things: read(tensor), complete(arrays, inputs), compile(arrays, inputs), finish(results, inputs), failed(error). */
#include "xla.h"
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *order;    /* tuple: for each of the first arrays the argument that gives it, or -1 */
    PyObject *arrays;   /* list: what each call begins with */
    PyObject *outputs;  /* tuple: (place of the result, maker of the tensor, model of its `_alias`), or a callable (inputs) */
    PyObject *device;
    PyObject *start;    /* list of arrays -> list of results; None: it is to be compiled */
    PyObject *settings; /* tuple: PyTorch's, that it was compiled under */
    char completes;     /* complete() has something to add to the arrays */
    char finishes;      /* finish() has something to do with the results */
} XlaCall;

/* Values common to all programs: given once by xla_setup. */
static struct {
    PyTypeObject *tensor;
    PyObject *acquire, *release;  /* of the device's lock */
    PyObject *lanes, *lane_of;    /* dict by device, and what makes a lane that it lacks */
    PyObject *settings;           /* tuple of functions */
    PyObject *timings;
    Py_ssize_t root, node, data, lane; /* offsets of slots in an alias and in a node */
} xla;

static struct {
    PyObject *alias, *read, *complete, *compile, *finish, *failed, *execute_time;
} names;

#define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))

/* ---- arguments ---- */

/* The array that a tensor holds, a new reference; NULL without an exception: read() is to be asked. */
static PyObject *held_array(PyObject *tensor) {
    if (!Py_IS_TYPE(tensor, xla.tensor)) return NULL;
    PyObject *alias = PyObject_GetAttr(tensor, names.alias), *array = NULL;
    if (alias == NULL) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *node = SLOT(alias, xla.node);
    if (SLOT(alias, xla.root) == Py_None && node != NULL) array = SLOT(node, xla.data);
    array = array == Py_None ? NULL : Py_XNewRef(array);
    Py_DECREF(alias);
    return array;
}

static PyObject *gather(PyObject *object, PyObject *inputs) {
    XlaCall *self = (XlaCall *)object;
    PyObject *arrays = PyList_GetSlice(self->arrays, 0, PY_SSIZE_T_MAX), *order = Py_NewRef(self->order);
    for (Py_ssize_t i = 0; arrays != NULL && i < PyTuple_GET_SIZE(order); i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(order, i));
        if (index < 0) continue;
        PyObject *tensor = index < PyTuple_GET_SIZE(inputs) ? PyTuple_GET_ITEM(inputs, index) : Py_None;
        PyObject *array = held_array(tensor);
        if (array == NULL) array = PyObject_CallMethodOneArg(object, names.read, tensor);
        if (array == NULL || PyList_SetItem(arrays, i, array) < 0) Py_CLEAR(arrays);
    }
    Py_DECREF(order);
    return arrays;
}

/* ---- the run ---- */

static bool settings_hold(XlaCall *self) {
    if (self->start == Py_None) return false;
    Py_ssize_t n = PyTuple_GET_SIZE(xla.settings);
    if (PyTuple_GET_SIZE(self->settings) != n) return false;
    bool same = true;
    for (Py_ssize_t i = 0; same && i < n; i++) {
        PyObject *now = PyObject_CallNoArgs(PyTuple_GET_ITEM(xla.settings, i));
        same = now != NULL && PyObject_RichCompareBool(now, PyTuple_GET_ITEM(self->settings, i), Py_EQ) == 1;
        Py_XDECREF(now);
    }
    return same;
}

static bool count_time(double started) {
    PyObject *timing = PyObject_GetItem(xla.timings, names.execute_time);
    bool counts = timing != NULL && is_timing(timing);
    if (counts) timing_since(timing, started);
    else if (timing != NULL) PyErr_SetString(PyExc_TypeError, "a time is counted by a _C.Timing");
    Py_XDECREF(timing);
    return counts;
}

/* failed() raises what becomes of the exception that is set. */
static void tell_failure(PyObject *object) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    PyObject *told = PyObject_CallMethodOneArg(object, names.failed, error);
    if (told != NULL) PyErr_Restore(Py_NewRef(type), Py_NewRef(error), Py_XNewRef(traceback));
    Py_XDECREF(told);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

static PyObject *run(PyObject *object, PyObject *arrays) {
    double started = clock_seconds();
    PyObject *start = Py_NewRef(((XlaCall *)object)->start);
    PyObject *results = PyObject_CallOneArg(start, arrays);
    Py_DECREF(start);
    if (results == NULL)
        tell_failure(object);
    else if (!count_time(started))
        Py_CLEAR(results);
    return results;
}

/* ---- results ---- */

/* Another object of a class that has nothing but __slots__, which hold the same. */
static PyObject *copy_of(PyObject *model) {
    PyTypeObject *type = Py_TYPE(model);
    PyObject *copy = type->tp_alloc(type, 0);
    for (Py_ssize_t at = sizeof(PyObject); copy != NULL && at < type->tp_basicsize; at += sizeof(PyObject *))
        SLOT(copy, at) = Py_XNewRef(SLOT(model, at));
    return copy;
}

static PyObject *new_tensor(PyObject *how, PyObject *results, PyObject *lane) {
    PyObject *array = PySequence_GetItem(results, PyLong_AsSsize_t(PyTuple_GET_ITEM(how, 0)));
    PyObject *alias = copy_of(PyTuple_GET_ITEM(how, 2));
    PyObject *node = alias != NULL ? copy_of(SLOT(alias, xla.node)) : NULL, *tensor = NULL;
    if (array != NULL && node != NULL) {
        Py_XSETREF(SLOT(node, xla.data), Py_NewRef(array));
        Py_XSETREF(SLOT(node, xla.lane), Py_NewRef(lane));
        Py_XSETREF(SLOT(alias, xla.node), Py_NewRef(node));
        tensor = PyObject_CallNoArgs(PyTuple_GET_ITEM(how, 1));
        if (tensor != NULL && PyObject_SetAttr(tensor, names.alias, alias) < 0) Py_CLEAR(tensor);
    }
    Py_XDECREF(array);
    Py_XDECREF(alias);
    Py_XDECREF(node);
    return tensor;
}

static PyObject *wrapped(XlaCall *self, PyObject *results, PyObject *inputs) {
    PyObject *lane = Py_XNewRef(PyDict_GetItemWithError(xla.lanes, self->device));
    if (lane == NULL && !PyErr_Occurred()) lane = PyObject_CallOneArg(xla.lane_of, self->device);
    PyObject *outputs = lane != NULL ? PyTuple_New(PyTuple_GET_SIZE(self->outputs)) : NULL;
    for (Py_ssize_t i = 0; outputs != NULL && i < PyTuple_GET_SIZE(outputs); i++) {
        PyObject *how = PyTuple_GET_ITEM(self->outputs, i);
        PyObject *made = PyTuple_CheckExact(how) ? new_tensor(how, results, lane) : PyObject_CallOneArg(how, inputs);
        if (made != NULL)
            PyTuple_SET_ITEM(outputs, i, made);
        else
            Py_CLEAR(outputs);
    }
    Py_XDECREF(lane);
    return outputs;
}

/* ---- the call ---- */

static bool ask(PyObject *object, PyObject *method, PyObject *values, PyObject *inputs) {
    PyObject *done = PyObject_CallMethodObjArgs(object, method, values, inputs, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *call_locked(PyObject *object, PyObject *inputs) {
    XlaCall *self = (XlaCall *)object;
    PyObject *arrays = gather(object, inputs), *results = NULL, *outputs = NULL;
    if (arrays == NULL) return NULL;
    if ((!self->completes || ask(object, names.complete, arrays, inputs)) &&
        (settings_hold(self) || (!PyErr_Occurred() && ask(object, names.compile, arrays, inputs))))
        results = run(object, arrays);
    Py_DECREF(arrays);
    if (results != NULL && (!self->finishes || ask(object, names.finish, results, inputs)))
        outputs = wrapped(self, results, inputs);
    Py_XDECREF(results);
    return outputs;
}

static PyObject *xla_call(PyObject *object, PyObject *inputs, PyObject *kwargs) {
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) return PyErr_Format(PyExc_TypeError, "a program takes no keywords");
    if (xla.tensor == NULL) return PyErr_Format(PyExc_RuntimeError, "xla_setup was not called");
    PyObject *locked = PyObject_CallNoArgs(xla.acquire);
    if (locked == NULL) return NULL;
    Py_DECREF(locked);
    PyObject *outputs = call_locked(object, inputs), *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    Py_XDECREF(PyObject_CallNoArgs(xla.release));
    PyErr_Restore(type, error, traceback);
    return outputs;
}

/* ---- the type ---- */

static int xla_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    XlaCall *self = (XlaCall *)object;
    PyObject *device, *outputs;
    if (!PyArg_ParseTuple(args, "OO!", &device, &PyTuple_Type, &outputs)) return -1;
    Py_XSETREF(self->device, Py_NewRef(device));
    Py_XSETREF(self->outputs, Py_NewRef(outputs));
    Py_XSETREF(self->order, PyTuple_New(0));
    Py_XSETREF(self->arrays, PyList_New(0));
    Py_XSETREF(self->settings, PyTuple_New(0));
    Py_XSETREF(self->start, Py_NewRef(Py_None));
    return self->order != NULL && self->arrays != NULL && self->settings != NULL ? 0 : -1;
}

static PyObject *set_inputs(PyObject *object, PyObject *args) {
    XlaCall *self = (XlaCall *)object;
    PyObject *order, *arrays;
    int completes;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyTuple_Type, &order, &PyList_Type, &arrays, &completes)) return NULL;
    if (PyList_GET_SIZE(arrays) < PyTuple_GET_SIZE(order)) return PyErr_Format(PyExc_ValueError, "fewer arrays than places");
    Py_XSETREF(self->order, Py_NewRef(order));
    Py_XSETREF(self->arrays, Py_NewRef(arrays));
    self->completes = (char)completes;
    Py_RETURN_NONE;
}

static PyObject *set_start(PyObject *object, PyObject *args) {
    XlaCall *self = (XlaCall *)object;
    PyObject *start, *settings;
    if (!PyArg_ParseTuple(args, "OO!", &start, &PyTuple_Type, &settings)) return NULL;
    Py_XSETREF(self->start, Py_NewRef(start));
    Py_XSETREF(self->settings, Py_NewRef(settings));
    Py_RETURN_NONE;
}

static int xla_traverse(PyObject *object, visitproc visit, void *arg) {
    XlaCall *self = (XlaCall *)object;
    Py_VISIT(self->order);
    Py_VISIT(self->arrays);
    Py_VISIT(self->outputs);
    Py_VISIT(self->device);
    Py_VISIT(self->start);
    Py_VISIT(self->settings);
    return 0;
}

static int xla_clear(PyObject *object) {
    XlaCall *self = (XlaCall *)object;
    Py_CLEAR(self->order);
    Py_CLEAR(self->arrays);
    Py_CLEAR(self->outputs);
    Py_CLEAR(self->device);
    Py_CLEAR(self->start);
    Py_CLEAR(self->settings);
    return 0;
}

static void xla_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    xla_clear(object);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef xla_methods[] = {
    {"gather", gather, METH_O, "gather(inputs) -> the arrays of a tuple of inputs, in the executable's order"},
    {"set_inputs", set_inputs, METH_VARARGS,
     "set_inputs(order, arrays, completes): the values that a call begins with, and which argument gives each of the first arrays (-1: none)"},
    {"set_start", set_start, METH_VARARGS, "set_start(start, settings): the executable, and its settings when compiled"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef xla_members[] = {
    {"order", T_OBJECT, offsetof(XlaCall, order), READONLY, "for each of the first arrays the argument that gives it, or -1"},
    {"start", T_OBJECT, offsetof(XlaCall, start), READONLY, "list of arrays -> list of results"},
    {"finishes", T_BOOL, offsetof(XlaCall, finishes), 0, "whether finish() is to be called"},
    {NULL},
};

static PyTypeObject XlaCall_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor.xla._C.XlaCall",
    .tp_doc = "XlaCall(device, outputs): a call of an XLA executable on xla tensors",
    .tp_basicsize = sizeof(XlaCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_call = xla_call,
    .tp_new = PyType_GenericNew,
    .tp_init = xla_init,
    .tp_traverse = xla_traverse,
    .tp_clear = xla_clear,
    .tp_dealloc = xla_dealloc,
    .tp_methods = xla_methods,
    .tp_members = xla_members,
};

/* ---- set once ---- */

static Py_ssize_t slot_offset(PyObject *type, const char *name) {
    PyObject *slot = PyObject_GetAttrString(type, name);
    if (slot == NULL) return -1;
    Py_ssize_t offset = Py_IS_TYPE(slot, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)slot)->d_member->offset : -1;
    Py_DECREF(slot); /* the class keeps it */
    if (((PyTypeObject *)type)->tp_dictoffset != 0 || ((PyTypeObject *)type)->tp_weaklistoffset != 0) offset = -1; /* copy_of copies slots */
    if (offset < 0) PyErr_Format(PyExc_TypeError, "%R has no slot %s, or more than slots", type, name);
    return offset;
}

static PyObject *xla_setup(PyObject *module, PyObject *args) {
    PyObject *tensor, *alias, *node, *lock, *lanes, *lane_of, *settings, *timings;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!OO!O", &PyType_Type, &tensor, &PyType_Type, &alias, &PyType_Type, &node, &lock, &PyDict_Type,
                          &lanes, &lane_of, &PyTuple_Type, &settings, &timings))
        return NULL;
    if ((xla.root = slot_offset(alias, "root")) < 0 || (xla.node = slot_offset(alias, "node")) < 0 ||
        (xla.data = slot_offset(node, "data")) < 0 || (xla.lane = slot_offset(node, "lane")) < 0)
        return NULL;
    Py_XSETREF(xla.acquire, PyObject_GetAttrString(lock, "acquire"));
    Py_XSETREF(xla.release, PyObject_GetAttrString(lock, "release"));
    if (xla.acquire == NULL || xla.release == NULL) return NULL;
    Py_XSETREF(xla.lanes, Py_NewRef(lanes));
    Py_XSETREF(xla.lane_of, Py_NewRef(lane_of));
    Py_XSETREF(xla.settings, Py_NewRef(settings));
    Py_XSETREF(xla.timings, Py_NewRef(timings));
    Py_XSETREF(xla.tensor, (PyTypeObject *)Py_NewRef(tensor));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"xla_setup", xla_setup, METH_VARARGS,
     "xla_setup(XLATensor, Alias, Node, lock, lanes, lane_of, settings, timings): what XlaCall works with"},
    {NULL, NULL, 0, NULL},
};

int xla_call_init(PyObject *module) {
    names.alias = PyUnicode_InternFromString("_alias");
    names.read = PyUnicode_InternFromString("read");
    names.complete = PyUnicode_InternFromString("complete");
    names.compile = PyUnicode_InternFromString("compile");
    names.finish = PyUnicode_InternFromString("finish");
    names.failed = PyUnicode_InternFromString("failed");
    names.execute_time = PyUnicode_InternFromString("ExecuteTime");
    if (PyErr_Occurred()) return -1;
    return PyModule_AddFunctions(module, methods) < 0 ? -1 : PyModule_AddType(module, &XlaCall_Type);
}
