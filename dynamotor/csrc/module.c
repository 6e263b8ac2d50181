/* Module initialisation of dynamotor._C. */
#include "dynamotor.h"

/* Digest of the sources, from setup.py; a build without it is not checked against them. */
#ifndef BUILT_FROM
#define BUILT_FROM ""
#endif

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dynamotor._C", "Guards, dispatch, kernel launch and the frame hook of dynamotor.", -1, NULL,
};

PyMODINIT_FUNC PyInit__C(void) {
    PyObject *torch = PyImport_ImportModule("torch");
    if (torch == NULL) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || python_compat_init() < 0 || tensor_init(module, torch) < 0 || launch_init(module) < 0 ||
        run_init(module) < 0 || lend_init(module) < 0 || gpu_launch_init(module) < 0 ||
        expect_init(module) < 0 || one_call_init(module) < 0 || aten_function_init(module) < 0 || ambient_init(module, torch) < 0 ||
        guards_init(module) < 0 || dispatch_init(module) < 0 ||
        frame_hook_init(module) < 0 || fingerprint_init(module) < 0 ||
        PyModule_AddStringConstant(module, "built_from", BUILT_FROM) < 0) {
        Py_XDECREF(module);
        module = NULL;
    }
    Py_DECREF(torch);
    return module;
}
