/* Checks of one value: the C twins of the rows in capture/guards.py. */
#include "guards.h"

static PyObject *slow_const_equal; /* capture.guards.const_equal, for rare values */

static bool call_says_yes(PyObject *function, PyObject *first, PyObject *second) {
    PyObject *args[2] = {first, second};
    PyObject *answer = PyObject_Vectorcall(function, args, second != NULL ? 2 : 1, NULL);
    int yes = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (yes < 0) PyErr_Clear();
    return yes == 1;
}

/* Type-exact equality of constants; see const_equal in capture/guards.py. */
static bool const_equal(PyObject *now, PyObject *then) {
    if (now == then && const_is_frozen(now)) return true;
    PyTypeObject *type = Py_TYPE(now);
    if (type != Py_TYPE(then)) return false;
    if (type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBytes_Type) {
        int equal = PyObject_RichCompareBool(now, then, Py_EQ);
        if (equal < 0) PyErr_Clear();
        return equal == 1;
    }
    if (type == &PyFloat_Type)
        return memcmp(&((PyFloatObject *)now)->ob_fval, &((PyFloatObject *)then)->ob_fval, sizeof(double)) == 0;
    if (type == &PyBool_Type || now == Py_None) return now == then;
    if (type == &PyTuple_Type) {
        Py_ssize_t n = PyTuple_GET_SIZE(now);
        if (n != PyTuple_GET_SIZE(then)) return false;
        for (Py_ssize_t i = 0; i < n; i++)
            if (!const_equal(PyTuple_GET_ITEM(now, i), PyTuple_GET_ITEM(then, i))) return false;
        return true;
    }
    return call_says_yes(slow_const_equal, now, then);
}

/* Whether the value cannot change in place, as far as const_equal looks at it. */
bool const_is_frozen(PyObject *value) {
    if (PyList_Check(value) || PyAnySet_Check(value) || PyDict_Check(value)) return PyFrozenSet_CheckExact(value);
    if (PySlice_Check(value)) {
        PySliceObject *slice = (PySliceObject *)value;
        return const_is_frozen(slice->start) && const_is_frozen(slice->stop) && const_is_frozen(slice->step);
    }
    if (PyTuple_Check(value))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
            if (!const_is_frozen(PyTuple_GET_ITEM(value, i))) return false;
    return true;
}

static Py_ssize_t raw_length(PyObject *value) {
    if (PyDict_Check(value)) return PyDict_GET_SIZE(value);
    if (PyAnySet_Check(value)) return PySet_GET_SIZE(value);
    if (PyUnicode_Check(value)) return PyUnicode_GET_LENGTH(value);
    if (PyList_Check(value) || PyTuple_Check(value) || PyBytes_Check(value)) return Py_SIZE(value);
    return PyObject_Size(value);
}

static bool key_equal(PyObject *now, PyObject *then) { return now == then || const_equal(now, then); }

static bool has_keys(PyObject *dict, PyObject *keys) {
    Py_ssize_t n = PyTuple_GET_SIZE(keys), i = 0, position = 0;
    PyObject *key;
    if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != n) return false;
    if (has_raw_order(dict)) {
        while (PyDict_Next(dict, &position, &key, NULL)) {
            if (i >= n || !key_equal(key, PyTuple_GET_ITEM(keys, i))) return false;
            i++;
        }
        return i == n;
    }
    PyObject *iterator = (PyODict_Check(dict) ? PyODict_Type.tp_iter : PyDict_Type.tp_iter)(dict);
    bool same = iterator != NULL;
    while (same && (key = PyIter_Next(iterator)) != NULL) {
        same = i < n && key_equal(key, PyTuple_GET_ITEM(keys, i));
        Py_DECREF(key);
        i++;
    }
    Py_XDECREF(iterator);
    return same && i == n;
}

static bool lacks_attribute(PyObject *value, PyObject *name) {
    PyObject *found = PyObject_GetAttr(value, name);
    bool missing = found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError);
    Py_XDECREF(found);
    PyErr_Clear();
    return missing;
}

/* Whether a dict's possible value under a key ends without a finalizer; an error holds the frames that it went through. */
static bool is_replaceable(PyObject *dict, PyObject *key) {
    if (!PyDict_Check(dict)) return false;
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found != NULL && PyExceptionInstance_Check(found)) {
        PyObject *traceback = ((PyBaseExceptionObject *)found)->traceback;
        return traceback == NULL || traceback == Py_None; /* which Python 3.11 stores where the program sets it */
    }
    return found == NULL || (Py_TYPE(found)->tp_finalize == NULL && Py_TYPE(found)->tp_del == NULL);
}

static bool has_mro(PyObject *cls, PyObject *mro) {
    PyObject *now = PyType_Check(cls) ? ((PyTypeObject *)cls)->tp_mro : NULL;
    if (now == NULL || PyTuple_GET_SIZE(now) != PyTuple_GET_SIZE(mro)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); i++)
        if (PyTuple_GET_ITEM(now, i) != PyTuple_GET_ITEM(mro, i)) return false;
    return true;
}

bool check_holds(const Check *check, PyObject *value) {
    bool holds = false;
    switch (check->kind) {
    case CHECK_TYPE_IS: return (PyObject *)Py_TYPE(value) == check->data;
    case CHECK_ID_IS: return value == check->data;
    case CHECK_TENSOR_IS: return (Py_ssize_t)value == check->number; /* its address */
    case CHECK_CONST_EQUALS: holds = const_equal(value, check->data); break;
    case CHECK_TENSOR_MATCH:
        holds = LIKELY(shim.ready) ? tensor_matches(value, &check->facts) : call_says_yes(check->slow, value, NULL);
        break;
    case CHECK_LENGTH: holds = raw_length(value) == check->number; break;
    case CHECK_DICT_KEYS: holds = has_keys(value, check->data); break;
    case CHECK_MISSING_KEY: holds = PyDict_Check(value) && PyDict_Contains(value, check->data) == 0; break;
    case CHECK_REPLACEABLE: holds = is_replaceable(value, check->data); break;
    case CHECK_MISSING_TYPE_ATTR: holds = PyType_Check(value) && _PyType_Lookup((PyTypeObject *)value, check->data) == NULL; break;
    case CHECK_MISSING_ATTR: holds = lacks_attribute(value, check->data); break;
    case CHECK_CELL_EMPTY: holds = PyCell_Check(value) && PyCell_GET(value) == NULL; break;
    case CHECK_KERNEL_SETTINGS:
        holds = check->number >= 0 ? kernel_settings() == check->number : call_says_yes(check->slow, value, NULL);
        break;
    case CHECK_MRO_IS: return has_mro(value, check->data);
    case CHECK_PREDICATE: holds = call_says_yes(check->data, value, NULL); break;
    default: break;
    }
    if (UNLIKELY(PyErr_Occurred() != NULL)) {
        PyErr_Clear();
        return false;
    }
    return holds;
}

int guard_checks_init(void) {
    PyObject *guards = PyImport_ImportModule("dynamotor.capture.guards");
    slow_const_equal = guards != NULL ? PyObject_GetAttrString(guards, "const_equal") : NULL;
    Py_XDECREF(guards);
    return slow_const_equal != NULL ? 0 : -1;
}
