/* dynamotor.xla._C: what its files share.
 *   timing.c    samples of durations
 *   xla_call.c  calls of XLA executables on xla tensors
 */
#ifndef DYNAMOTOR_XLA_H
#define DYNAMOTOR_XLA_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* ---- timing.c ---- */
extern PyTypeObject Timing_Type;
double clock_seconds(void); /* as time.perf_counter() */
bool is_timing(PyObject *object);
void timing_since(PyObject *timing, double start);
int timing_init(PyObject *module);

/* ---- xla_call.c ---- */
int xla_call_init(PyObject *module);

#endif
