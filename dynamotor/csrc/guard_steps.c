/* Steps: from the value of a source's base to the value of the source, without running user code (but for getattr). */
#include "guards.h"

/* Where an instance keeps its `__dict__`, made if it is not there yet; NULL when instances have none. */
PyObject **instance_dict_place(PyObject *object) {
    if (PyType_Check(object)) return NULL;
    PyObject **place = _PyObject_GetDictPtr(object);
    if (place != NULL && *place == NULL) {
        PyObject *made = PyObject_GenericGetDict(object, NULL);
        if (made == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(made);
        place = _PyObject_GetDictPtr(object);
    }
    return place;
}

enum { DEFAULTS, KWDEFAULTS, CODE, CLOSURE, GLOBALS, DICT, SELF, FUNC, CONTENTS };
static const char *SLOT_NAMES[] = {
    "__defaults__", "__kwdefaults__", "__code__", "__closure__", "__globals__", "__dict__", "__self__", "__func__", "cell_contents",
};

/* The number of a slot of functions, bound methods and cells; -1 with an exception for other names. */
Py_ssize_t slot_number(PyObject *name) {
    for (int i = 0; PyUnicode_Check(name) && i <= CONTENTS; i++)
        if (PyUnicode_CompareWithASCIIString(name, SLOT_NAMES[i]) == 0) return i;
    PyErr_Format(PyExc_ValueError, "the guard program knows no slot %R", name);
    return -1;
}

/* Where an object keeps a slot; NULL for objects that have none such. */
PyObject **slot_place(PyObject *object, Py_ssize_t slot) {
    PyFunctionObject *f = (PyFunctionObject *)object;
    PyMethodObject *m = (PyMethodObject *)object;
    switch (slot) {
    case SELF: return PyMethod_Check(object) ? &m->im_self : NULL;
    case FUNC: return PyMethod_Check(object) ? &m->im_func : NULL;
    case CONTENTS: return PyCell_Check(object) ? &((PyCellObject *)object)->ob_ref : NULL;
    default: break;
    }
    if (!PyFunction_Check(object)) return NULL;
    switch (slot) {
    case DEFAULTS: return &f->func_defaults;
    case KWDEFAULTS: return &f->func_kwdefaults;
    case CODE: return &f->func_code;
    case CLOSURE: return &f->func_closure;
    case GLOBALS: return &f->func_globals;
    default: return instance_dict_place(object);
    }
}

/* Whether `object.__class__ = other` can work for its instances. */
bool class_can_change(PyTypeObject *cls) {
    return PyType_IsSubtype(cls, &PyModule_Type) ||
           (PyType_HasFeature(cls, Py_TPFLAGS_HEAPTYPE) && !PyType_HasFeature(cls, Py_TPFLAGS_IMMUTABLETYPE));
}

static PyObject *sequence_item(PyObject *sequence, Py_ssize_t index) {
    bool is_tuple = PyTuple_Check(sequence);
    if (!is_tuple && !PyList_Check(sequence)) return NULL;
    Py_ssize_t n = Py_SIZE(sequence);
    if (index < 0) index += n;
    if (index < 0 || index >= n) return NULL;
    return is_tuple ? PyTuple_GET_ITEM(sequence, index) : PyList_GET_ITEM(sequence, index);
}

PyObject *step_value(const Node *node, PyObject *parent) {
    PyObject *found = NULL, **place;
    switch (node->step) {
    case STEP_CONST: found = node->key; break;
    case STEP_INSTANCE_DICT:
        place = instance_dict_place(parent);
        found = place != NULL && PyDict_CheckExact(*place) ? *place : NULL;
        break;
    case STEP_DICT_ITEM:
        if (PyDict_Check(parent)) {
            found = _PyDict_GetItem_KnownHash(parent, node->key, node->hash);
            if (found == NULL) PyErr_Clear();
        }
        break;
    case STEP_SEQ_ITEM: found = sequence_item(parent, node->number); break;
    case STEP_TYPE_ATTR: found = PyType_Check(parent) ? _PyType_Lookup((PyTypeObject *)parent, node->key) : NULL; break;
    case STEP_SLOT:
        place = slot_place(parent, node->number);
        found = place == NULL ? NULL : *place == NULL && !PyCell_Check(parent) ? Py_None : *place;
        break;
    case STEP_SIZE_OF:
    case STEP_STRIDE_OF: {
        int64_t number;
        return tensor_dim(parent, node->step == STEP_STRIDE_OF, node->number, &number) ? PyLong_FromLongLong(number) : NULL;
    }
    case STEP_GETATTR: {
        Py_INCREF(parent); /* user code may run */
        PyObject *result = PyUnicode_Check(node->key) ? PyObject_GetAttr(parent, node->key) : PyObject_CallOneArg(node->key, parent);
        Py_DECREF(parent);
        if (result == NULL) PyErr_Clear();
        return result;
    }
    default: break;
    }
    return Py_XNewRef(found);
}
