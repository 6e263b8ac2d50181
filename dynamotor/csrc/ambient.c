/* PyTorch's thread-wide state (grad mode, autocast, modes, ...), read through exported functions of libtorch and libc10.
 * When one of them is not exported, the Python AmbientState is made and compared instead. */
#include "dynamotor.h"
#include <dlfcn.h>

static struct {
    bool (*grad_mode)(void);
    bool (*inference_mode)(void);
    bool (*autocast_enabled)(int8_t device_type);
    int8_t (*autocast_dtype)(int8_t device_type);
    bool (*autocast_cache)(void);
    int8_t (*default_dtype)(void);
    int64_t (*function_modes)(void);
    int8_t (*function_enabled)(void);
    int64_t (*dispatch_modes)(void);
    void *(*global_context)(void);
    bool (*deterministic)(const void *context);
    bool ready;
} torch_state;

static const int8_t AUTOCAST_DEVICES[N_AUTOCAST] = {0, 1, 9}; /* c10::DeviceType of cpu, cuda and xla, as AmbientState.AUTOCAST_DEVICES */

/* c10::impl::raw_local_dispatch_key_set is thread-local: each thread looks its own up, once. */
static uint64_t *dispatch_key_sets(void) {
    static __thread uint64_t *sets;
    if (UNLIKELY(sets == NULL)) sets = torch_symbol("_ZN3c104impl26raw_local_dispatch_key_setE");
    return sets;
}

static bool find_functions(void) {
    torch_state.grad_mode = torch_symbol("_ZN3c108GradMode10is_enabledEv");
    torch_state.inference_mode = torch_symbol("_ZN3c1013InferenceMode10is_enabledEv");
    torch_state.autocast_enabled = torch_symbol("_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE");
    torch_state.autocast_dtype = torch_symbol("_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE");
    torch_state.autocast_cache = torch_symbol("_ZN2at8autocast25is_autocast_cache_enabledEv");
    torch_state.default_dtype = torch_symbol("_ZN3c1031get_default_dtype_as_scalartypeEv");
    torch_state.function_modes = torch_symbol("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
    torch_state.function_enabled = torch_symbol("_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv");
    torch_state.dispatch_modes = torch_symbol("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
    torch_state.global_context = torch_symbol("_ZN2at13globalContextEv");
    torch_state.deterministic = torch_symbol("_ZNK2at7Context23deterministicAlgorithmsEv");
    return torch_state.grad_mode && torch_state.inference_mode && torch_state.autocast_enabled &&
           torch_state.autocast_dtype && torch_state.autocast_cache && torch_state.default_dtype &&
           torch_state.function_modes && torch_state.function_enabled && torch_state.dispatch_modes &&
           torch_state.global_context && torch_state.deterministic && dispatch_key_sets() != NULL;
}

static void read_state(Ambient *now) {
    uint64_t *sets = dispatch_key_sets();
    now->include_keys = sets[0];
    now->exclude_keys = sets[1];
    now->grad_mode = torch_state.grad_mode();
    now->inference_mode = torch_state.inference_mode();
    for (int i = 0; i < N_AUTOCAST; i++)
        now->autocast_dtype[i] =
            torch_state.autocast_enabled(AUTOCAST_DEVICES[i]) ? torch_state.autocast_dtype(AUTOCAST_DEVICES[i]) : -1;
    now->autocast_cache = torch_state.autocast_cache();
    now->default_dtype = torch_state.default_dtype();
    now->function_modes = torch_state.function_modes();
    now->function_enabled = torch_state.function_enabled();
    now->dispatch_modes = torch_state.dispatch_modes();
    now->deterministic = torch_state.deterministic(torch_state.global_context());
}


/* Settings that choose kernels, as bits, and the number of threads above them; -1 when this build exports them not all. */
int64_t kernel_settings(void) {
    static const char *const names[N_KERNEL_SETTINGS] = {
        "_ZNK2at7Context19userEnabledFlashSDPEv", "_ZNK2at7Context26userEnabledMemEfficientSDPEv",
        "_ZNK2at7Context18userEnabledMathSDPEv", "_ZNK2at7Context19userEnabledCuDNNSDPEv", "_ZNK2at7Context17userEnabledMkldnnEv",
        "_ZNK2at7Context16userEnabledCuDNNEv",
    };
    static bool (*settings[N_KERNEL_SETTINGS])(const void *context);
    static int (*threads)(void);
    if (threads == NULL) {
        for (int i = 0; i < N_KERNEL_SETTINGS; i++)
            if ((settings[i] = torch_symbol(names[i])) == NULL) return -1;
        if (!torch_state.ready || (threads = torch_symbol("_ZN2at15get_num_threadsEv")) == NULL) return -1;
    }
    const void *context = torch_state.global_context();
    int64_t bits = 0;
    for (int i = 0; i < N_KERNEL_SETTINGS; i++) bits |= (int64_t)settings[i](context) << i;
    return bits | (int64_t)threads() << N_KERNEL_SETTINGS;
}

static int state_is(PyObject *state) {
    PyObject *now = PyObject_CallMethod(state, "current", NULL);
    int equal = now != NULL ? PyObject_RichCompareBool(now, state, Py_EQ) : -1;
    Py_XDECREF(now);
    return equal;
}

/* The fast copy is read from the present, so it may be taken only while the present is that state. Modes (a default device
 * is one) are Python objects; comparing them always needs Python. */
static void take_fast_copy(Ambient *ambient) {
    if (!torch_state.ready || ambient->in_modes) return;
    read_state(ambient);
    ambient->fast = true;
}

int ambient_capture(Ambient *ambient, PyObject *state) {
    int equal = state_is(state);
    PyObject *modes = equal >= 0 ? PyObject_GetAttrString(state, "function_modes") : NULL;
    Py_ssize_t n_modes = modes != NULL ? PyObject_Length(modes) : -1;
    Py_XDECREF(modes);
    if (n_modes < 0) return -1;
    ambient->in_modes = n_modes > 0;
    ambient->state = Py_NewRef(state);
    if (equal) take_fast_copy(ambient);
    return 0;
}

/* Whether autocast is on is said by the excluded keys; the types where it is on are numbers of their own. */
static bool autocasts_alike(const Ambient *then) {
    for (int i = 0; i < N_AUTOCAST; i++)
        if (then->autocast_dtype[i] >= 0 && torch_state.autocast_dtype(AUTOCAST_DEVICES[i]) != then->autocast_dtype[i]) return false;
    return true;
}

bool ambient_matches(Ambient *then) {
    if (UNLIKELY(!then->fast)) {
        int equal = state_is(then->state);
        if (equal < 0) PyErr_Clear();
        if (equal == 1) take_fast_copy(then);
        return equal == 1;
    }
    const uint64_t *sets = dispatch_key_sets();
    return sets[0] == then->include_keys && sets[1] == then->exclude_keys && torch_state.grad_mode() == then->grad_mode &&
           torch_state.inference_mode() == then->inference_mode && autocasts_alike(then) &&
           torch_state.autocast_cache() == then->autocast_cache && torch_state.default_dtype() == then->default_dtype &&
           torch_state.function_modes() == then->function_modes && torch_state.function_enabled() == then->function_enabled &&
           torch_state.dispatch_modes() == then->dispatch_modes &&
           torch_state.deterministic(torch_state.global_context()) == then->deterministic;
}

int ambient_init(PyObject *module, PyObject *torch) {
    torch_state.ready = find_functions();
    return PyModule_AddObjectRef(module, "ambient_reads_are_direct", torch_state.ready ? Py_True : Py_False);
}
