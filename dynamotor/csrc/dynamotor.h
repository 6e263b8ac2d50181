/* dynamotor._C: what its files share. Each file owns one idea:
 *   tensor.c      reading tensors without torch's headers
 *   launch.c      calling generated C functions on tensors
 *   run.c         calling a compiled graph
 *   one_call.c    a graph that is one call of PyTorch
 *   aten_function.c, aten_invoke.cpp  libtorch's functions of tensors, called without Python's bindings
 *   lend.c        memory for results that a pool keeps
 *   gpu_launch.c  launching generated GPU functions on tensors
 *   expect.c      whether a result is laid out as the program was compiled for
 *   ambient.c     PyTorch's thread-wide state
 *   guards.c      evaluating an entry's guards
 *   dispatch.c    guards -> gather -> compiled callable
 *   frame_hook.c  PEP 523, on only while a graph break runs user code
 *   python_compat.h, python_compat.c  CPython's structures, whose layout differs between versions
 */
#ifndef DYNAMOTOR_H
#define DYNAMOTOR_H

#include "python_compat.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* ---- tensor.c ---- */
typedef void *TensorHandle; /* at::Tensor*, as the C shim of libtorch takes it */

typedef struct {
    bool ready;              /* false: every tensor read goes through Python */
    Py_ssize_t offset;       /* of at::Tensor inside the Python object */
    Py_ssize_t keys_offset;  /* of the dispatch key set inside c10::TensorImpl */
    Py_ssize_t storage_offset; /* of the pointer to its storage in there */
    PyTypeObject *tensor_type; /* torch.Tensor */
    PyTypeObject *parameter_type; /* torch.nn.Parameter */
    int32_t (*get_data_ptr)(TensorHandle, void **);
    int32_t (*get_dtype)(TensorHandle, int32_t *);
    int32_t (*get_device_type)(TensorHandle, int32_t *);
    int32_t (*get_device_index)(TensorHandle, int32_t *);
    int32_t (*get_dim)(TensorHandle, int64_t *);
    int32_t (*get_sizes)(TensorHandle, int64_t **);
    int32_t (*get_strides)(TensorHandle, int64_t **);
    size_t (*element_size)(int32_t dtype); /* may be missing */
    bool (*requires_grad)(const void *impl); /* NULL in builds that do not export it */
    PyGetSetDef *requires_grad_attribute;
    getter version; /* of the getset descriptor torch.Tensor._version */
    void *version_closure;
} TensorShim;

extern TensorShim shim;

/* What TensorMatch compares; sizes and strides of -1 match any. */
typedef struct {
    PyTypeObject *cls;
    uint64_t keys;
    int32_t dtype, device_type, device_index;
    int32_t ndim;
    bool requires_grad;
    int64_t *dims; /* ndim sizes, then ndim strides */
} TensorFacts;

static inline TensorHandle tensor_handle(PyObject *tensor) { return (TensorHandle)((char *)tensor + shim.offset); }
static inline void *tensor_impl(PyObject *tensor) { return *(void **)tensor_handle(tensor); }
static inline bool is_tensor(PyObject *obj) { return PyObject_TypeCheck(obj, shim.tensor_type); }

/* The shim reads only tensors whose sizes and storage are plain; a subclass with __torch_dispatch__ has none. */
bool tensor_matches(PyObject *tensor, const TensorFacts *facts);
bool tensor_dim(PyObject *tensor, bool stride, Py_ssize_t dim, int64_t *value); /* false: there is none; no exception */
int tensor_data_ptr(PyObject *tensor, void **pointer); /* 0, or -1 with an exception */
int tensor_range(PyObject *tensor, uintptr_t *start, uintptr_t *stop);
int tensor_facts_from(PyObject *encoded, TensorFacts *facts); /* from TensorMatch.encode(); 0 or -1 */
/* Sizes, strides, dtype and device alone; `dims` is the caller's to free. */
int tensor_layout_from(PyObject *sizes, PyObject *strides, PyObject *dtype, PyObject *device, TensorFacts *facts);
bool tensor_has_layout(PyObject *tensor, const TensorFacts *facts);
void *torch_symbol(const char *name); /* a function or variable of PyTorch's libraries, or NULL */
int tensor_init(PyObject *module, PyObject *torch);

/* ---- launch.c ---- */
int launch_init(PyObject *module);

/* ---- run.c ---- */
int run_init(PyObject *module);

/* ---- lend.c ---- */
int lend_init(PyObject *module);

/* ---- gpu_launch.c ---- */
int gpu_launch_init(PyObject *module);

/* ---- expect.c ---- */
int expect_init(PyObject *module);

/* ---- one_call.c ---- */
int one_call_init(PyObject *module);

/* ---- aten_function.c ---- */
int aten_function_init(PyObject *module);

/* ---- ambient.c ---- */
enum { N_AUTOCAST = 3 }; /* devices whose autocast state a guard compares */

typedef struct {
    PyObject *state; /* the Python AmbientState, owned; for the slow comparison */
    uint64_t include_keys, exclude_keys;
    int64_t function_modes, dispatch_modes;
    int function_enabled;
    int32_t autocast_dtype[N_AUTOCAST]; /* -1: off */
    int32_t default_dtype;
    bool grad_mode, inference_mode, autocast_cache, deterministic, in_modes, fast;
} Ambient;

enum { N_KERNEL_SETTINGS = 6 };
int64_t kernel_settings(void);
int ambient_capture(Ambient *ambient, PyObject *state); /* 0 or -1 */
bool ambient_matches(Ambient *ambient);
int ambient_init(PyObject *module, PyObject *torch);

/* ---- guards.c ---- */
extern PyTypeObject GuardProgram_Type;
typedef struct GuardProgram GuardProgram;
/* 1: all hold, and inputs[i] are new references; 0: one does not hold; -1: an exception is set. */
int guard_program_run(GuardProgram *program, PyObject *const *args, Py_ssize_t nargs, PyObject **inputs);
Py_ssize_t guard_program_n_inputs(GuardProgram *program);
int guards_init(PyObject *module);

/* ---- dispatch.c ---- */
extern PyTypeObject Dispatcher_Type;
bool dispatcher_is_disabled(PyObject *dispatcher);
int dispatch_init(PyObject *module);

/* ---- frame_hook.c ---- */
/* Compiled code and the compiler itself run with the hook off: suspend gives what restore takes. */
PyObject *frame_hook_suspend(void);
void frame_hook_restore(PyObject *hook);
bool other_hooks_see_frames(void);
/* Calls it while torch.compile does not look. */
PyObject *call_unseen(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames);
int frame_hook_init(PyObject *module);

/* ---- fingerprint.c ---- */
int fingerprint_init(PyObject *module);

#endif
