#include "dynamotor.h"
int guards_init(PyObject *module) { return 0; }
