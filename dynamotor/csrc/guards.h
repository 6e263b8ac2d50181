/* A guard program: nodes (sources) in an order where parents come first, and checks on them.
 *
 * Nodes that hang on a call argument are evaluated at every call. Nodes that hang on an object held by the entry are
 * bound: their values are kept, and a list of `Watch`es, made from what each step read, says whether every step would
 * give the same value again (see watches.c). Only when a watch moved are the bound nodes evaluated again.
 *
 * A program with many nodes on an argument (a model) has a second form, `settled`, where these are bound to the argument
 * of the last call, which it holds weakly.
 */
#ifndef DYNAMOTOR_GUARDS_H
#define DYNAMOTOR_GUARDS_H

#include "dynamotor.h"

/* One for each class in capture/source.py, by its step_kind. */
typedef enum {
    STEP_ARG, STEP_CONST, STEP_GETATTR, STEP_INSTANCE_DICT, STEP_DICT_ITEM, STEP_SEQ_ITEM, STEP_TYPE_ATTR,
    STEP_SLOT, STEP_SIZE_OF, STEP_STRIDE_OF,
    STEP_KEPT_ARG, /* an argument that is bound: capture/dispatch.py */
    N_STEPS
} Step;

/* One for each row in capture/guards.py, by its code. */
typedef enum {
    CHECK_TYPE_IS, CHECK_ID_IS, CHECK_TENSOR_IS, CHECK_CONST_EQUALS, CHECK_TENSOR_MATCH, CHECK_LENGTH, CHECK_DICT_KEYS, CHECK_MISSING_KEY, CHECK_REPLACEABLE,
    CHECK_MISSING_TYPE_ATTR, CHECK_MISSING_ATTR, CHECK_CELL_EMPTY, CHECK_PREDICATE, CHECK_MRO_IS, CHECK_KERNEL_SETTINGS,
    CHECK_SAME, CHECK_DISTINCT, CHECK_NO_OVERLAP, CHECK_APART, CHECK_SIZES, /* these relate nodes and run last */
    N_CHECKS
} CheckKind;

typedef enum {
    PER_CALL, /* hangs on a call argument: evaluated first, at every call */
    BOUND,    /* hangs on a held object, or on an argument that stays, by steps that can be watched */
    VOLATILE, /* hangs on a held object by a getattr or a tensor's size: evaluated at every call, among the watches */
} Life;

typedef struct {
    Step step;
    Life life;
    int parent;        /* -1 for roots */
    int slot;          /* where a run keeps its value; -1 for BOUND nodes, whose value is in `value` */
    int first_check, n_checks;
    int first_child, next_sibling;
    Py_ssize_t number; /* argument, item or cell index */
    PyObject *key;     /* attribute name, dict key, or the constant */
    Py_hash_t hash;    /* of a dict key */
    PyObject *value;   /* bound value; NULL before the first evaluation. Owned, or what `weak` leads to */
    PyObject *weak;    /* a weak reference to the value, or to a tensor's storage, whose end unbinds the program */
    bool by_storage;   /* `weak` leads to the storage: the value is alive as long as the node's step finds it */
} Node;

typedef struct SizeProgram SizeProgram;

typedef struct {
    CheckKind kind;
    int node;
    Py_ssize_t number;  /* length, cell index, a tensor's address, the other node of `same`, how many of `apart` are written, of `distinct` changed, kernel settings */
    PyObject *data;     /* encoded by the row */
    PyObject *slow;     /* tensor_match: the row's own check_value */
    TensorFacts facts;  /* tensor_match */
    int *nodes;         /* distinct, no_overlap, apart */
    int n_nodes;
    uintptr_t *ranges;  /* apart: start and stop of each tensor's memory when they were last found apart */
    SizeProgram *sizes; /* sizes */
} Check;

typedef enum {
    WATCH_POINTER, WATCH_DICT, /* one word of memory has the same bits */
    WATCH_TYPE, WATCH_ITEM, WATCH_TENSOR, WATCH_CHECK, WATCH_NODE,
    LAST_WORD = WATCH_DICT,
} WatchKind;

typedef struct {
    WatchKind kind;
    int index;        /* node, or check for WATCH_TENSOR and WATCH_CHECK */
    void *where;      /* the place of the pointer or of the dict's version; the type, list or tensor */
    uint64_t expect;  /* the pointer, dict or type version; the item of a list; of a node: 1 if no Python code runs */
    union {
        uint64_t bits; /* of the word that are compared */
        Py_ssize_t item;
    };
} Watch;

struct GuardProgram {
    PyObject_HEAD
    int n_nodes, n_checks, n_related, n_slots, n_inputs, n_watches;
    int first_kept, n_kept; /* the nodes of arguments that are bound */
    int n_first;       /* the watches up to the last volatile node that may run Python code */
    Node *nodes;
    Check *checks; /* those of one node are adjacent; the n_related that relate nodes come last */
    int *inputs;
    Watch *watches;
    bool bound, cleared;
    uint64_t rebinds;
    uint64_t epoch; /* counts how often values were let go: whoever ran Python code meanwhile looks whether it changed */
    PyObject *on_end; /* called by the weak references */
    GuardProgram *settled; /* the same guards with arguments bound; NULL where few nodes hang on one */
    int credit;            /* of `settled`: calls earn it, binding to other arguments costs REBIND_COST */
    bool has_ambient;
    Ambient ambient;
};

/* guard_steps.c: a new reference to the value one step on, or NULL without an exception when there is none. */
PyObject *step_value(const Node *node, PyObject *parent);
PyObject **instance_dict_place(PyObject *object);
PyObject **slot_place(PyObject *object, Py_ssize_t slot);
Py_ssize_t slot_number(PyObject *name);
bool class_can_change(PyTypeObject *cls);

/* guard_checks.c: whether a check of one value holds; exceptions count as no and are cleared. */
bool check_holds(const Check *check, PyObject *value);
bool const_is_frozen(PyObject *value);
int guard_checks_init(void);

/* sizes.c */
SizeProgram *size_program_from(PyObject *encoded, int n_nodes); /* from SizesHold.encode(); NULL with an exception */
bool size_program_holds(const SizeProgram *sizes, const GuardProgram *program, PyObject *const *slots);

/* watches.c */
typedef enum {
    HOLD,  /* nothing moved */
    MOVED, /* a step may lead elsewhere now: evaluate the bound nodes again */
    FAIL,  /* a check of a value, which every step still leads to, fails */
} Verdict;

int watches_build(GuardProgram *program); /* from the bound values; 0 or -1 */
Verdict watches_run(GuardProgram *program, PyObject **slots);
/* Take a step and run the checks of the node it leads to: a new reference, or NULL without an exception. */
PyObject *node_evaluate(const GuardProgram *program, const Node *node, PyObject *parent);

static inline PyObject *node_value(const Node *node, PyObject *const *slots) {
    return node->slot >= 0 ? slots[node->slot] : node->value;
}

/* Whether iterating a dict subclass gives the raw order (an OrderedDict keeps another). */
static inline bool has_raw_order(PyObject *dict) {
    return Py_TYPE(dict)->tp_iter == PyDict_Type.tp_iter || PyDict_GET_SIZE(dict) < 2;
}

#endif
