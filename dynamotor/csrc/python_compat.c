/* What python_compat.h keeps beside: how a dict comes to have a version that changes with it. */
#include "dynamotor.h"

#if PYTHON_AT_LEAST(14)
static int watcher = -1;

static int count_change(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    (void)event, (void)key, (void)value;
    ((PyDictObject *)dict)->_ma_watcher_tag += UINT64_C(1) << WATCHER_BITS;
    return 0;
}

int dict_watch(PyObject *dict) { return PyDict_Watch(watcher, dict); }

int python_compat_init(void) {
    if (watcher < 0) watcher = PyDict_AddWatcher(count_change);
    return watcher < 0 ? -1 : 0;
}
#else
int python_compat_init(void) { return 0; }

#if PYTHON_AT_LEAST(13)
/* The dict of an instance shares the instance's values, and 3.13.0 stores into these without a trace on the dict: neither
 * its version nor a watcher learns of it. `popitem` gives the dict a table of its own. */
int dict_watch(PyObject *dict) {
    if (((PyDictObject *)dict)->ma_values == NULL) return 0;
    bool empty = PyDict_GET_SIZE(dict) == 0;
    if (empty && PyDict_SetItemString(dict, "popped", Py_None) < 0) return -1;
    PyObject *last = PyObject_CallMethod((PyObject *)&PyDict_Type, "popitem", "O", dict);
    int done = last == NULL ? -1 : empty ? 0 : PyDict_SetItem(dict, PyTuple_GET_ITEM(last, 0), PyTuple_GET_ITEM(last, 1));
    Py_XDECREF(last);
    return done;
}
#else
int dict_watch(PyObject *dict) { return (void)dict, 0; }
#endif
#endif
