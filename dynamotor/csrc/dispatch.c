#include "dynamotor.h"
int dispatch_init(PyObject *module) { return 0; }
