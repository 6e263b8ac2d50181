"""Which torch functions are nodes of the graph, which are answered at trace time, and which break the graph.

>>> is_graph_function(torch.add), is_query(torch.is_grad_enabled), refusal(torch.manual_seed)[0]
(True, True, 'random')
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..base import compat

# Python functions of these modules are one node each: they are written over tensors and call no user code.
_NODE_MODULES = frozenset(
    (
        "torch.nn.functional",
        "torch.functional",
        "torch.special",
        "torch.linalg",
        "torch.fft",
        "torch._lowrank",
        "torch._tensor",
        "torch.masked._ops",
        "torch.nested",
        "torch.nested._internal.nested_tensor",
    )
)
# These call a function or module that the user gives: they are inlined.
_CALL_BACK = frozenset(
    (F.triplet_margin_with_distance_loss, getattr(compat.nested_functions, "get_tensor_symint", None))
)
_NAMESPACES = (
    torch,
    F,
    torch.functional,
    torch.linalg,
    torch.special,
    torch.fft,
    compat.nn_functions,
    compat.linalg_functions,
    compat.special_functions,
    compat.fft_functions,
    compat.variable_functions,
    torch.nested,
    compat.nested_functions,
    torch.masked,
)

# Answered at trace time, grouped by the reason for which the answer stays true. Names that this PyTorch lacks are
# skipped.
_QUERY_NAMES = {
    # It is the same for as long as the process lives.
    "constant": """
        distributed.is_available cuda.is_available cuda.device_count backends.mps.is_available backends.cuda.is_built
        is_vulkan_available jit.is_scripting compiler.is_compiling compiler.is_dynamo_compiling compiler.is_exporting
        _C._log_api_usage_once
    """,
    # It follows from the arguments: their types, and the facts in their `TensorMatch` rows.
    "arguments": """
        is_tensor is_storage finfo iinfo device Size promote_types can_cast broadcast_shapes is_floating_point is_complex
        is_signed is_inference numel typename overrides.is_tensor_like overrides.is_tensor_method_or_property
        overrides.has_torch_function overrides.has_torch_function_unary overrides.has_torch_function_variadic
        _C._has_torch_function _C._has_torch_function_unary _C._has_torch_function_variadic
    """,
    # The `Ambient` row compares it at each call. A call inside another tracer runs eager (`foreign_modes`).
    "ambient": """
        is_grad_enabled is_inference_mode_enabled is_autocast_cache_enabled get_default_dtype get_default_device
        are_deterministic_algorithms_enabled is_autocast_cpu_enabled
        _C._are_functorch_transforms_active _C._functorch.peek_interpreter_stack
        jit.is_tracing _C._get_tracing_state _C._is_tracing _C._len_torch_dispatch_stack
        _C._is_fx_tracing fx._symbolic_trace.is_fx_tracing fx._symbolic_trace.is_fx_symbolic_tracing
    """,
    # It is asked again at each call.
    "asked": """
        is_autocast_enabled get_autocast_dtype get_autocast_cpu_dtype get_autocast_gpu_dtype _C._is_any_autocast_enabled autograd._profiler_enabled
        _C._accelerator_getAccelerator _C._get_privateuse1_backend_name cuda.is_initialized cuda.is_current_stream_capturing
        cuda.get_device_capability cuda.get_device_name distributed.is_initialized
        get_num_threads get_num_interop_threads get_float32_matmul_precision is_deterministic_algorithms_warn_only_enabled
        get_deterministic_debug_mode is_warn_always_enabled is_anomaly_enabled is_anomaly_check_nan_enabled
        backends.mha.get_fastpath_enabled _C._get_cudnn_enabled _C._get_mkldnn_enabled _C._get_flash_sdp_enabled
        _C._get_math_sdp_enabled _C._get_mem_efficient_sdp_enabled _C._get_cudnn_sdp_enabled
    """,
}


def _resolve(names: str) -> frozenset[Any]:
    found = set()
    for name in names.split():
        obj: Any = torch
        for part in name.split("."):
            obj = getattr(obj, part, None)
        if obj is not None:
            found.add(obj)
    return frozenset(found)


def _by_name(names_by_row: dict[str, str]) -> dict[str, str]:
    return {name: row for row, names in names_by_row.items() for name in names.split()}


QUERIES = {fn: how for how, names in _QUERY_NAMES.items() for fn in _resolve(names)}

# Attributes of tensors that are constants, grouped by the guard of a tensor from outside: its `TensorMatch` row, or
# ("asked") a row of their own. Other attributes have rules in values/tensor.py, or break the graph.
METADATA = _by_name(
    {
        "match": """
        shape dtype device ndim requires_grad layout itemsize nbytes names is_cuda is_cpu is_xla is_xpu is_mps is_mtia is_ipu
        is_maia is_vulkan is_sparse is_sparse_csr is_mkldnn is_quantized is_nested is_meta
    """,
        "asked": "is_leaf output_nr _backward_hooks",
    }
)
METADATA = {name: row for name, row in METADATA.items() if hasattr(torch.Tensor, name)}
# Functions and methods of tensors whose results are no tensors, grouped by the reason for which the answer stays
# true. Others break the graph. "arguments": see above. "offset": a guard compares the storage offset of the tensor
# from outside. "outside": a conjugate or negative view from outside is refused, and tensors of the trace have no
# such bits.
ANSWERS = _by_name(
    {
        "arguments": """
        size stride dim ndimension numel nelement element_size is_floating_point is_complex is_signed is_contiguous get_device
        type is_same_size result_type can_cast promote_types is_inference has_names __len__
        is_coalesced dim_order broadcast_shapes is_distributed sym_size sym_stride sym_numel
    """,
        "offset": "storage_offset sym_storage_offset",
        "outside": "is_conj is_neg _is_zerotensor",
    }
)
# These take offsets that count from the start of the memory.
ADDRESSING = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))

_RANDOM = (
    torch.manual_seed,
    torch.seed,
    torch.initial_seed,
    torch.get_rng_state,
    torch.set_rng_state,
    torch.random.manual_seed,
    torch.random.seed,
    torch.random.initial_seed,
    torch.random.get_rng_state,
    torch.random.set_rng_state,
    torch.random.fork_rng,
    torch.Generator,
    torch.cuda.manual_seed,
    torch.cuda.manual_seed_all,
)
_EFFECTS = (
    torch.save,
    torch.load,
    torch.set_default_dtype,
    torch.set_default_device,
    torch.set_default_tensor_type,
    torch.set_num_threads,
    torch.set_num_interop_threads,
    torch.use_deterministic_algorithms,
    torch.set_printoptions,
    torch.set_float32_matmul_precision,
    torch.set_deterministic_debug_mode,
    torch.set_flush_denormal,
    torch.set_warn_always,
    torch.set_autocast_enabled,
    torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled,
    torch.clear_autocast_cache,
    torch.autocast_increment_nesting,
    torch.autocast_decrement_nesting,
    torch.set_autocast_cpu_enabled,
    torch.set_autocast_cpu_dtype,
    torch.set_autocast_gpu_dtype,
)
_AUTOGRAD = (
    torch.autograd.functional.jacobian,
    torch.autograd.functional.hessian,
    torch.autograd.functional.vjp,
    torch.autograd.functional.jvp,
)
_FUNCTORCH = str(compat.eager_transforms_file), str(compat.vmap_file)
# They only make functions, which have rules (rules_transforms.py).
_INLINED_TRANSFORMS = frozenset(("jacrev", "jacfwd", "hessian", "_check_randomness_arg"))
_COMPILERS = (torch.compile, torch.jit.script, torch.jit.trace)
_CONVERSIONS = (
    torch.from_numpy,
    torch.frombuffer,
    torch.from_dlpack,
    torch.from_file,
    torch.utils.dlpack.from_dlpack,
)
_QUANTISERS = torch.quantize_per_tensor, torch.quantize_per_channel, torch.quantize_per_tensor_dynamic

# Function -> (kind of break, why).
_MODE_STACK = (compat.count_function_modes, compat.function_mode_at)
REFUSED: dict[Any, tuple[str, str]] = {
    **dict.fromkeys(_RANDOM, ("random", "it reads or sets the state of a random number generator")),
    **dict.fromkeys(_EFFECTS, ("side-effect", "it changes PyTorch's global state or the file system")),
    **dict.fromkeys(_AUTOGRAD, ("autograd", "it runs autograd inside the forward")),
    **dict.fromkeys(_QUANTISERS, ("unsupported-op", "it gives a quantised tensor")),
    **dict.fromkeys(_MODE_STACK, ("modes", "it reads the stack of active modes")),
    **dict.fromkeys(_COMPILERS, ("unsupported-call", "other compilers are not captured")),
    **dict.fromkeys(
        _CONVERSIONS, ("unsupported-call", "it shares memory with an object that the graph cannot hold")
    ),
}

# Functions of these packages run as they are: they work on gradients, files or processes, between graphs.
_NATIVE_PACKAGES = (
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.optim",
    "torch.amp.grad_scaler",
    "torch.utils.data",
    "torch.utils.tensorboard",
)
_AVERAGED_MODELS = "torch.optim.swa_utils"  # modules as others are

FLEX_ATTENTION = "torch.nn.attention.flex_attention"
# Functions of these packages call user code through a compiler or interpreter of PyTorch's own.
_COMPILERS_PACKAGES = (
    "torch._dynamo",
    "torch._inductor",
    "torch._higher_order_ops",
    FLEX_ATTENTION,
)
_WITH_RULES = frozenset(
    [
        "flex_attention",
        "create_mask",
        "create_block_mask",
        "associative_scan",
        "mark_static_address",
        "mark_static",
    ]
)
_FOLLOWED = frozenset(("BlockMask.__init__", "and_masks", "or_masks", "noop_mask"))
_BOOKKEEPING = (
    "torch._dynamo.mutation_guard"  # it wraps every module's `__init__` once torch.compile was used
)

# Tensor methods that need data, change autograd's or the storage's state, or hand out memory.
REFUSED_METHODS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "item",
            "tolist",
            "numpy",
            "__array__",
            "__float__",
            "__int__",
            "__bool__",
            "__index__",
            "__complex__",
            "__contains__",
            "__repr__",
            "__str__",
            "__format__",
            "__deepcopy__",
            "__reduce_ex__",
            "__reduce__",
            "is_nonzero",
            "__dlpack__",
            "__cuda_array_interface__",
        ),
        ("data-dependent", "it hands the tensor's data to Python"),
    ),
    **dict.fromkeys(
        (
            "register_hook",
            "register_post_accumulate_grad_hook",
            "_backward_hooks",
            "__setstate__",
        ),
        ("autograd", "it changes autograd's state"),
    ),
    **dict.fromkeys(
        (
            "data_ptr",
            "storage",
            "untyped_storage",
            "_typed_storage",
            "set_",
            "resize_",
            "resize_as_",
            "share_memory_",
            "map_",
            "map2_",
            "apply_",
            "as_subclass",
            "_make_subclass",
            "__torch_function__",
            "__torch_dispatch__",
            "module_load",
            "pin_memory",
            "_set_data",
            "set_data",
        ),
        ("unsupported-call", "it reaches into the tensor's memory or class"),
    ),
}


def _collect() -> dict[Any, str]:
    """Public functions of torch's namespaces that are nodes, with their names."""
    found: dict[Any, str] = {}
    for namespace in _NAMESPACES:
        for name, obj in ((name, getattr(namespace, name)) for name in dir(namespace)):
            if name.startswith("__") or isinstance(obj, type) or not callable(obj) or not _hashable(obj):
                continue
            if isinstance(obj, types.FunctionType):
                if name.startswith("_") or getattr(obj, "__module__", None) not in _NODE_MODULES:
                    continue
            elif not isinstance(obj, types.BuiltinFunctionType) or name.startswith(_NOT_COMPUTING):
                continue
            if obj not in QUERIES and obj not in REFUSED and obj not in _CALL_BACK:
                found.setdefault(obj, name)
    return found


