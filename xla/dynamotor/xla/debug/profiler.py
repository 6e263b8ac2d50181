"""Profiles for TensorBoard and Perfetto, taken by jax's profiler.

>>> import dynamotor.xla.debug.profiler as xp
>>> server = xp.start_server(9012)
>>> with xp.StepTrace("train_step", step_num=step):
...     train(batch)
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import jax

from dynamotor.extension_api import XlaError

from ..core import xla_model as xm

_servers: dict[int, object] = {}


def start_server(port: int, only_on_master: bool = True) -> object | None:
    """Start a profiler server on a port, for TensorBoard or `trace`; returns it, or None where another
    replica has it.

    only_on_master: only on each host's master ordinal. DM667 where the port is taken or invalid.
    """
    if only_on_master and not xm.is_master_ordinal():
        return None
    if port in _servers:
        return _servers[port]
    try:
        server = _servers[port] = jax.profiler.start_server(port)
    except (ValueError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        cure = "use a free port, and one server a process"
        raise XlaError("DM667", f"no profiler server on port {port}", why=str(error), cure=cure) from error
    return server


def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """Profile programs behind a profiler server; blocks until the profile is in `logdir`.

    service_addr: "HOST:PORT"; a server of this process is profiled directly, others through jax's collector
    (needs `pip install xprof`). duration_ms: how long. num_tracing_attempts, interval_s, timeout_s: tries,
    seconds between them, seconds for one. host_tracer_level: 1 critical events, 2 more, 3 all.
    device_tracer_level: 1 with the device, 0 without. delay_ms: wait before.
    """
    time.sleep(delay_ms / 1e3)
    host, _, port = service_addr.removeprefix("grpc://").rpartition(":")
    if host in ("localhost", "127.0.0.1", "") and int(port) in _servers:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level, options.device_tracer_level = host_tracer_level, device_tracer_level
        with jax.profiler.trace(logdir, profiler_options=options):
            time.sleep(duration_ms / 1e3)
        return
    command = [
        sys.executable,
        "-m",
        "jax.collect_profile",
        port,
        str(duration_ms),
        "--host",
        host,
        "--log_dir",
        logdir,
        "--no_perfetto_link",
        "--host_tracer_level",
        str(host_tracer_level),
        "--device_tracer_level",
        str(device_tracer_level),
    ]
    reason = ""
    for attempt in range(num_tracing_attempts):
        time.sleep(interval_s if attempt else 0)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=duration_ms / 1e3 + timeout_s
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer within {timeout_s} s"
            continue
        if done.returncode == 0:
            return
        reason = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        if "xprof" in reason or "tensorflow" in reason.lower():
            break
    raise XlaError(
        "DM667",
        f"{service_addr} could not be profiled",
        why=reason,
        cure="pip install xprof; check address and port",
    )


def trace_detached(*args: Any, **kwargs: Any) -> threading.Thread:
    """`trace` on a thread; returns it, already running."""
    thread = threading.Thread(target=trace, args=args, kwargs=kwargs, name="xla profile")
    thread.start()
    return thread


def start_trace(log_dir: str) -> None:
    """Start profiling this process; `stop_trace` ends it."""
    jax.profiler.start_trace(log_dir)


def stop_trace() -> None:
    """End `start_trace` and write the profile to its folder."""
    jax.profiler.stop_trace()


class Trace(jax.profiler.TraceAnnotation):
    """A named block in the profile: `with xp.Trace("forward"): ...`. Keyword arguments become its
    metadata.
    """


class StepTrace(jax.profiler.StepTraceAnnotation):
    """A named training step in the profile, `step_num` its number; ends with `xm.mark_step()`."""

    def __exit__(self, *exc: Any) -> None:
        xm.mark_step()
        super().__exit__(*exc)


def trace_me(scope: str) -> Any:
    """A decorator: each call of the function is a named block in the profile."""
    return lambda function: jax.profiler.annotate_function(function, name=scope)
