/* _C.GuardProgram: built from the rows of capture/guards.py (see capture/dispatch.py), run at every call. */
#include "guards.h"

static const char *STEP_NAMES[N_STEPS] = {
    "arg", "const", "getattr", "instance_dict", "dict_item", "seq_item", "type_attr", "slot", "size_of", "stride_of",
    "kept_arg",
};
static const char *CHECK_NAMES[N_CHECKS] = {
    "type_is", "id_is", "tensor_is", "const_equals", "tensor_match", "length", "dict_keys", "missing_key", "replaceable", "missing_type_attr",
    "missing_attr", "cell_empty", "predicate", "mro_is", "kernel_settings", "same", "distinct", "no_overlap", "apart", "sizes",
};

static int name_index(PyObject *name, const char *const *names, int n) {
    for (int i = 0; PyUnicode_Check(name) && i < n; i++)
        if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) return i;
    PyErr_Format(PyExc_ValueError, "the guard program has no %R", name);
    return -1;
}

/* ---- running ---- */

static void release_slots(PyObject **slots, int n) {
    for (int i = 0; i < n; i++) Py_XDECREF(slots[i]);
}

enum { ALL_ARGS = -1 }; /* the number of an `arg` node that is the tuple of all arguments; no checks look at it */

static PyObject *tuple_of(PyObject *const *args, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    if (tuple == NULL) PyErr_Clear();
    return tuple;
}

static bool run_per_call(const GuardProgram *program, PyObject *const *args, Py_ssize_t nargs, PyObject **slots) {
    for (int i = 0; i < program->n_nodes; i++) {
        const Node *node = &program->nodes[i];
        if (node->life != PER_CALL) break; /* these nodes come first */
        if (node->step != STEP_ARG) {
            slots[node->slot] = node_evaluate(program, node, slots[program->nodes[node->parent].slot]);
            if (slots[node->slot] == NULL) return false;
            continue;
        }
        if (node->number == ALL_ARGS) {
            slots[node->slot] = tuple_of(args, nargs);
            if (slots[node->slot] == NULL) return false;
            continue;
        }
        if (node->number >= nargs) return false;
        PyObject *value = args[node->number];
        for (int c = node->first_check; c < node->first_check + node->n_checks; c++)
            if (!check_holds(&program->checks[c], value)) return false;
        slots[node->slot] = Py_NewRef(value);
    }
    return true;
}

/* Whether every step still leads to these values. It runs no Python code (but for odd dict keys), so the watches that are
 * built right after it belong to the values, even if a check before ran code that changed something. */
static bool still_there(const GuardProgram *program, PyObject *const *values) {
    for (int i = 0; i < program->n_nodes; i++) {
        const Node *node = &program->nodes[i];
        if (node->life != BOUND || node->parent < 0) continue;
        PyObject *now = step_value(node, values[node->parent]);
        Py_XDECREF(now);
        if (now != values[i]) return false;
    }
    return true;
}

/* Let the bound values go. What ends with them may run Python code, even this very program. */
static void unbind(GuardProgram *program) {
    uint64_t epoch = ++program->epoch;
    program->bound = false;
    program->n_watches = program->n_first = 0;
    for (int i = 0; i < program->n_nodes && program->epoch == epoch; i++) {
        Node *node = &program->nodes[i];
        PyObject *held = node->weak != NULL ? node->weak : node->value;
        node->value = node->weak = NULL;
        node->by_storage = false;
        Py_XDECREF(held);
    }
}

static PyObject *unbind_at_end(PyObject *capsule, PyObject *weak) {
    (void)weak;
    unbind((GuardProgram *)PyCapsule_GetPointer(capsule, NULL));
    Py_RETURN_NONE;
}

static PyMethodDef unbind_function = {"unbind", unbind_at_end, METH_O, NULL};

