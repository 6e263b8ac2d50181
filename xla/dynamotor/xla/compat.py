"""Every private PyTorch name that dynamotor-xla uses, one row each; other files take them from here.

The rules are those of `dynamotor/base/compat.py`, the table of the core. A missing name turns the device off.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from dynamotor.extension_api import probe

XLA = probe.Capability("xla", "the device xla and its backends cannot be used")
_name = functools.partial(probe.name, off=XLA)

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload, OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec
else:
    OpOverload = _name("torch._ops.OpOverload", instead=type(torch.ops.aten.relu.default))
    OpOverloadPacket = _name("torch._ops.OpOverloadPacket", instead=type(torch.ops.aten.relu))
    TorchDispatchMode = _name("torch.utils._python_dispatch.TorchDispatchMode")
    TreeSpec = _name("torch.utils._pytree.TreeSpec")

# Trees of containers ----------------------------------------------------------------------------------------
tree_flatten = _name("torch.utils._pytree.tree_flatten")
tree_unflatten = _name("torch.utils._pytree.tree_unflatten")
tree_leaves = _name("torch.utils._pytree.tree_leaves")
tree_map = _name("torch.utils._pytree.tree_map")
tree_map_only = _name("torch.utils._pytree.tree_map_only")
tree_structure = _name("torch.utils._pytree.tree_structure")
treespec_dumps = _name("torch.utils._pytree.treespec_dumps")
treespec_loads = _name("torch.utils._pytree.treespec_loads")

# Dispatch ---------------------------------------------------------------------------------------------------
TensorBase = _name("torch._C.TensorBase", instead=torch.Tensor.__mro__[1])
make_wrapper_subclass = _name("torch.Tensor._make_wrapper_subclass")
disabled_torch_function = _name("torch._C._disabled_torch_function_impl")
BelowViews = _name("torch._C._AutoDispatchBelowADInplaceOrView")
ExcludeDispatchKeys = _name("torch._C._ExcludeDispatchKeyGuard")
ForceDispatchKeys = _name("torch._C._ForceDispatchKeyGuard")
DispatchKeySet = _name("torch._C.DispatchKeySet")
composite_explicit = _name("torch._C.DispatchKey.CompositeExplicitAutograd")
conjugate_key = _name("torch._C.DispatchKey.Conjugate")
negative_key = _name("torch._C.DispatchKey.Negative")
has_kernel = _name("torch._C._dispatch_has_kernel_for_dispatch_key")
included_keys = _name("torch._C._dispatch_tls_local_include_set")
excluded_keys = _name("torch._C._dispatch_tls_local_exclude_set")
parse_key_name = _name("torch._C._parse_dispatch_key")
decomposition_table = _name("torch._decomp.decomposition_table")
suggest_memory_format = _name("torch._prims_common.suggest_memory_format")

recorded_nodes = _name("torch.autograd._get_sequence_nr", instead=lambda: 1)  # of the graphs of this thread

# Settings ---------------------------------------------------------------------------------------------------
matmul_precision = _name("torch._C._get_float32_matmul_precision", instead=torch.get_float32_matmul_precision)
cudnn_tf32 = _name("torch._C._get_cudnn_allow_tf32", instead=lambda: torch.backends.cudnn.allow_tf32)
cxx11_abi = _name("torch._C._GLIBCXX_USE_CXX11_ABI", instead=True)

# The device, its random numbers, and tensors in files -------------------------------------------------------
DeviceGuard = _name("torch._C._acc.DeviceGuard")
register_device_guard = _name("torch._C._acc.register_python_privateuseone_device_guard")
register_device_module = _name("torch._register_device_module")
DeviceType = _name("torch._C._autograd.DeviceType")
device_seeder = probe.attribute("torch.random._seed_custom_device", off=XLA)
rebuild_tensor_type = _name("torch._tensor._rebuild_from_type_v2")
rebuild_parameter = _name("torch._utils._rebuild_parameter")
rebuild_parameter_with_state = _name("torch._utils._rebuild_parameter_with_state")
rebuild_device_tensor = _name("torch._utils._rebuild_device_tensor_from_cpu_tensor")
tensor_metadata_setter = probe.attribute("torch._utils.set_tensor_metadata", off=XLA)

# Modules and processes --------------------------------------------------------------------------------------
module_apply = _name("torch.nn.Module._apply")
BatchNorm = _name("torch.nn.modules.batchnorm._BatchNorm", instead=torch.nn.BatchNorm1d.__mro__[1])
resolve_group = probe.late("torch.distributed.distributed_c10d._resolve_process_group", off=XLA)
dtensor_spec = probe.late("torch.distributed.tensor._dtensor_spec.DTensorSpec", off=XLA)
dtensor_meta = probe.late("torch.distributed.tensor._dtensor_spec.TensorMeta", off=XLA)
work_from_future = probe.late("torch._C._distributed_c10d._create_work_from_future", off=XLA)


def require_names() -> None:
    """Raise DM150 where this PyTorch lacks a name that the device needs."""
    probe.require(XLA)


probe.tell()
