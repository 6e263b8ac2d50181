/* A program's assumptions about sizes, evaluated at each call: see SizesHold in capture/symbolic_inputs.py. */
#include "guards.h"

/* In the order of _CODES in capture/symbolic_inputs.py. */
typedef enum { NUMBER, LOAD, ADD, MUL, FLOORDIV, MOD, MIN, MAX, SAME, ORDERED, AT_LEAST_0, IS_0, IS_NOT_0, N_CODES } Code;
typedef enum { INTEGER, SIZE, STRIDE, N_KINDS } LoadKind;

typedef struct {
    int node, kind, dim;
} Load;

struct SizeProgram {
    int n_loads, n_code;
    Load *loads;    /* behind the struct */
    int64_t code[]; /* then the loads */
};

/* Reads of one tensor are adjacent, so its numbers are looked up once. */
static bool load_all(const SizeProgram *sizes, const GuardProgram *program, PyObject *const *slots, int64_t *read) {
    int64_t ndim = 0, *numbers[N_KINDS];
    int node = -1;
    for (const Load *from = sizes->loads, *end = from + sizes->n_loads; from < end; from++, read++) {
        PyObject *value = node_value(&program->nodes[from->node], slots);
        if (from->kind == INTEGER) {
            int overflow;
            if (!PyLong_CheckExact(value)) return false;
            *read = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (overflow) return false;
        } else if (UNLIKELY(!shim.ready)) {
            if (!tensor_dim(value, from->kind == STRIDE, from->dim, read)) return false;
        } else {
            if (from->node != node) {
                if (!is_tensor(value)) return false;
                TensorHandle handle = tensor_handle(value);
                if (shim.get_dim(handle, &ndim) || shim.get_sizes(handle, &numbers[SIZE])) return false;
                if (shim.get_strides(handle, &numbers[STRIDE])) return false;
                node = from->node;
            }
            if (from->dim >= ndim) return false;
            *read = numbers[from->kind][from->dim];
        }
    }
    return true;
}

/* a = a op b; false when the result does not exist. Division rounds down, as Python's does. */
static bool compute(Code code, int64_t *a, int64_t b) {
    int64_t rest;
    switch (code) {
    case ADD: return !__builtin_add_overflow(*a, b, a);
    case MUL: return !__builtin_mul_overflow(*a, b, a);
    case MIN: *a = *a < b ? *a : b; return true;
    case MAX: *a = *a > b ? *a : b; return true;
    default:
        if (b == 0 || b == -1) { /* INT64_MIN / -1 traps */
            if (b == 0) return false;
            return code == MOD ? (*a = 0, true) : !__builtin_mul_overflow(*a, b, a);
        }
        rest = *a % b;
        if (code == MOD) *a = rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
        else *a = *a / b - (rest != 0 && (rest < 0) != (b < 0));
        return true;
    }
}

bool size_program_holds(const SizeProgram *sizes, const GuardProgram *program, PyObject *const *slots) {
    int64_t *read = alloca(sizeof(int64_t) * (size_t)(sizes->n_loads + sizes->n_code + 1));
    int64_t *top = read + sizes->n_loads; /* the first free place of the stack */
    if (!load_all(sizes, program, slots, read)) return false;
    for (const int64_t *at = sizes->code, *end = at + sizes->n_code; at < end; at++) {
        Code code = (Code)*at;
        if (code == NUMBER) *top++ = *++at;
        else if (code == LOAD) *top++ = read[*++at];
        else if (code < SAME) {
            top--;
            if (!compute(code, top - 1, *top)) return false;
        } else if (code < AT_LEAST_0) {
            top -= 2;
            if (code == SAME ? top[0] != top[1] : top[0] > top[1]) return false;
        } else {
            top--;
            if (code == AT_LEAST_0 ? *top < 0 : (*top == 0) != (code == IS_0)) return false;
        }
    }
    return true;
}

/* ---- building ---- */

static int check_code(const SizeProgram *sizes) {
    int depth = 0;
    for (int i = 0; i < sizes->n_code; i++) {
        int64_t code = sizes->code[i];
        bool has_operand = code == NUMBER || code == LOAD;
        if (code < 0 || code >= N_CODES || (has_operand && ++i >= sizes->n_code)) return -1;
        if (code == LOAD && (sizes->code[i] < 0 || sizes->code[i] >= sizes->n_loads)) return -1;
        depth += has_operand ? 1 : code == SAME || code == ORDERED ? -2 : -1;
        if (depth < (code < SAME ? 1 : 0)) return -1;
    }
    return depth;
}

SizeProgram *size_program_from(PyObject *encoded, int n_nodes) {
    PyObject *loads, *code;
    if (!PyArg_ParseTuple(encoded, "O!O!", &PyTuple_Type, &loads, &PyTuple_Type, &code)) return NULL;
    Py_ssize_t n_loads = PyTuple_GET_SIZE(loads), n_code = PyTuple_GET_SIZE(code);
    SizeProgram *sizes = PyMem_Calloc(1, sizeof(SizeProgram) + sizeof(int64_t) * (size_t)n_code + sizeof(Load) * (size_t)n_loads);
    if (sizes == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    sizes->n_loads = (int)n_loads;
    sizes->n_code = (int)n_code;
    sizes->loads = (Load *)(sizes->code + n_code);
    for (Py_ssize_t i = 0; i < n_code && !PyErr_Occurred(); i++) sizes->code[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(code, i));
    for (Py_ssize_t i = 0; i < n_loads && !PyErr_Occurred(); i++) {
        Load *one = &sizes->loads[i];
        if (PyArg_ParseTuple(PyTuple_GET_ITEM(loads, i), "iii", &one->node, &one->kind, &one->dim) &&
            (one->node < 0 || one->node >= n_nodes || one->kind < 0 || one->kind >= N_KINDS || one->dim < 0))
            PyErr_SetString(PyExc_ValueError, "no such node or dimension");
    }
    if (!PyErr_Occurred() && check_code(sizes) != 0) PyErr_SetString(PyExc_ValueError, "not a program over sizes");
    if (PyErr_Occurred()) {
        PyMem_Free(sizes);
        return NULL;
    }
    return sizes;
}