static bool held_weakly(const Node *node) {
    PyObject *value = node->value;
    return node->step != STEP_CONST && value != NULL && PyType_SUPPORTS_WEAKREFS(Py_TYPE(value)) && !PyType_Check(value) &&
           !PyModule_Check(value);
}

/* The weak holder of a value. `torch.utils.swap_tensors` refuses tensors with weak references, so of
 * plain tensors it is the storage. Where another tensor shares that, the tensor may end unnoticed: then its step leads
 * elsewhere, which watches find before they look at the tensor. */
static PyObject *held_for(PyObject *value, bool *by_storage) {
    PyObject *storage = NULL;
    if (shim.ready && is_tensor(value) && (Py_TYPE(value) == shim.tensor_type || Py_TYPE(value) == shim.parameter_type)) {
        storage = PyObject_CallMethod(value, "untyped_storage", NULL);
        if (storage == NULL) PyErr_Clear(); /* a sparse tensor */
    }
    *by_storage = storage != NULL;
    return storage != NULL ? storage : Py_NewRef(value);
}

/* The program keeps nothing alive that can be held weakly: as long as its watches hold, every value is where a step
 * finds it. Returns whether all are still there. */
static bool hold_weakly(GuardProgram *program) {
    uint64_t epoch = program->epoch;
    for (int i = 0; i < program->n_nodes && program->epoch == epoch; i++) {
        Node *node = &program->nodes[i];
        if (!held_weakly(node)) continue;
        bool by_storage;
        PyObject *held = held_for(node->value, &by_storage);
        PyObject *weak = program->epoch == epoch ? PyWeakref_NewRef(held, program->on_end) : NULL;
        Py_DECREF(held);
        if (program->epoch != epoch) {
            Py_XDECREF(weak);
            break;
        }
        if (weak == NULL) {
            PyErr_Clear();
            continue;
        }
        node->weak = weak;
        node->by_storage = by_storage;
        Py_DECREF(node->value);
    }
    return program->epoch == epoch;
}

enum { AGAIN = 2 };

/* Whether the call's arguments are those that the program is bound to. */
static bool has_kept(const GuardProgram *program, PyObject *const *args, Py_ssize_t nargs) {
    for (int i = program->first_kept; i < program->first_kept + program->n_kept; i++) {
        const Node *node = &program->nodes[i];
        if (node->number >= nargs || args[node->number] != node->value) return false;
    }
    return true;
}

/* A new reference to an argument whose checks hold and that can be held weakly, or NULL. */
static PyObject *kept_arg(const GuardProgram *program, const Node *node, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *value = node->number < nargs ? args[node->number] : NULL;
    if (value == NULL || !PyType_SUPPORTS_WEAKREFS(Py_TYPE(value)) || (shim.ready && is_tensor(value))) return NULL;
    for (int c = node->first_check; c < node->first_check + node->n_checks; c++)
        if (!check_holds(&program->checks[c], value)) return NULL;
    return Py_NewRef(value);
}

/* Evaluate every bound node anew and keep the values. 1 done, AGAIN, 0 a guard fails, -1 no memory. Python code may run
 * meanwhile, even this very function, so nothing is stored before all is known. */
