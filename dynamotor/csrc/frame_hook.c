#include "dynamotor.h"
int frame_hook_init(PyObject *module) { return 0; }
