/* _C.Timing: samples of one duration, for durations measured at each call. */
#include "xla.h"
#include <structmember.h>
#include <time.h>

enum { KEPT = 1024 };

typedef struct {
    PyObject_HEAD
    unsigned long long count;
    double total;
    struct { double ended, took; } samples[KEPT]; /* the k-th is at k % KEPT */
} Timing;

double clock_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

bool is_timing(PyObject *object) { return Py_IS_TYPE(object, &Timing_Type); }

void timing_since(PyObject *object, double start) {
    Timing *timing = (Timing *)object;
    double now = clock_seconds();
    timing->samples[timing->count % KEPT].ended = now;
    timing->samples[timing->count % KEPT].took = now - start;
    timing->count++;
    timing->total += now - start;
}

static PyObject *since(PyObject *object, PyObject *start) {
    double started = PyFloat_AsDouble(start);
    if (started == -1.0 && PyErr_Occurred()) return NULL;
    timing_since(object, started);
    Py_RETURN_NONE;
}

static PyObject *samples(PyObject *object, void *unused) {
    Timing *timing = (Timing *)object;
    unsigned long long first = timing->count > KEPT ? timing->count - KEPT : 0;
    PyObject *list = PyList_New((Py_ssize_t)(timing->count - first));
    for (unsigned long long k = first; list != NULL && k < timing->count; k++) {
        PyObject *pair = Py_BuildValue("dd", timing->samples[k % KEPT].ended, timing->samples[k % KEPT].took);
        if (pair != NULL)
            PyList_SET_ITEM(list, (Py_ssize_t)(k - first), pair);
        else
            Py_CLEAR(list);
    }
    return list;
}

static PyMethodDef timing_methods[] = {
    {"since", since, METH_O, "since(start): add a sample that began then, by `time.perf_counter()`"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef timing_members[] = {
    {"count", T_ULONGLONG, offsetof(Timing, count), READONLY, "how many samples there were"},
    {"total", T_DOUBLE, offsetof(Timing, total), READONLY, "their sum, in seconds"},
    {NULL},
};
static PyGetSetDef timing_getset[] = {
    {"samples", samples, NULL, "the last 1,024 as (when it ended by `time.perf_counter()`, seconds)", NULL},
    {NULL},
};

PyTypeObject Timing_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor.xla._C.Timing",
    .tp_doc = "Timing(): samples of one duration, in seconds: their number, their sum and the last 1,024",
    .tp_basicsize = sizeof(Timing),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = timing_methods,
    .tp_members = timing_members,
    .tp_getset = timing_getset,
};

int timing_init(PyObject *module) { return PyModule_AddType(module, &Timing_Type); }
