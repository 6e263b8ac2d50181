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

PyObject **function_slot_place(PyObject *function, PyObject *name) {
    PyFunctionObject *f = (PyFunctionObject *)function;
    if (PyUnicode_CompareWithASCIIString(name, "__defaults__") == 0) return &f->func_defaults;
    if (PyUnicode_CompareWithASCIIString(name, "__kwdefaults__") == 0) return &f->func_kwdefaults;
    if (PyUnicode_CompareWithASCIIString(name, "__code__") == 0) return &f->func_code;
    if (PyUnicode_CompareWithASCIIString(name, "__closure__") == 0) return &f->func_closure;
    if (PyUnicode_CompareWithASCIIString(name, "__globals__") == 0) return &f->func_globals;
    if (PyUnicode_CompareWithASCIIString(name, "__builtins__") == 0) return &f->func_builtins;
    if (PyUnicode_CompareWithASCIIString(name, "__dict__") == 0) return instance_dict_place(function);
    return NULL;
}

PyObject **cell_place(PyObject *function, Py_ssize_t index) {
    PyObject *closure = ((PyFunctionObject *)function)->func_closure;
    if (closure == NULL || index < 0 || index >= PyTuple_GET_SIZE(closure)) return NULL;
    return &((PyCellObject *)PyTuple_GET_ITEM(closure, index))->ob_ref;
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

static PyObject *function_slot(PyObject *function, PyObject *name) {
    PyObject **place = function_slot_place(function, name);
    return place == NULL ? NULL : *place == NULL ? Py_None : *place;
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
    case STEP_TYPE_OF: found = (PyObject *)Py_TYPE(parent); break;
    case STEP_TYPE_ATTR: found = PyType_Check(parent) ? _PyType_Lookup((PyTypeObject *)parent, node->key) : NULL; break;
    case STEP_CELL:
        place = PyFunction_Check(parent) ? cell_place(parent, node->number) : NULL;
        found = place != NULL ? *place : NULL;
        break;
    case STEP_CELL_CONTENTS: found = PyCell_Check(parent) ? PyCell_GET(parent) : NULL; break;
    case STEP_FUNC_ATTR: found = PyFunction_Check(parent) ? function_slot(parent, node->key) : NULL; break;
    case STEP_GLOBALS_OF: found = PyFunction_Check(parent) ? PyFunction_GET_GLOBALS(parent) : NULL; break;
    case STEP_BUILTINS_OF: found = PyFunction_Check(parent) ? ((PyFunctionObject *)parent)->func_builtins : NULL; break;
    case STEP_METHOD_SELF: found = PyMethod_Check(parent) ? PyMethod_GET_SELF(parent) : NULL; break;
    case STEP_METHOD_FUNC: found = PyMethod_Check(parent) ? PyMethod_GET_FUNCTION(parent) : NULL; break;
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
