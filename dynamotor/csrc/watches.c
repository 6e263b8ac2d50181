/* Watches: cheap tests that every step of the bound nodes would give the same value again, and the tests of what can
 * change inside a value without any step changing (tensor metadata, list lengths). They are in the order of the nodes,
 * parents first, so a watch that is reached looks at a value that every step still leads to. */
#include "guards.h"

PyObject *node_evaluate(const GuardProgram *program, const Node *node, PyObject *parent) {
    PyObject *found = step_value(node, parent);
    for (int i = 0; found != NULL && i < node->n_checks; i++)
        if (!check_holds(&program->checks[node->first_check + i], found)) Py_CLEAR(found);
    return found;
}

/* ---- building ---- */

static bool check_reads_memory(const Check *check) {
    PyTypeObject *type;
    switch (check->kind) {
    case CHECK_TYPE_IS:
    case CHECK_ID_IS:
    case CHECK_TENSOR_IS:
    case CHECK_CELL_EMPTY: return true;
    case CHECK_TENSOR_MATCH: return shim.ready;
    case CHECK_KERNEL_SETTINGS: return check->number >= 0;
    case CHECK_CONST_EQUALS:
        type = Py_TYPE(check->data);
        return check->data == Py_None || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type;
    default: return false;
    }
}

/* Whether the evaluation of a node runs no Python code: an attribute that PyTorch reads in C, or a size, of a plain
 * tensor. Most volatile nodes are: gradients and hooks of parameters. */
static bool node_reads_memory(const GuardProgram *program, const Node *node) {
    const PyObject *tensor = program->nodes[node->parent].value;
    if (!shim.ready || program->nodes[node->parent].life != BOUND) return false;
    if (Py_TYPE(tensor) != shim.tensor_type && Py_TYPE(tensor) != shim.parameter_type) return false;
    for (int c = node->first_check; c < node->first_check + node->n_checks; c++)
        if (!check_reads_memory(&program->checks[c])) return false;
    if (node->step == STEP_SIZE_OF || node->step == STEP_STRIDE_OF) return true;
    PyObject *attribute = node->step == STEP_GETATTR ? _PyType_Lookup(Py_TYPE(tensor), node->key) : NULL;
    return attribute != NULL && Py_IS_TYPE(attribute, &PyGetSetDescr_Type);
}

typedef struct {
    bool dict, type; /* whether the version of the node's value is watched already */
} Watched;

static Watch *add(GuardProgram *program, WatchKind kind, int index, void *where, uint64_t expect) {
    Watch *watch = &program->watches[program->n_watches++];
    *watch = (Watch){.kind = kind, .index = index, .where = where, .expect = expect, .bits = UINT64_MAX};
    return watch;
}

static void watch_pointer(GuardProgram *program, int node, void *place) {
    if (place != NULL) add(program, WATCH_POINTER, node, place, (uint64_t)(uintptr_t)*(void **)place);
}

static void watch_class(GuardProgram *program, int node, PyObject *value) {
    if (class_can_change(Py_TYPE(value))) watch_pointer(program, node, &value->ob_type);
}

static void watch_dict(GuardProgram *program, int node, PyObject *dict, Watched *watched) {
    if (!watched->dict && dict_watch(dict) == 0) {
        uint64_t *word = dict_version_word(dict);
        Watch *watch = add(program, WATCH_DICT, node, word, *word & DICT_VERSION_BITS);
        watch->bits = DICT_VERSION_BITS;
    }
    watched->dict = true;
}

static void watch_type(GuardProgram *program, int node, PyObject *type, Watched *watched) {
    if (!watched->type) add(program, WATCH_TYPE, node, type, assigned_type_version((PyTypeObject *)type));
    watched->type = true;
}

static void watch_check(GuardProgram *program, int node, int index, PyObject *value, Watched *watched) {
    switch (program->checks[index].kind) {
    case CHECK_ID_IS:
    case CHECK_TENSOR_IS: return;
    case CHECK_TYPE_IS: watch_class(program, node, value); return;
    case CHECK_TENSOR_MATCH: add(program, WATCH_TENSOR, index, value, 0); return;
    case CHECK_MISSING_KEY:
    case CHECK_REPLACEABLE: watch_dict(program, node, value, watched); return;
    case CHECK_MISSING_TYPE_ATTR:
    case CHECK_MRO_IS: watch_type(program, node, value, watched); return;
    case CHECK_CONST_EQUALS:
        if (!const_is_frozen(value)) break;
        return;
    case CHECK_LENGTH:
        if (PyTuple_Check(value) || PyUnicode_Check(value) || PyBytes_Check(value)) return;
        if (!PyDict_Check(value)) break;
        watch_dict(program, node, value, watched);
        return;
    case CHECK_DICT_KEYS:
        if (!has_raw_order(value)) break; /* an OrderedDict can be reordered under the same version */
        watch_dict(program, node, value, watched);
        return;
    default: break;
    }
    add(program, WATCH_CHECK, index, value, 0);
}