static int rebind(GuardProgram *program, PyObject *const *args, Py_ssize_t nargs) {
    int n = program->n_nodes, bound = 1;
    PyObject **values = PyMem_Calloc((size_t)n + 1, sizeof(PyObject *));
    if (values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    unbind(program);
    for (int i = 0; bound == 1 && i < n; i++) {
        const Node *node = &program->nodes[i];
        if (node->life != BOUND) continue;
        values[i] = node->step == STEP_KEPT_ARG
                        ? kept_arg(program, node, args, nargs)
                        : node_evaluate(program, node, node->parent < 0 ? NULL : values[node->parent]);
        if (values[i] == NULL) bound = 0;
    }
    uint64_t epoch = program->epoch + 1;
    unbind(program); /* the code that ran may have bound it */
    if (bound == 1 && (program->epoch != epoch || program->cleared || !still_there(program, values))) bound = AGAIN;
    if (bound == 1) {
        for (int i = 0; i < n; i++) {
            program->nodes[i].value = values[i];
            values[i] = NULL;
        }
        program->rebinds++;
        bound = watches_build(program) < 0 ? -1 : 1;
        program->bound = bound == 1;
        if (bound == 1 && !hold_weakly(program)) bound = AGAIN;
    }
    for (int i = 0; i < n; i++) Py_XDECREF(values[i]);
    PyMem_Free(values);
    return bound;
}

enum { REBINDS = 3 };

static int run_bound(GuardProgram *program, PyObject *const *args, Py_ssize_t nargs, PyObject **slots) {
    for (int i = 0; i < REBINDS; i++) {
        if (program->bound && has_kept(program, args, nargs)) {
            Verdict verdict = watches_run(program, slots);
            if (verdict != MOVED) return verdict == HOLD;
        }
        int rebound = rebind(program, args, nargs);
        if (rebound <= 0) return rebound;
    }
    return program->bound && has_kept(program, args, nargs) && watches_run(program, slots) == HOLD;
}

/* Each of the first `number` values is another object than all others. */
static bool are_distinct(const GuardProgram *program, const Check *check, PyObject **slots) {
    PyObject **values = alloca(sizeof(PyObject *) * (size_t)check->n_nodes);
    for (int i = 0; i < check->n_nodes; i++) values[i] = node_value(&program->nodes[check->nodes[i]], slots);
    for (int i = 0; i < check->n_nodes; i++) {
        int others = i < check->number ? i : (int)check->number;
        for (int j = 0; j < others; j++)
            if (values[j] == values[i]) return false;
    }
    return true;
}

/* Whether two ranges of memory, each a start and a stop, share a byte. */
static bool overlap(const uintptr_t *one, const uintptr_t *other) {
    return one[0] < one[1] && other[0] < other[1] && other[0] < one[1] && one[0] < other[1];
}

static bool none_overlaps(const GuardProgram *program, const Check *check, PyObject **slots) {
    uintptr_t written[2], other[2];
    if (tensor_range(node_value(&program->nodes[check->node], slots), &written[0], &written[1]) < 0) return false;
    for (int i = 0; i < check->n_nodes; i++) {
        if (tensor_range(node_value(&program->nodes[check->nodes[i]], slots), &other[0], &other[1]) < 0) return false;
        if (overlap(written, other)) return false;
    }
    return true;
}

/* None of the first `number` tensors overlaps another one. The ranges of memory that were found apart last are kept,
 * and only tensors at other addresses are compared: of a decoder's caches and parameters none moves. */
static bool stay_apart(const GuardProgram *program, const Check *check, PyObject **slots) {
    size_t bytes = 2 * sizeof(uintptr_t) * (size_t)check->n_nodes;
    uintptr_t *now = alloca(bytes), *before = check->ranges;
    for (int i = 0; i < check->n_nodes; i++)
        if (tensor_range(node_value(&program->nodes[check->nodes[i]], slots), &now[2 * i], &now[2 * i + 1]) < 0) return false;
    for (int i = 0; i < check->n_nodes; i++) {
        if (now[2 * i] == before[2 * i] && now[2 * i + 1] == before[2 * i + 1]) continue;
        int others = i < check->number ? check->n_nodes : check->number;
        for (int j = 0; j < others; j++)
            if (j != i && overlap(&now[2 * i], &now[2 * j])) return false;
    }
    memcpy(before, now, bytes);
    return true;
}

static bool relations_hold(const GuardProgram *program, PyObject **slots) {
    for (int i = program->n_checks - program->n_related; i < program->n_checks; i++) {
        const Check *check = &program->checks[i];
        bool holds;
        if (check->kind == CHECK_SAME)
            holds = node_value(&program->nodes[check->node], slots) == node_value(&program->nodes[check->number], slots);
        else if (check->kind == CHECK_DISTINCT)
            holds = are_distinct(program, check, slots);
        else if (check->kind == CHECK_APART)
            holds = stay_apart(program, check, slots);
        else if (check->kind == CHECK_SIZES)
            holds = size_program_holds(check->sizes, program, slots);
        else
            holds = none_overlaps(program, check, slots);
        if (!holds) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

Py_ssize_t guard_program_n_inputs(GuardProgram *program) { return program->n_inputs; }

enum { REBIND_COST = 16, MOST_CREDIT = 4 * REBIND_COST }; /* calls: to bind takes as long as a few walks from the arguments */

/* Whether the settled form serves this call: its arguments are those of the last one, or it may be bound to these. One
 * program may serve many models in turn. */
static bool is_settled(GuardProgram *settled, PyObject *const *args, Py_ssize_t nargs) {
    if (settled->credit < MOST_CREDIT) settled->credit++;
    if (LIKELY(settled->bound && has_kept(settled, args, nargs))) return true;
    if (settled->credit < REBIND_COST) return false;
    settled->credit -= REBIND_COST;
    return true;
}

int guard_program_run(GuardProgram *program, PyObject *const *args, Py_ssize_t nargs, PyObject **inputs) {
    if (program->settled != NULL && is_settled(program->settled, args, nargs)) program = program->settled;
    if (UNLIKELY(program->cleared)) return 0;
    PyObject **slots = alloca(sizeof(PyObject *) * (size_t)(program->n_slots + 1));
    memset(slots, 0, sizeof(PyObject *) * (size_t)(program->n_slots + 1));
    int holds = run_per_call(program, args, nargs, slots) && (!program->has_ambient || ambient_matches(&program->ambient));
    if (holds) holds = run_bound(program, args, nargs, slots);
    if (holds == 1) holds = relations_hold(program, slots);
    if (holds == 1)
        for (int i = 0; i < program->n_inputs; i++)
            inputs[i] = Py_NewRef(node_value(&program->nodes[program->inputs[i]], slots));
    release_slots(slots, program->n_slots);
    return holds;
}

/* ---- building ---- */

static int parse_node(GuardProgram *program, int index, PyObject *encoded) {
    Node *node = &program->nodes[index];
    PyObject *name;
    if (!PyArg_ParseTuple(encoded, "OiO", &name, &node->parent, &node->key)) {
        node->key = NULL;
        return -1;
    }
    Py_INCREF(node->key);
    int step = name_index(name, STEP_NAMES, N_STEPS);
    bool is_root = step == STEP_ARG || step == STEP_CONST || step == STEP_KEPT_ARG;
    if (step < 0) return -1;
    if (node->parent >= index || is_root != (node->parent < 0)) {
        PyErr_SetString(PyExc_ValueError, "a guard program's nodes must come after their parents");
        return -1;
    }
    node->step = (Step)step;
    node->first_child = node->next_sibling = node->slot = -1;
    bool in_tensor = step == STEP_SIZE_OF || step == STEP_STRIDE_OF;
    if (in_tensor || step == STEP_ARG || step == STEP_KEPT_ARG || step == STEP_SEQ_ITEM) node->number = PyLong_AsSsize_t(node->key);
    if (step == STEP_SLOT) node->number = slot_number(node->key);
    if (step == STEP_DICT_ITEM) node->hash = PyObject_Hash(node->key);
    if (step == STEP_KEPT_ARG) {
        if (program->n_kept++ == 0) program->first_kept = index;
        if (index != program->first_kept + program->n_kept - 1) {
            PyErr_SetString(PyExc_ValueError, "a guard program's bound arguments must be adjacent");
            return -1;
        }
    }
    if (step == STEP_ARG) node->life = PER_CALL;
    else if (is_root) node->life = BOUND;
    else {
        Node *parent = &program->nodes[node->parent];
        node->life = parent->life == BOUND && (in_tensor || step == STEP_GETATTR) ? VOLATILE : parent->life;
        node->next_sibling = parent->first_child;
        parent->first_child = index;
    }
    if (node->life != BOUND) node->slot = program->n_slots++;
    if (index > 0 && node->life == PER_CALL && program->nodes[index - 1].life != PER_CALL) {
        PyErr_SetString(PyExc_ValueError, "a guard program's nodes on arguments must come first");
        return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_indices(PyObject *sequence, int limit, int **out, int *n) {
    PyObject *items = PySequence_Fast(sequence, "node numbers must be a sequence");
    if (items == NULL) return -1;
    *n = (int)PySequence_Fast_GET_SIZE(items);
    *out = PyMem_Calloc((size_t)*n + 1, sizeof(int));
    if (*out == NULL) PyErr_NoMemory();
    for (int i = 0; *out != NULL && i < *n; i++) {
        long index = PyLong_AsLong(PySequence_Fast_GET_ITEM(items, i));
        if (!PyErr_Occurred() && (index < 0 || index >= limit)) PyErr_SetString(PyExc_ValueError, "no such node");
        (*out)[i] = (int)index;
    }
    Py_DECREF(items);
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_check_data(GuardProgram *program, Check *check) {
    switch (check->kind) {
    case CHECK_LENGTH:
    case CHECK_TENSOR_IS:
    case CHECK_KERNEL_SETTINGS: check->number = PyLong_AsSsize_t(check->data); break;
    case CHECK_TENSOR_MATCH: return tensor_facts_from(check->data, &check->facts);
    case CHECK_SAME:
        check->number = PyLong_AsSsize_t(check->data);
        if (!PyErr_Occurred() && (check->number < 0 || check->number >= program->n_nodes))
            PyErr_SetString(PyExc_ValueError, "no such node");
        break;
    case CHECK_SIZES: check->sizes = size_program_from(check->data, program->n_nodes); break;
    case CHECK_NO_OVERLAP: return parse_indices(check->data, program->n_nodes, &check->nodes, &check->n_nodes);
    case CHECK_DISTINCT:
    case CHECK_APART: {
        PyObject *nodes;
        if (!PyArg_ParseTuple(check->data, "nO", &check->number, &nodes)) return -1;
        if (parse_indices(nodes, program->n_nodes, &check->nodes, &check->n_nodes) < 0) return -1;
        if (check->kind == CHECK_DISTINCT) break;
        check->ranges = PyMem_Calloc(2 * (size_t)check->n_nodes + 1, sizeof(uintptr_t));
        if (check->ranges == NULL) PyErr_NoMemory();
        break;
    }
    case CHECK_MRO_IS:
    case CHECK_DICT_KEYS:
        if (!PyTuple_Check(check->data)) PyErr_SetString(PyExc_TypeError, "dict_keys and mro_is take a tuple");
        break;
    default: break;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_check(GuardProgram *program, int index, PyObject *encoded) {
    Check *check = &program->checks[index];
    PyObject *name;
    if (!PyArg_ParseTuple(encoded, "OiOO", &name, &check->node, &check->data, &check->slow)) {
        check->data = check->slow = NULL;
        return -1;
    }
    Py_INCREF(check->data);
    Py_INCREF(check->slow);
    int kind = name_index(name, CHECK_NAMES, N_CHECKS);
    if (kind < 0) return -1;
    check->kind = (CheckKind)kind;
    if (check->node < 0 || check->node >= program->n_nodes) {
        PyErr_SetString(PyExc_ValueError, "no such node");
        return -1;
    }
    if (kind >= CHECK_SAME) {
        program->n_related++;
    } else {
        Node *node = &program->nodes[check->node];
        if (program->n_related > 0 || (node->n_checks > 0 && node->first_check + node->n_checks != index)) {
            PyErr_SetString(PyExc_ValueError, "the checks of one node must lie together, before those that relate nodes");
            return -1;
        }
        if (node->n_checks++ == 0) node->first_check = index;
    }
    return parse_check_data(program, check);
}

static int parse_program(GuardProgram *program, PyObject *nodes, PyObject *checks, PyObject *inputs, PyObject *state) {
    int n_nodes = (int)PyList_GET_SIZE(nodes), n_checks = (int)PyList_GET_SIZE(checks);
    program->nodes = PyMem_Calloc((size_t)n_nodes + 1, sizeof(Node));
    program->checks = PyMem_Calloc((size_t)n_checks + 1, sizeof(Check));
    if (program->nodes == NULL || program->checks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; program->n_nodes < n_nodes; program->n_nodes++)
        if (parse_node(program, program->n_nodes, PyList_GET_ITEM(nodes, program->n_nodes)) < 0) {
            program->n_nodes++; /* so that its key is released */
            return -1;
        }
    for (; program->n_checks < n_checks; program->n_checks++)
        if (parse_check(program, program->n_checks, PyList_GET_ITEM(checks, program->n_checks)) < 0) {
            program->n_checks++;
            return -1;
        }
    if (parse_indices(inputs, n_nodes, &program->inputs, &program->n_inputs) < 0) return -1;
    program->has_ambient = state != Py_None;
    return program->has_ambient ? ambient_capture(&program->ambient, state) : 0;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"nodes", "checks", "inputs", "ambient", "settled", NULL};
    PyObject *nodes, *checks, *inputs, *state = Py_None, *settled = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O|OO!", names, &PyList_Type, &nodes, &PyList_Type, &checks, &inputs,
                                     &state, &GuardProgram_Type, &settled))
        return NULL;
    GuardProgram *program = (GuardProgram *)type->tp_alloc(type, 0);
    PyObject *self = program != NULL ? PyCapsule_New(program, NULL, NULL) : NULL;
    if (self != NULL) program->on_end = PyCFunction_New(&unbind_function, self);
    Py_XDECREF(self);
    if (program != NULL && program->on_end == NULL) Py_CLEAR(program);
    if (program != NULL) {
        program->credit = MOST_CREDIT;
        program->settled = (GuardProgram *)Py_XNewRef(settled);
    }
    if (program != NULL && parse_program(program, nodes, checks, inputs, state) < 0) Py_CLEAR(program);
    return (PyObject *)program;
}

static int program_traverse(PyObject *self, visitproc visit, void *arg) {
    GuardProgram *program = (GuardProgram *)self;
    for (int i = 0; i < program->n_nodes; i++) {
        Py_VISIT(program->nodes[i].key);
        if (program->nodes[i].weak != NULL) Py_VISIT(program->nodes[i].weak);
        else Py_VISIT(program->nodes[i].value);
    }
    for (int i = 0; i < program->n_checks; i++) {
        Py_VISIT(program->checks[i].data);
        Py_VISIT(program->checks[i].slow);
    }
    Py_VISIT(program->on_end);
    Py_VISIT(program->settled);
    Py_VISIT(program->ambient.state);
    return 0;
}

static int program_clear(PyObject *self) {
    GuardProgram *program = (GuardProgram *)self;
    program->cleared = true;
    unbind(program);
    int n_nodes = program->n_nodes, n_checks = program->n_checks;
    program->n_nodes = program->n_checks = program->n_related = program->n_inputs = 0;
    for (int i = 0; i < n_nodes; i++) {
        Py_CLEAR(program->nodes[i].key);
    }
    for (int i = 0; i < n_checks; i++) {
        Py_CLEAR(program->checks[i].data);
        Py_CLEAR(program->checks[i].slow);
        PyMem_Free(program->checks[i].facts.dims);
        PyMem_Free(program->checks[i].nodes);
        PyMem_Free(program->checks[i].ranges);
        PyMem_Free(program->checks[i].sizes);
    }
    program->has_ambient = false;
    Py_CLEAR(program->ambient.state);
    Py_CLEAR(program->settled);
    Py_CLEAR(program->on_end);
    return 0;
}

static void program_dealloc(PyObject *self) {
    GuardProgram *program = (GuardProgram *)self;
    PyObject_GC_UnTrack(self);
    program_clear(self);
    PyMem_Free(program->nodes);
    PyMem_Free(program->checks);
    PyMem_Free(program->inputs);
    PyMem_Free(program->watches);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *program_check(PyObject *self, PyObject *args) {
    GuardProgram *program = (GuardProgram *)self;
    PyObject *flat;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &flat)) return NULL;
    Py_ssize_t n = program->n_inputs;
    PyObject **inputs = PyMem_Calloc((size_t)n + 1, sizeof(PyObject *));
    if (inputs == NULL) return PyErr_NoMemory();
    int holds = guard_program_run(program, &PyTuple_GET_ITEM(flat, 0), PyTuple_GET_SIZE(flat), inputs);
    PyObject *result = holds == 1 ? PyTuple_New(n) : holds == 0 ? Py_NewRef(Py_None) : NULL;
    for (Py_ssize_t i = 0; holds == 1 && i < n; i++) {
        if (result != NULL) PyTuple_SET_ITEM(result, i, inputs[i]);
        else Py_DECREF(inputs[i]);
    }
    PyMem_Free(inputs);
    return result;
}

static PyObject *program_sizes(PyObject *self, void *unused) {
    GuardProgram *program = (GuardProgram *)self;
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:K}", "nodes", program->n_nodes, "checks", program->n_checks, "watches",
                         program->n_watches, "inputs", program->n_inputs, "rebinds", (unsigned long long)program->rebinds);
}

static PyObject *program_settled(PyObject *self, void *unused) {
    GuardProgram *program = (GuardProgram *)self;
    return Py_NewRef(program->settled != NULL ? (PyObject *)program->settled : Py_None);
}

static PyMethodDef program_methods[] = {
    {"check", program_check, METH_VARARGS, "check(args) -> tuple of the inputs when every guard holds, else None"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef program_getset[] = {
    {"sizes", program_sizes, NULL, "counts of nodes, checks, watches, inputs and rebinds", NULL},
    {"settled", program_settled, NULL, "the same guards, bound to the arguments of the last call, or None", NULL},
    {NULL},
};

PyTypeObject GuardProgram_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamotor._C.GuardProgram",
    .tp_doc = "GuardProgram(nodes, checks, inputs, ambient=None): guards compiled for C; see capture/dispatch.py",
    .tp_basicsize = sizeof(GuardProgram),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = program_new,
    .tp_traverse = program_traverse,
    .tp_clear = program_clear,
    .tp_dealloc = program_dealloc,
    .tp_methods = program_methods,
    .tp_getset = program_getset,
};

/* Whether a class's entry under `__getattribute__`, `__setattr__` or `__delattr__` is object's own C function, which many
 * classes of C code name again. */
static PyObject *is_plain_access(PyObject *module, PyObject *found) {
    (void)module;
    if (!Py_IS_TYPE(found, &PyWrapperDescr_Type)) Py_RETURN_FALSE;
    void *wrapped = ((PyWrapperDescrObject *)found)->d_wrapped;
    return PyBool_FromLong(wrapped == (void *)PyObject_GenericGetAttr || wrapped == (void *)PyObject_GenericSetAttr);
}

static PyObject *settings_now(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLongLong(kernel_settings());
}

static PyMethodDef guards_functions[] = {
    {"kernel_settings", settings_now, METH_NOARGS, "kernel_settings() -> PyTorch's settings that choose kernels, as a number, or -1"},
    {"is_plain_access", is_plain_access, METH_O, "is_plain_access(slot wrapper) -> whether it is object's own lookup or store"},
    {NULL, NULL, 0, NULL},
};

int guards_init(PyObject *module) {
    if (PyModule_AddFunctions(module, guards_functions) < 0) return -1;
    return guard_checks_init() < 0 ? -1 : PyModule_AddType(module, &GuardProgram_Type);
}
