"""Writes docs/xla-api.md: where each entry of torch_xla's API is, with one line about it. The rows below are
the list of entries.

python -m bench.xla_api           # write the file
python -m bench.xla_api --check   # only say whether it is up to date
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from bench import xla_tests
from bench.tool import read_json

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "xla-api.md"
RESULTS = DOCUMENT.with_name("results") / "xla-tests.json"


class Entry(NamedTuple):
    """`name` below `torch_xla`, and the parameters that users rely on ("" for other objects than functions; None: not
    fixed).
    """

    name: str
    parameters: str | None = None


# The documented API: names, parameters and defaults as its documentation gives them.
DOCUMENTED = [
    Entry("core.xla_model.xla_device", "n=None, devkind=None"),
    Entry("core.xla_model.get_xla_supported_devices", "devkind=None, max_devices=None"),
    Entry("core.xla_model.xla_device_hw", "device"),
    Entry("core.xla_model.get_ordinal", "defval=0"),
    Entry("core.xla_model.get_local_ordinal", "defval=0"),
    Entry("core.xla_model.is_master_ordinal", "local=True"),
    Entry("core.xla_model.xrt_world_size", "defval=1"),
    Entry("core.xla_model.all_reduce", "reduce_type, inputs, scale=1.0, groups=None, cctx=None"),
    Entry("core.xla_model.all_gather", "value, dim=0, groups=None"),
    Entry("core.xla_model.all_to_all", "value, split_dimension, concat_dimension, split_count, groups=None"),
    Entry("core.xla_model.add_step_closure", "closure, args=(), run_async=False"),
    Entry("core.xla_model.wait_device_ops", "devices=[]"),
    Entry("core.xla_model.optimizer_step", "optimizer, barrier=False, optimizer_args={}, groups=None"),
    Entry("core.xla_model.mark_step"),
    Entry("core.xla_model.save", "data, file_or_path, master_only=True, global_master=False"),
    Entry("core.xla_model.rendezvous", "tag, payload=b'', replicas=[]"),
    Entry("core.xla_model.do_on_ordinals", "target, data=(), ordinals=(0,)"),
    Entry("core.xla_model.mesh_reduce", "tag, data, reduce_fn"),
    Entry("core.xla_model.set_rng_state", "seed, device=None"),
    Entry("core.xla_model.get_rng_state", "device=None"),
    Entry("core.xla_model.get_memory_info", "device"),
    *(Entry(f"core.xla_model.REDUCE_{kind}", "") for kind in ("SUM", "MUL", "AND", "OR", "MIN", "MAX")),
    Entry("core.functions.all_reduce", "reduce_type, value, scale=1.0, groups=None"),
    Entry("core.functions.all_gather", "value, dim=0"),
    Entry("core.functions.nms", "boxes, scores, score_threshold, iou_threshold, output_size"),
    Entry(
        "distributed.parallel_loader.ParallelLoader",
        "loader, devices, batchdim=0, batches_per_execution=1, loader_prefetch_size=8, device_prefetch_size=4",
    ),
    Entry("distributed.parallel_loader.ParallelLoader.per_device_loader", "device"),
    Entry("distributed.parallel_loader.MpDeviceLoader"),
    Entry(
        "distributed.xla_multiprocessing.spawn",
        "fn, args=(), nprocs=None, join=True, daemon=False, start_method='spawn'",
    ),
    Entry("distributed.xla_multiprocessing.MpModelWrapper", "model"),
    Entry("distributed.xla_multiprocessing.MpModelWrapper.to", "device"),
    Entry("distributed.xla_multiprocessing.MpSerialExecutor", ""),
    Entry("distributed.xla_multiprocessing.MpSerialExecutor.run", "fn"),
    Entry(
        "utils.tf_record_reader.TfRecordReader", "path, compression='', buffer_size=16777216, transforms=None"
    ),
    Entry("utils.tf_record_reader.TfRecordReader.read_record", ""),
    Entry("utils.tf_record_reader.TfRecordReader.read_example", ""),
    Entry("utils.utils.SampleGenerator", "data, sample_count"),
    Entry("utils.utils.DataWrapper", ""),
    Entry("utils.serialization.save", "data, path, master_only=True, global_master=False"),
    Entry("utils.serialization.load", "path"),
    Entry("utils.gcsfs.open", "path, mode='r', encoding=None"),
    Entry("utils.gcsfs.list", "path"),
    Entry("utils.gcsfs.stat", "path"),
    Entry("utils.gcsfs.remove", "path"),
    Entry("utils.gcsfs.rmtree", "path"),
    Entry("utils.gcsfs.read", "path"),
    Entry("utils.gcsfs.write", "path, content"),
    Entry("utils.gcsfs.generic_open", "path, mode='r', encoding=None"),
    Entry("utils.gcsfs.generic_read", "path"),
    Entry("utils.gcsfs.generic_write", "output_string, path, makedirs=False"),
    Entry("utils.gcsfs.is_gcs_path", "path"),
    Entry("utils.cached_dataset.CachedDataset", "data_set, path, max_files_per_folder=1000, compress=True"),
    Entry("utils.cached_dataset.CachedDataset.warmup", ""),
]

# What programs of later versions use besides.
LATER = [
    Entry("backends.set_mat_mul_precision", "precision"),
    Entry("backends.get_mat_mul_precision", ""),
    Entry("core.xla_builder.call_jax", "jax_func, args, kwargs=None, override_name=None"),
    Entry("core.xla_builder.Op"),
    Entry("core.xla_builder.create_computation", "name, fn, shapes"),
    Entry("core.xla_builder.xla_computation_as_func", "computation"),
    Entry("core.xla_builder.get_computation_hlo", "computation"),
    Entry("core.xla_builder.create_placeholder_tensor", "shape, dtype"),
    Entry("core.xla_builder.dot_general", "lhs, rhs, dimension_numbers"),
    Entry("core.xla_op_registry.register", "name, opfn"),
    Entry("experimental.scan.tree_flatten_none", "pytree"),
    Entry("experimental.xla_quantized_matmul.quantized_matmul", "x, w, scaler, zero_point=None"),
    Entry("experimental.xla_quantized_matmul.XlaQuantizedLinear", "input_dim, output_dim"),
    Entry("core.xla_model.ToXlaTensorArena"),
    Entry("core.xla_model.optimization_barrier_", "tensors"),
    Entry("core.xla_model.all_gather_bucketized", "input_list, dim=0, groups=None"),
    Entry(
        "core.xla_model.reduce_scatter_bucketized",
        "reduce_type, input_list, scale, scatter_dim, shard_count, groups=None",
    ),
    Entry("core.xla_model.xla_device_kind", "device=None"),
    Entry("debug.model_comparator.configure", "save_dir"),
    Entry("debug.model_comparator.save", "name, tensor, step=None"),
    Entry("debug.model_comparator.compare", "dir1, dir2, rtol=1e-05, atol=1e-08"),
    Entry("debug.profiler.trace_me", "scope"),
    Entry("distributed.data_parallel.DataParallel", "network, device_ids=None"),
    Entry(
        "distributed.fsdp.consolidate_sharded_model_checkpoints",
        "ckpt_prefix, ckpt_suffix='_rank-*-of-*.pth', save_path=''",
    ),
    Entry("distributed.spmd.api.xla_distribute_tensor", "tensor, device_mesh, placements=None"),
    Entry("distributed.spmd.api.xla_distribute_module", "module, device_mesh=None, partition_fn=None"),
    Entry("experimental.assume_pure.assume_pure", "fn"),
    Entry("experimental.assume_pure.PureModule", "module"),
    Entry("experimental.assume_pure.j2t_autograd", "fn"),
    Entry("experimental.callback.on_ready_callback", "tensor, callback"),
    Entry("experimental.callback.on_ready_event", "tensor"),
    Entry(
        "experimental.custom_kernel.flash_attention",
        "q, k, v, causal=False, q_segment_ids=None, kv_segment_ids=None, sm_scale=1.0",
    ),
    Entry("experimental.custom_kernel.paged_attention", "q, k_pages, v_pages, lengths, page_indices"),
    Entry(
        "experimental.custom_kernel.multi_queries_paged_attention",
        "q, k_pages, v_pages, lengths, page_indices, effective_q_lens",
    ),
    Entry(
        "experimental.custom_kernel.ragged_paged_attention",
        "q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs",
    ),
    Entry("experimental.custom_kernel.gmm", "lhs, rhs, group_sizes"),
    Entry("experimental.custom_kernel.tgmm", "lhs, rhs, group_sizes"),
    Entry("experimental.custom_kernel.make_kernel_from_pallas", "kernel, output_shape_dtype_fn"),
    Entry("experimental.plugins.DevicePlugin"),
    Entry("experimental.plugins.register_plugin", "name, device_plugin"),
    Entry("experimental.plugins.default", ""),
    Entry("utils.closures.AsyncClosureHandler"),
    Entry("utils.keyd_queue.Queue"),
    Entry("utils.keyd_queue.KeydQueue"),
    Entry("core.functions.SyncBatchNorm"),
    Entry("distributed.fsdp.XlaFullyShardedDataParallel", "module"),
    Entry("distributed.fsdp.consolidate_sharded_state_dicts", "checkpoints"),
    Entry("distributed.fsdp.checkpoint_module", "module"),
    Entry("distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer", "params, optimizer_class"),
    Entry("experimental.distributed_checkpoint.SPMDSavePlanner"),
    Entry("experimental.distributed_checkpoint.SPMDLoadPlanner"),
    Entry("experimental.distributed_checkpoint.CheckpointManager", "path, save_interval, max_to_keep=0"),
    Entry("experimental.distributed_checkpoint.prime_optimizer", "optimizer"),
    Entry("distributed.spmd.HybridMesh"),
    Entry("distributed.spmd.mark_sharding_with_gradients", "t, mesh, partition_spec"),
    Entry("distributed.spmd.wrap_as_sharded_tensor", "t, mesh_shape=None, partition_spec=None"),
    Entry("distributed.spmd.annotate_custom_sharding", "t, mesh, partition_spec"),
    Entry("distributed.spmd.shard_as", "a, b"),
    Entry("distributed.spmd.unwrap_sharded_tensor", "t"),
    Entry("distributed.spmd.debugging.visualize_tensor_sharding", "t"),
    Entry("experimental.fori_loop.while_loop", "cond_fn, body_fn, carried_inputs, additional_inputs=()"),
    Entry("experimental.fori_loop.fori_loop", "lower, upper, body_fun, init_val"),
    Entry("experimental.spmd_fully_sharded_data_parallel.SpmdFullyShardedDataParallel", "module"),
    Entry("utils.checkpoint.checkpoint", "function, *args"),
    Entry("utils.dlpack.to_dlpack", "xla_tensor"),
    Entry("utils.dlpack.from_dlpack", "ext_data"),
    Entry("device", "index=None"),
    Entry("devices", ""),
    Entry("device_count", ""),
    Entry("real_devices", ""),
    Entry("sync", "wait=False, reset_scope=True"),
    Entry("step", ""),
    Entry("compile", "f=None, full_graph=False, name=None, max_different_graphs=None"),
    Entry("manual_seed", "seed, device=None"),
    Entry("launch", "fn, args=(), start_method='spawn', debug_single_process=False"),
    Entry("initialize_cache", "path, readonly=False"),
    Entry(
        "core.xla_model.reduce_scatter", "reduce_type, input, scale, scatter_dim, shard_count, groups=None"
    ),
    Entry("core.xla_model.collective_permute", "value, pairs"),
    Entry("core.xla_model.collective_broadcast", "tensors, root_ordinal=0, groups=None"),
    Entry("core.xla_model.all_reduce_bucketized_gradients"),
    Entry("core.xla_model.broadcast_master_param", "model"),
    Entry("core.xla_model.reduce_gradients", "optimizer, groups=None"),
    Entry("core.xla_model.send_cpu_data_to_device", "datas, device, input_sharding=None"),
    Entry("core.xla_model.fork_rng", "device=None, enabled=True"),
    Entry("core.xla_model.master_print"),
    Entry("core.xla_model.xla_real_devices", "devices=None"),
    Entry("core.xla_model.is_xla_tensor", "tensor"),
    Entry("core.xla_model.unlazy", "tensors"),
    Entry("core.xla_model.get_stablehlo", "tensors=None"),
    Entry("core.xla_model.get_stablehlo_bytecode", "tensors=None"),
    Entry("core.xla_model.RateTracker", "smooth_factor=None"),
    Entry("runtime.device_type", ""),
    Entry("runtime.world_size", ""),
    Entry("runtime.global_ordinal", ""),
    Entry("runtime.local_ordinal", ""),
    Entry("runtime.process_index", ""),
    Entry("runtime.process_count", ""),
    Entry("runtime.local_process_count", ""),
    Entry("runtime.host_index", ""),
    Entry("runtime.addressable_device_count", ""),
    Entry("runtime.local_device_count", ""),
    Entry("runtime.global_device_count", ""),
    Entry("runtime.addressable_runtime_device_count", ""),
    Entry("runtime.global_runtime_device_count", ""),
    Entry("runtime.global_runtime_device_attributes", ""),
    Entry("runtime.is_bf16_supported", ""),
    Entry("runtime.is_spmd", ""),
    Entry("runtime.get_master_ip", ""),
    Entry("runtime.using_pjrt", ""),
    Entry("runtime.get_num_cached_compilation_graph", ""),
    Entry("runtime.set_device_type", "pjrt_device"),
    Entry("runtime.xla_device", "n=None, devkind=None"),
    Entry("runtime.runtime_device_attributes", "device"),
    Entry("runtime.use_spmd", "auto=False"),
    Entry("runtime.initialize_cache", "path, readonly=False"),
    Entry("distributed.spmd.Mesh", "device_ids, mesh_shape, axis_names=None"),
    Entry("distributed.spmd.mark_sharding", "t, mesh, partition_spec"),
    Entry("distributed.spmd.clear_sharding", "t"),
    Entry("distributed.spmd.set_global_mesh", "mesh"),
    Entry("distributed.spmd.get_global_mesh", ""),
    Entry("distributed.spmd.get_1d_mesh", "axis_name=None"),
    Entry("distributed.spmd.ShardingSpec", "mesh, partition_spec, minibatch=False"),
    Entry("distributed.spmd.XLAShardedTensor"),
    Entry("distributed.xla_backend.XlaProcessGroup"),
    Entry("debug.metrics.counter_names", ""),
    Entry("debug.metrics.counter_value", "name"),
    Entry("debug.metrics.metric_names", ""),
    Entry("debug.metrics.metric_data", "name"),
    Entry("debug.metrics.clear_counters", ""),
    Entry("debug.metrics.clear_metrics", ""),
    Entry("debug.metrics.clear_all", ""),
    Entry("debug.metrics.metrics_report", ""),
    Entry("debug.metrics.short_metrics_report", "counter_names=None, metric_names=None"),
    Entry("debug.metrics.executed_fallback_ops", ""),
    Entry("debug.profiler.start_server", "port, only_on_master=True"),
    Entry(
        "debug.profiler.trace",
        "service_addr, logdir, duration_ms=1000, num_tracing_attempts=3, host_tracer_level=2, device_tracer_level=1, delay_ms=0,"
        " timeout_s=120, interval_s=5",
    ),
    Entry("debug.profiler.trace_detached"),
    Entry("debug.profiler.start_trace", "log_dir"),
    Entry("debug.profiler.stop_trace", ""),
    Entry("debug.profiler.Trace"),
    Entry("debug.profiler.StepTrace"),
    Entry("debug.analysis.collect", ""),
    Entry("debug.analysis.start", "file=None"),
    Entry("amp.autocast", "device, enabled=True, dtype=None, cache_enabled=True"),
    Entry("amp.GradScaler"),
    Entry("amp.syncfree.SGD"),
    Entry("amp.syncfree.Adam"),
    Entry("amp.syncfree.AdamW"),
    Entry("experimental.eager_mode", "enable"),
    Entry("experimental.is_eager_mode", ""),
    Entry("experimental.eager_mode_context", "enable"),
    Entry("experimental.scan.scan", "fn, init, xs, partition_fn=None"),
    Entry(
        "experimental.gradient_accumulation.gradient_accumulation",
        "train_step, iterable_tensors, model, carried_tensors=None",
    ),
    Entry(
        "experimental.scan_layers.scan_layers", "layers, input_data, partition_fn=None, is_layer_pure=False"
    ),
    Entry("stablehlo.exported_program_to_stablehlo", "exported_model, options=None"),
    Entry("stablehlo.save_as_stablehlo", "exported_model, stablehlo_dir, options=None"),
    Entry("stablehlo.save_torch_model_as_stablehlo", "torchmodel, args, path, options=None"),
    Entry("stablehlo.StableHLOExportOptions"),
    Entry("stablehlo.StableHLOGraphModule"),
    Entry("stablehlo.StableHLOGraphModule.load", "directory_path"),
    Entry("stablehlo.StableHLOGraphModule.save", "directory_path, options=None"),
]

# What torch_xla's own tests import beside all this, and why there is none of it.
MISSING = [
    (
        "`experimental.scan.value_and_grad_partitioned`",
        "a part of torch_xla's `scan`; here `jax.lax.scan` is its own way",
    ),
    (
        "`experimental.mark_pattern_utils`, `xla_marker`, `stablehlo_custom_call`, `xla_mlir_debuginfo`",
        "they put marks into StableHLO, which jax makes of whole functions (`jax.lax.composite`), not of a recorded graph",
    ),
    (
        "`experimental.unbounded_dynamism_export`, `xla_dynamic_reshape_ops`",
        "exported sizes are jax's symbols, no others",
    ),
    ("`tf_saved_model_integration`, `utils.stablehlo_test_utils`", "they need TensorFlow"),
    (
        "`experimental.quantized`, `custom_kernel.quantized_matmul_int8`",
        "not written; the product of the dequantized weight is the same",
    ),
    (
        "`experimental.splash_attention`, `pallas_kernels`",
        "jax has them (`jax.experimental.pallas.ops.tpu`): call them by `make_kernel_from_pallas`",
    ),
    (
        "`core.xla_builder.create_builder`, `mkop`, `mkparam`",
        "jax traces functions; there are no open graphs",
    ),
    (
        "`debug.frame_parser_util`, `graph_saver`, `metrics_compare_utils`, `metrics_saver`",
        "they read files of torch_xla's own debug modes",
    ),
    ("`distributed.fsdp.xla_flatten_params_wrapper`", "parameters are divided one by one"),
    ("`_internal.neuron`, `xpu`", "devices that jax has no library for here"),
    (
        "`_XLAC._xla_get_tensors_handle`, `_run_cached_graph` and other handles",
        "parts of torch_xla's own bridge",
    ),
]


def find(entry: Entry) -> Any:
    """The object of an entry. AttributeError or ImportError where it is missing."""
    parts = ["dynamotor", "xla", *entry.name.split(".")]
    for cut in range(len(parts), 1, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not ".".join(parts).startswith(error.name):
                raise
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return getattr(found, "_called_as", found)
    raise ImportError(entry.name)


def problem(entry: Entry) -> str | None:
    """The fault of an entry, or None: missing, other parameters, no docstring, or a stub."""
    try:
        found = find(entry)
    except (AttributeError, ImportError) as error:
        return f"missing ({error})"
    if not callable(found):
        return None if isinstance(found, (str, int)) else "is no function, class or constant"
    if not inspect.getdoc(found) or (inspect.isclass(found) and not found.__doc__):
        return "has no docstring"
    if is_stub(found):
        return "is a stub"
    return None if entry.parameters is None else wrong_parameters(found, entry.parameters)


def wrong_parameters(found: Any, wanted: str) -> str | None:
    """How a function's parameters differ from those that users rely on; more parameters and more defaults are
    allowed.
    """
    expected = list(inspect.signature(eval(f"lambda {wanted}: None")).parameters.values())  # noqa: S307 - the rows above
    actual = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    for index, parameter in enumerate(expected):
        if index >= len(actual) or actual[index].name != parameter.name:
            return f"parameter {index} is {actual[index].name if index < len(actual) else 'absent'}, not {parameter.name}"
        if parameter.default is not parameter.empty and _plain(actual[index].default) != _plain(
            parameter.default
        ):
            return f"the default of {parameter.name} is {actual[index].default!r}, not {parameter.default!r}"
    rest = [
        p.name
        for p in actual[len(expected) :]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return f"further parameters without defaults: {rest}" if rest else None


def _plain(default: Any) -> Any:
    """Empty containers are one and the same default, None or not: none of them is ever changed."""
    return (
        ()
        if default is None or default in ([], {}, ()) and not isinstance(default, (str, bytes))
        else default
    )


def is_stub(found: Any) -> bool:
    """Whether a function only raises or passes; a class, whether all of its own methods do."""
    if inspect.isclass(found):
        own: list[Any] = [f for f in vars(found).values() if inspect.isfunction(f)]
        own += [f.__func__ for f in vars(found).values() if isinstance(f, (classmethod, staticmethod))]
        return bool(own) and all(is_stub(f) for f in own)
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(found)))
    except (TypeError, OSError):
        return False
    (definition,) = ast.parse(source).body
    statements = definition.body  # type: ignore[attr-defined]
    body = [s for s in statements if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(isinstance(statement, (ast.Pass, ast.Raise)) for statement in body)


def document() -> str:
    """The text of docs/xla-api.md."""
    lines = [
        "# The API of torch_xla in dynamotor",
        "",
        "Written by `python -m bench.xla_api` from the docstrings. After `dynamotor.xla.install_as_torch_xla()`, or",
        "under `python -m dynamotor run --torch-xla program.py`, every name stands below `torch_xla` as well as below",
        "`dynamotor.xla`.",
    ]
    for title, entries in (("The documented API", DOCUMENTED), ("What later versions added", LATER)):
        lines += ["", f"## {title}", "", "| entry | where | what |", "|---|---|---|"]
        lines += [_row(entry) for entry in entries]
    lines += ["", "## What is missing", "", "| entry | why |", "|---|---|"]
    lines += [f"| {names} | {why} |" for names, why in MISSING]
    lines += ["", *xla_tests.section(read_json(RESULTS))]
    return "\n".join(lines) + "\n"


def _row(entry: Entry) -> str:
    found = find(entry)
    if not callable(found):
        where = _file("dynamotor.xla." + entry.name.rpartition(".")[0])
        return f"| `torch_xla.{entry.name}` | `{where}` | the constant `{found!r}` |"
    code = inspect.unwrap(found)
    where = _file(getattr(code, "__module__", ""))
    summary = (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    call = "" if entry.parameters is None else f"({entry.parameters})"
    return f"| `torch_xla.{entry.name}{call}` | `{where}` | {summary} |"


def _file(module: str) -> str:
    """A module's file, from the repository's root."""
    path = module.replace("dynamotor.xla", "xla.dynamotor.xla", 1).replace(".", "/")
    return f"{path}/__init__.py" if (DOCUMENT.parents[1] / path).is_dir() else f"{path}.py"


def main(argv: list[str] | None = None) -> int:
    """Write or check the document; the exit status is 1 where it is not up to date or an entry has a
    problem.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.xla_api", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say whether the file is up to date"
    )
    args = parser.parse_args(argv)
    problems = [
        f"torch_xla.{entry.name}: {found}" for entry in DOCUMENTED + LATER if (found := problem(entry))
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    if problems:
        return 1
    text = document()
    if args.check:
        same = DOCUMENT.read_text() == text
        print(
            "docs/xla-api.md is up to date"
            if same
            else "docs/xla-api.md is out of date: python -m bench.xla_api"
        )
        return 0 if same else 1
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
