/* Module initialisation of dynamotor.xla._C. */
#include "xla.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dynamotor.xla._C", "Calls of XLA executables, and times.", -1, NULL,
};

PyMODINIT_FUNC PyInit__C(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (timing_init(module) < 0 || xla_call_init(module) < 0)) Py_CLEAR(module);
    return module;
}