static void watch_step(GuardProgram *program, int parent, PyObject *value, const Node *child, Watched *watched) {
    switch (child->step) {
    case STEP_INSTANCE_DICT: watch_pointer(program, parent, instance_dict_place(value)); return;
    case STEP_DICT_ITEM: watch_dict(program, parent, value, watched); return;
    case STEP_SEQ_ITEM:
        if (PyList_Check(value))
            add(program, WATCH_ITEM, parent, value, (uint64_t)(uintptr_t)child->value)->item = child->number;
        return;
    case STEP_TYPE_ATTR: watch_type(program, parent, value, watched); return;
    case STEP_SLOT: watch_pointer(program, parent, slot_place(value, child->number)); return;
    default: return; /* a getattr is a volatile node */
    }
}

static void watch_node(GuardProgram *program, int i, const bool *first, bool is_first) {
    const Node *node = &program->nodes[i];
    if (node->life == VOLATILE && first[i] == is_first) add(program, WATCH_NODE, i, NULL, node_reads_memory(program, node));
    if (node->life != BOUND) return;
    Watched watched = {false, false};
    for (int c = node->first_check; c < node->first_check + node->n_checks; c++)
        watch_check(program, i, c, node->value, &watched);
    for (int c = node->first_child; c >= 0; c = program->nodes[c].next_sibling)
        if (program->nodes[c].life == BOUND && (first[c] || !is_first))
            watch_step(program, i, node->value, &program->nodes[c], &watched);
}

/* Volatile nodes that may run Python code come first, behind the watches of their parents. All other watches
 * follow, those of their parents once more: then no code runs between them and the end. */
int watches_build(GuardProgram *program) {
    size_t most = 2 * (size_t)(program->n_checks + 2 * program->n_nodes + 1);
    Watch *room = PyMem_Realloc(program->watches, sizeof(Watch) * most);
    bool *first = PyMem_Calloc(program->n_nodes + 1, sizeof(bool));
    if (room != NULL) program->watches = room;
    program->n_watches = program->n_first = 0;
    if (room == NULL || first == NULL) {
        PyMem_Free(first);
        PyErr_NoMemory();
        return -1;
    }
    for (int i = program->n_nodes - 1; i >= 0; i--) {
        const Node *node = &program->nodes[i];
        if (node->life == VOLATILE && !node_reads_memory(program, node)) first[i] = true;
        if (first[i] && node->parent >= 0) first[node->parent] = true;
    }
    for (int i = 0; i < program->n_nodes; i++)
        if (first[i]) watch_node(program, i, first, true);
    program->n_first = program->n_watches;
    for (int i = 0; i < program->n_nodes; i++) watch_node(program, i, first, false);
    PyMem_Free(first);
    return PyErr_Occurred() ? -1 : 0; /* of a dict that could not be watched */
}

/* ---- running ---- */

static bool depends_on_version(Step step, WatchKind kind) {
    return kind == WATCH_DICT ? step == STEP_DICT_ITEM : step == STEP_TYPE_ATTR;
}

/* A dict or class has a new version: look whether anything that was read from it changed. Dict keys with an __eq__ of
 * their own run Python code, so the watch itself may be gone in the end. */
static Verdict recheck(const GuardProgram *program, Watch *watch) {
    const Node *node = &program->nodes[watch->index];
    WatchKind kind = watch->kind;
    bool of_dict = watch->kind == WATCH_DICT;
    PyObject *where = of_dict ? dict_of_version_word(watch->where) : watch->where;
    uint64_t epoch = program->epoch;
    uint64_t version = of_dict ? *dict_version_word(where) & watch->bits : assigned_type_version((PyTypeObject *)where);
    Verdict verdict = HOLD;
    Py_INCREF(where);
    for (int c = node->first_child; verdict != FAIL && c >= 0; c = program->nodes[c].next_sibling) {
        const Node *child = &program->nodes[c];
        if (child->life != BOUND || !depends_on_version(child->step, kind)) continue;
        PyObject *now = step_value(child, where);
        if (now != child->value) {
            verdict = now != NULL ? MOVED : FAIL;
            for (int i = 0; now != NULL && i < child->n_checks; i++)
                if (!check_holds(&program->checks[child->first_check + i], now)) verdict = FAIL;
        }
        Py_XDECREF(now);
    }
    for (int i = 0; verdict != FAIL && i < node->n_checks; i++)
        if (!check_holds(&program->checks[node->first_check + i], where)) verdict = FAIL;
    Py_DECREF(where);
    if (verdict == HOLD && program->epoch == epoch) watch->expect = version;
    return verdict;
}

