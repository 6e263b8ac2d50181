"""Every private PyTorch name that the package uses, one row each. Other files take them from here.

A private name is a dotted path from `torch` with a part that begins with an underscore. Not in the table:
operators (`torch.ops`, `torch._neg_view`), which serialised programs keep alive, the documented
`torch._check*`, `torch._assert*` and `torch._foreach_*`, and attributes of objects that a program hands over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .probe import ADAPTER, DDP, FSDP, GPU, RULE, attribute, late, name, tell

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload, OpOverloadPacket as OpOverloadPacket
    from torch.fx._lazy_graph_module import _LazyGraphModule

    class LazyGraphModule(_LazyGraphModule, torch.fx.GraphModule): ...

    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec
else:
    OpOverload = name("torch._ops.OpOverload", instead=type(torch.ops.aten.relu.default))
    OpOverloadPacket = name("torch._ops.OpOverloadPacket", instead=type(torch.ops.aten.relu))
    LazyGraphModule = name("torch.fx._lazy_graph_module._LazyGraphModule")
    TorchDispatchMode = name("torch.utils._python_dispatch.TorchDispatchMode")
    TreeSpec = name("torch.utils._pytree.TreeSpec")


# Trees of containers ----------------------------------------------------------------------------------------
tree_flatten = name("torch.utils._pytree.tree_flatten")
tree_unflatten = name("torch.utils._pytree.tree_unflatten")
tree_leaves = name("torch.utils._pytree.tree_leaves")
tree_map = name("torch.utils._pytree.tree_map")
tree_map_only = name("torch.utils._pytree.tree_map_only")

# Modes of the thread ----------------------------------------------------------------------------------------
set_grad_enabled = name("torch._C._set_grad_enabled")
enter_autocast = name("torch.amp.autocast_mode._enter_autocast")
exit_autocast = name("torch.amp.autocast_mode._exit_autocast")
DisableAutocast = name("torch._C._DisableAutocast")
InferenceMode = name("torch._C._InferenceMode", instead=torch.inference_mode)
deterministic_algorithms = name(
    "torch._C._get_deterministic_algorithms", instead=torch.are_deterministic_algorithms_enabled
)
function_mode_stack = name("torch.overrides._get_current_function_mode_stack")
count_function_modes = name("torch._C._len_torch_function_stack")
function_mode_at = name("torch._C._get_function_stack_at")
push_function_mode = name("torch._C._push_on_torch_function_stack")
pop_function_mode = name("torch._C._pop_torch_function_stack")
count_dispatch_modes = name("torch._C._len_torch_dispatch_stack")
torch_function_enabled = name("torch._C._is_torch_function_enabled")
torch_function_all_disabled = name("torch._C._is_torch_function_all_disabled")
DisableTorchFunctionSubclass = name("torch._C.DisableTorchFunctionSubclass")
enter_plain_functions = name("torch._C.DisableTorchFunctionSubclass.__enter__", off=RULE)
exit_plain_functions = name("torch._C.DisableTorchFunctionSubclass.__exit__", off=RULE)
disabled_torch_function = name("torch._C._disabled_torch_function_impl")
DeviceContext = name("torch.utils._device.DeviceContext", instead=type(torch.device("cpu")))
device_constructors = name("torch.utils._device._device_constructors")
tracing_state = name("torch._C._get_tracing_state", instead=lambda: torch.jit.is_tracing() or None)
forward_level = attribute("torch.autograd.forward_ad._current_level")
transform_depth = name("torch._C._functorch.get_dynamic_layer_stack_depth", instead=lambda: 0)
leave_transforms = name("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth")
exit_dual_level = name("torch._C._exit_dual_level")
maybe_functorch_level = name("torch._C._functorch.maybe_get_level")
is_functional = name("torch._is_functional_tensor")
is_batched = name("torch._C._functorch.is_batchedtensor")
leaves_allowed = name("torch._C._functorch.get_inplace_requires_grad_allowed")
allow_leaves = name("torch._C._functorch.set_inplace_requires_grad_allowed")
is_legacy_batched = name("torch._C._functorch.is_legacy_batchedtensor")

# Seeds of devices that have not begun ------------------------------------------------------------------
cuda_seeds = name("torch.cuda._lazy_seed_tracker", instead=None)
xpu_seeds = name("torch.xpu._lazy_seed_tracker", instead=None)
mtia_seeds = name("torch.mtia._lazy_seed_tracker", instead=None)
custom_device_name = name("torch._C._get_privateuse1_backend_name", instead=lambda: "cuda")

# Dispatch ---------------------------------------------------------------------------------------------------
TensorBase = name("torch._C.TensorBase", instead=torch.Tensor.__mro__[1])
make_wrapper_subclass = name("torch.Tensor._make_wrapper_subclass")
make_subclass = name("torch.Tensor._make_subclass", off=RULE)
pybind_class = name("torch._C.Graph")
is_view = name("torch.Tensor._is_view", instead=lambda tensor: tensor._base is not None)
DisableTorchDispatch = name("torch._C._DisableTorchDispatch")
BelowAutograd = name("torch._C._AutoDispatchBelowAutograd")
BelowViews = name("torch._C._AutoDispatchBelowADInplaceOrView")
ExcludeDispatchKeys = name("torch._C._ExcludeDispatchKeyGuard")
DispatchKeySet = name("torch._C.DispatchKeySet")
parse_dispatch_key = name("torch._C._dispatch_key_parse")
composite_explicit = name("torch._C.DispatchKey.CompositeExplicitAutograd")
composite_implicit = name("torch._C.DispatchKey.CompositeImplicitAutograd")
dispatch_keys = name("torch._C._dispatch_keys")
has_kernel = name("torch._C._dispatch_has_kernel_for_dispatch_key")
included_keys = name("torch._C._dispatch_tls_local_include_set")
excluded_keys = name("torch._C._dispatch_tls_local_exclude_set")
CustomOpDef = name("torch._library.custom_ops.CustomOpDef")
custom_op_definitions = name("torch._library.custom_ops.OPDEFS")
fake_implementations = name("torch._library.simple_registry.singleton")
registered_kernels = name("torch.library._impls")
OpNamespace = name("torch._ops._OpNamespace", instead=type(torch.ops.aten))
Ops = name("torch._ops._Ops", instead=type(torch.ops))


# Jagged tensors ---------------------------------------------------------------------------------------------
class _Absent:
    """Stands for a class that this PyTorch lacks: it has no instances, and answers are no."""

    mul = None


NestedTensor = name("torch.nested._internal.nested_tensor.NestedTensor", instead=_Absent)
NestedIntNode = name("torch.nested._internal.nested_int.NestedIntNode", instead=_Absent)
nested_functions = name("torch.nested._internal.nested_tensor", instead=torch.nested)

# Functions that a captured program calls --------------------------------------------------------------------
nn_functions = name("torch._C._nn")
linalg_functions = name("torch._C._linalg")
special_functions = name("torch._C._special")
fft_functions = name("torch._C._fft")
variable_functions = name("torch._C._VariableFunctions")
SDPBackend = name("torch._C._SDPBackend")
parse_to = name("torch._C._nn._parse_to")
group_tensors = name("torch._C._group_tensors_by_device_and_dtype", off=RULE)
log_api_usage = name("torch._C._log_api_usage_metadata", off=RULE)
weights_have_changed = name("torch.nn.RNNBase._weights_have_changed", off=RULE)
_fx_module = name("torch.fx._symbolic_trace")
_fx_flag = name("torch.fx._symbolic_trace._get_is_fx_tracing", "torch.fx._symbolic_trace._is_fx_tracing_flag")
torch_compile_file = name("torch._compile.__file__", off=RULE)
eager_transforms_file = name("torch._functorch.eager_transforms.__file__", off=RULE)
vmap_file = name("torch._functorch.vmap.__file__", off=RULE)
while_loop_operator = name("torch._higher_order_ops.while_loop.while_loop", off=RULE)
scan_operator = name("torch._higher_order_ops.scan.scan", off=RULE)
map_operator = name("torch._higher_order_ops.map.map", off=RULE)
vmap_impl = name("torch._functorch.vmap.vmap_impl", off=RULE)
grad_impl = name("torch._functorch.eager_transforms.grad_impl", off=RULE)
grad_and_value_impl = name("torch._functorch.eager_transforms.grad_and_value_impl", off=RULE)
functorch_jvp = name("torch._functorch.eager_transforms.jvp", off=RULE)
functorch_vjp = name("torch._functorch.eager_transforms.vjp", off=RULE)
associative_scan = name("torch._higher_order_ops.associative_scan.associative_scan", off=RULE)

# Autograd ---------------------------------------------------------------------------------------------------
SingleLevelFunction = name("torch.autograd.function._SingleLevelFunction")
FunctionBase = name("torch._C._FunctionBase")
execution_engine = attribute("torch.autograd.Variable._execution_engine")
current_node = name("torch._C._current_autograd_node")
current_task = name("torch._C._current_graph_task_id")
engine_will_run = name("torch._C._will_engine_execute_node")
keeps_graph = name("torch._C._autograd._get_current_graph_task_keep_graph")
sequence_number = name("torch._C._autograd._get_sequence_nr")
set_version_counter = name("torch._C._autograd._unsafe_set_version_counter")
top_saved_hooks = name("torch._C._autograd._top_saved_tensors_default_hooks")
push_saved_hooks = name("torch._C._autograd._push_saved_tensors_default_hooks")
pop_saved_hooks = name("torch._C._autograd._pop_saved_tensors_default_hooks")
creation_meta = name("torch._C._autograd._get_creation_meta")
CreationMeta = name("torch._C._autograd.CreationMeta")
profiler_enabled = name("torch.autograd._profiler_enabled")
RecordFunction = name("torch._C._profiler._RecordFunctionFast", instead=torch.profiler.record_function)

# Settings of kernels ----------------------------------------------------------------------------------------
flash_attention_enabled = name(
    "torch._C._get_flash_sdp_enabled", instead=torch.backends.cuda.flash_sdp_enabled
)
mem_efficient_attention_enabled = name(
    "torch._C._get_mem_efficient_sdp_enabled", instead=torch.backends.cuda.mem_efficient_sdp_enabled
)
math_attention_enabled = name("torch._C._get_math_sdp_enabled", instead=torch.backends.cuda.math_sdp_enabled)
cudnn_attention_enabled = name(
    "torch._C._get_cudnn_sdp_enabled", instead=torch.backends.cuda.cudnn_sdp_enabled
)
enable_flash_attention = name("torch._C._set_sdp_use_flash", off=RULE)
enable_mem_efficient_attention = name("torch._C._set_sdp_use_mem_efficient", off=RULE)
enable_math_attention = name("torch._C._set_sdp_use_math", off=RULE)
enable_cudnn_attention = name("torch._C._set_sdp_use_cudnn", off=RULE)
enable_overrideable_attention = name("torch._C._set_sdp_use_overrideable", off=RULE)
overrideable_attention_enabled = name("torch._C._get_overrideable_sdp_enabled", off=RULE)
attention_order = name("torch._C._get_sdp_priority_order", off=RULE)
set_attention_order = name("torch._C._set_sdp_priority_order", off=RULE)
onednn_enabled = name("torch._C._get_mkldnn_enabled", instead=lambda: torch.backends.mkldnn.enabled)
cudnn_enabled = name("torch._C._get_cudnn_enabled", instead=lambda: torch.backends.cudnn.enabled)
cublas_tf32 = name("torch._C._get_cublas_allow_tf32", instead=lambda: torch.backends.cuda.matmul.allow_tf32)
select_conv_backend = name("torch._C._select_conv_backend")
conv_memory_format = name("torch._C._conv_determine_backend_memory_format")

# Memory and GPUs --------------------------------------------------------------------------------------------
reinterpret_tensor = name("torch._C._dynamo.guards._reinterpret_tensor")
empty_strided_cpu = name("torch._C._dynamo.guards._empty_strided_cpu", instead=torch.empty_strided)
empty_strided_cuda = name("torch._C._dynamo.guards._empty_strided_cuda", off=GPU)
storage_use_count = name("torch._C._storage_Use_Count")
clear_cublas_workspaces = name("torch._C._cuda_clearCublasWorkspaces", off=GPU)
current_raw_stream = name("torch._C._cuda_getCurrentRawStream", off=GPU)
current_gpu = name("torch._C._cuda_getDevice", off=GPU)
gpu_sleep = name("torch.cuda._sleep", off=GPU)

# Processes that train together ------------------------------------------------------------------------------
resolve_group_name = late("torch.distributed._functional_collectives._resolve_group_name", off=DDP)
group_size_by_name = name("torch.distributed.distributed_c10d._get_group_size_by_name", off=DDP)
group_store = name("torch.distributed.distributed_c10d._get_process_group_store", off=DDP)
first_bucket_bytes = name("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", off=DDP, instead=1 << 20)
active_ddp_module = attribute("torch.nn.parallel.DistributedDataParallel._active_ddp_module", off=DDP)
states_of_modules = late("torch.distributed._composable_state", off=FSDP)
gradient_divide_factors = late(
    "torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors", off=FSDP
)

# The adapter for torch.compile, and its backends here -------------------------------------------------------
dynamo_registry = late("torch._dynamo.backends.registry", off=ADAPTER)
dynamo_trace_rules = late("torch._dynamo.trace_rules", off=ADAPTER)
dynamo_builder = late("torch._dynamo.variables.builder", off=ADAPTER)
ConstantSource = late("torch._dynamo.source.ConstantSource", off=ADAPTER)
inductor_options = late("torch._inductor.list_options", off=ADAPTER)
TracingContext = late("torch._guards.TracingContext", off=ADAPTER)
tracing = late("torch._guards.tracing", off=ADAPTER)
FakeTensorMode = late("torch._subclasses.fake_tensor.FakeTensorMode", off=ADAPTER)
sympy_interp = late("torch.utils._sympy.interp.sympy_interp", off=ADAPTER)
PythonReferenceAnalysis = late("torch.utils._sympy.reference.PythonReferenceAnalysis", off=ADAPTER)


def fx_is_tracing() -> bool:
    """Whether torch.fx traces: a flag of the thread since PyTorch 2.14, of the process before."""
    return bool(_fx_flag() if callable(_fx_flag) else _fx_module._is_fx_tracing_flag)


tell()
