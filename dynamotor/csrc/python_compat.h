/* CPython's internal structures behind one set of names: every difference between the supported versions is in this
 * file. A file that looks into frames defines Py_BUILD_CORE before it includes anything. */
#ifndef DYNAMOTOR_PYTHON_COMPAT_H
#define DYNAMOTOR_PYTHON_COMPAT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030F0000
#error "DM201: dynamotor's C extension is written for CPython 3.11 to 3.14"
#endif
#ifdef Py_GIL_DISABLED
#error "dynamotor's C extension needs a build of CPython with the GIL"
#endif

#define PYTHON_AT_LEAST(minor) (PY_VERSION_HEX >= 0x03000000 + ((minor) << 16))

/* A bit of co_flags that CPython leaves free: capture/assembler.py sets it on the code of break and resume functions. */
#if PYTHON_AT_LEAST(14)
enum { FREE_CODE_FLAG = 1 << 28 };
#else
enum { FREE_CODE_FLAG = 1 << 27 };
#endif

/* ---- integers: one of a single digit has a value that needs no call ---- */
#if PYTHON_AT_LEAST(12)
#define LONG_IS_COMPACT(number) PyUnstable_Long_IsCompact(number)
#define LONG_COMPACT_VALUE(number) PyUnstable_Long_CompactValue(number)
#else
#define LONG_IS_COMPACT(number) (Py_SIZE(number) == 1)
#define LONG_COMPACT_VALUE(number) ((number)->ob_digit[0])
#endif

/* ---- versions of classes and dicts: equal versions, nothing was set or deleted between ---- */

/* 0 when the class has no version now, so that a change of it would leave no trace. */
static inline uint64_t type_version(PyTypeObject *type) {
#if PYTHON_AT_LEAST(12)
    return type->tp_version_tag;
#else
    return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
#endif
}

/* The same, after an attempt to give the class a version. */
static inline uint64_t assigned_type_version(PyTypeObject *type) {
#if PYTHON_AT_LEAST(12)
    return PyUnstable_Type_AssignVersionTag(type) ? type_version(type) : 0;
#else
    static PyObject *any_name;
    if (any_name == NULL) any_name = PyUnicode_InternFromString("__class__");
    if (any_name != NULL) _PyType_Lookup(type, any_name); /* a lookup gives the class a version */
    return type_version(type);
#endif
}

#if PYTHON_AT_LEAST(14)
/* Dicts have no version any more. A watcher of ours counts the changes of a dict in the bits of its tag that builds with
 * the GIL leave free; those below say who watches it. */
enum { WATCHER_BITS = 12 };
#define DICT_VERSION_BITS (UINT64_MAX << WATCHER_BITS)
#define DICT_VERSION_OFFSET offsetof(PyDictObject, _ma_watcher_tag)
#else
#define DICT_VERSION_BITS UINT64_MAX
#define DICT_VERSION_OFFSET offsetof(PyDictObject, ma_version_tag)
#endif

/* The word that has a dict's version in its DICT_VERSION_BITS. */
static inline uint64_t *dict_version_word(PyObject *dict) { return (uint64_t *)((char *)dict + DICT_VERSION_OFFSET); }
static inline PyObject *dict_of_version_word(uint64_t *word) { return (PyObject *)((char *)word - DICT_VERSION_OFFSET); }

/* From now on the dict's version changes with it; 0 or -1 with an exception. */
int dict_watch(PyObject *dict);

int python_compat_init(void);

/* ---- frames that are about to run ---- */
#ifdef Py_BUILD_CORE
#if PYTHON_AT_LEAST(14)
#include "internal/pycore_interpframe.h"
#else
#include "internal/pycore_frame.h"
#endif

static inline PyCodeObject *frame_code(const _PyInterpreterFrame *frame) {
#if PYTHON_AT_LEAST(14)
    return (PyCodeObject *)PyStackRef_AsPyObjectBorrow(frame->f_executable);
#elif PYTHON_AT_LEAST(13)
    return (PyCodeObject *)frame->f_executable;
#else
    return frame->f_code;
#endif
}

static inline PyObject *frame_function(const _PyInterpreterFrame *frame) {
#if PYTHON_AT_LEAST(14)
    return PyStackRef_AsPyObjectBorrow(frame->f_funcobj);
#elif PYTHON_AT_LEAST(12)
    return frame->f_funcobj;
#else
    return (PyObject *)frame->f_func;
#endif
}

/* The first n fast slots, borrowed from the frame; `room` has places for as many. */
static inline PyObject *const *frame_slots(const _PyInterpreterFrame *frame, Py_ssize_t n, PyObject **room) {
#if PYTHON_AT_LEAST(14)
    for (Py_ssize_t i = 0; i < n; i++)
        room[i] = PyStackRef_IsNull(frame->localsplus[i]) ? NULL : PyStackRef_AsPyObjectBorrow(frame->localsplus[i]);
    return room;
#else
    return (void)n, (void)room, frame->localsplus;
#endif
}

/* Make the frame run `code` (without locals of its own) from its start, with a value (owned) on its stack. */
static inline void frame_become(_PyInterpreterFrame *frame, PyCodeObject *code, PyObject *value) {
#if PYTHON_AT_LEAST(14)
    _PyStackRef before = frame->f_executable;
    frame->f_executable = PyStackRef_FromPyObjectSteal(Py_NewRef(code));
    frame->instr_ptr = _PyCode_CODE(code);
    *frame->stackpointer++ = PyStackRef_FromPyObjectSteal(value);
    Py_DECREF(PyStackRef_AsPyObjectSteal(before));
#elif PYTHON_AT_LEAST(13)
    frame->instr_ptr = _PyCode_CODE(code);
    frame->localsplus[frame->stacktop++] = value;
    Py_SETREF(frame->f_executable, Py_NewRef(code));
#else
    frame->prev_instr = _PyCode_CODE(code) - 1;
    frame->localsplus[frame->stacktop++] = value;
    Py_SETREF(frame->f_code, (PyCodeObject *)Py_NewRef(code));
#endif
}
#endif

#endif