static Verdict run_volatile(const GuardProgram *program, const Node *node, PyObject **slots) {
    PyObject *parent = Py_NewRef(node_value(&program->nodes[node->parent], slots));
    PyObject *found = node_evaluate(program, node, parent);
    Py_DECREF(parent);
    if (found == NULL) return FAIL;
    Py_XSETREF(slots[node->slot], found);
    return HOLD;
}

/* What may run Python code, so that the program may be rebound meanwhile. */
static Verdict run_slow_watch(GuardProgram *program, Watch *watch, PyObject **slots) {
    uint64_t epoch = program->epoch;
    Verdict verdict;
    PyObject *where;
    switch (watch->kind) {
    case WATCH_TENSOR:
    case WATCH_CHECK:
        where = Py_NewRef(watch->where);
        verdict = check_holds(&program->checks[watch->index], where) ? HOLD : FAIL;
        Py_DECREF(where);
        break;
    case WATCH_NODE: verdict = run_volatile(program, &program->nodes[watch->index], slots); break;
    default: verdict = recheck(program, watch); break;
    }
    return program->epoch == epoch ? verdict : MOVED;
}

/* Whether a tensor that is held by its storage is still where its step found it. */
static bool is_there(const GuardProgram *program, const Node *node) {
    if (!node->by_storage) return true;
    PyObject *now = step_value(node, program->nodes[node->parent].value);
    Py_XDECREF(now);
    return now == node->value;
}

/* The node at whose value a watch looks. */
static const Node *watched_node(const GuardProgram *program, const Watch *watch) {
    int node = watch->index;
    if (watch->kind == WATCH_TENSOR || watch->kind == WATCH_CHECK) node = program->checks[watch->index].node;
    else if (watch->kind == WATCH_NODE) node = program->nodes[watch->index].parent;
    return &program->nodes[node];
}

static bool all_there(const GuardProgram *program) {
    for (int i = 0; i < program->n_nodes; i++)
        if (!is_there(program, &program->nodes[i])) return false;
    return true;
}

static Verdict run_watches(GuardProgram *program, PyObject **slots, int from, int to) {
    bool ran_python = false; /* which may have ended a tensor whose step was looked at before */
    for (int i = from; i < to; i++) {
        Watch *watch = &program->watches[i];
        if (UNLIKELY(ran_python) && !is_there(program, watched_node(program, watch))) return MOVED;
        if (LIKELY(watch->kind <= LAST_WORD)) { /* most of them: no jump that depends on the kind */
            if (LIKELY((*(uint64_t *)watch->where & watch->bits) == watch->expect)) continue;
            if (watch->kind == WATCH_POINTER) return MOVED;
        }
        switch (watch->kind) {
        case WATCH_TYPE:
            if (LIKELY(watch->expect != 0 && type_version(watch->where) == watch->expect)) continue;
            break;
        case WATCH_ITEM:
            if (watch->item < PyList_GET_SIZE(watch->where) &&
                (uint64_t)(uintptr_t)PyList_GET_ITEM(watch->where, watch->item) == watch->expect)
                continue;
            return MOVED;
        case WATCH_TENSOR:
            if (LIKELY(shim.ready)) {
                if (LIKELY(tensor_matches(watch->where, &program->checks[watch->index].facts))) continue;
                return FAIL;
            }
            break;
        default: break;
        }
        Verdict verdict = run_slow_watch(program, watch, slots);
        if (verdict != HOLD) return verdict;
        ran_python |= watch->kind == WATCH_CHECK ? !check_reads_memory(&program->checks[watch->index]) :
                      watch->kind != WATCH_NODE || watch->expect == 0;
    }
    return ran_python && to == program->n_watches && !all_there(program) ? MOVED : HOLD;
}

Verdict watches_run(GuardProgram *program, PyObject **slots) {
    Verdict verdict = run_watches(program, slots, 0, program->n_first);
    return verdict == HOLD ? run_watches(program, slots, program->n_first, program->n_watches) : verdict;
}