def _hashable(obj: Any) -> bool:
    try:
        hash(obj)
    except TypeError:
        return False
    return True


_NOT_COMPUTING = (
    "set_",
    "get_",
    "_set_",
    "_get_",
    "_enter",
    "_exit",
    "_add_docstr",
    "_log_api",
    "_functionalize",
    "_freeze",
    "_from_func",
    "_to_func",
    "_enable_func",
    "_disable_func",
    "_is_func",
    "_mirror",
    "_make_dual",
    "_unpack_dual",
    "_add_batch_dim",
    "_remove_batch_dim",
    "_init",
    "_cufft",
    "_debug",
    "_has_comp",
    "_pin_memory",
    "_foobar",
    "_test",
    "_from_blob",
    "_lazy_clone",
    "_print",
    "_parse_to",
)


GRAPH_FUNCTIONS = _collect()
GRAPH_FUNCTIONS |= {F.multi_head_attention_forward: "multi_head_attention_forward"}

# Tensor's own methods: C descriptors and the Python functions of torch/_tensor.py, by identity -> name.
TENSOR_METHODS: dict[Any, str] = {}
for _cls in (torch.Tensor, compat.TensorBase):
    for _name, _member in vars(_cls).items():
        if isinstance(_member, types.FunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            TENSOR_METHODS.setdefault(_member, _name)

# The special methods of tensors as PyTorch defines them: a program may put others in their place.
SPECIAL_METHODS: dict[str, Any] = {
    name: getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.startswith("__")
}


def is_graph_function(fn: Callable[..., Any]) -> bool:
    """Whether a call becomes one node."""
    if isinstance(fn, compat.OpOverload | compat.OpOverloadPacket):
        return True
    return _hashable(fn) and fn in GRAPH_FUNCTIONS


def is_query(fn: Callable[..., Any]) -> bool:
    """Whether a call is answered at trace time."""
    return _hashable(fn) and fn in QUERIES


def refusal(fn: Callable[..., Any]) -> tuple[str, str] | None:
    """Kind and cause of the break that a call makes, or None."""
    module = getattr(fn, "__module__", None) if isinstance(fn, types.FunctionType) else None
    if (
        isinstance(fn, types.FunctionType)
        and fn.__code__.co_filename.startswith(_FUNCTORCH)  # `wraps` changes `__module__`
        and fn.__code__.co_name not in _INLINED_TRANSFORMS
    ):
        return "transform", "function transforms run as they are"
    if (
        isinstance(module, str)
        and module.startswith(_COMPILERS_PACKAGES)
        and module != _BOOKKEEPING
        and fn.__name__ not in _WITH_RULES
        and not (module == FLEX_ATTENTION and fn.__qualname__.split(".<locals>")[0] in _FOLLOWED)
        and ("__marked_compile_region_fn__" not in fn.__dict__)
    ):
        return "transform", f"functions of {module} compile their argument, or run it as it is"
    if isinstance(module, str) and module.startswith(_NATIVE_PACKAGES) and module != _AVERAGED_MODELS:
        step = module.startswith("torch.optim.") and fn.__name__ == "step"
        how = "as a program of its own" if step else "as they are"
        return "unsupported-call", f"functions of {module} run between graphs, {how}"
    return REFUSED.get(fn) if _hashable(fn) else None
