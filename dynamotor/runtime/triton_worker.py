"""A process that turns Triton text into GPU code. Run as a script: it imports triton and the standard
library, no torch.

The script imports what compiling needs, once, and then forks a worker for each socket that it is sent. A
worker reads pickled jobs from its socket and writes pickled answers, each behind its length:

    {"source", "name", "signature", "aligned", "warps", "arch", "debug", "stages", "scratch", ...}
    -> {"cubin", "symbol", ...} or {"error"}
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import pickle
import signal
import socket
import struct
import tempfile
from typing import IO, Any

SCRATCH_ALIGNMENT = 128  # of a kernel's own memory, as the launcher aligns it


def receive(stream: IO[bytes]) -> Any:
    """The next message, or None at the end of the stream."""
    head = stream.read(8)
    return None if len(head) < 8 else pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message."""
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def compile_kernel(job: dict[str, Any]) -> dict[str, Any]:
    """GPU code of one function and what its launch needs."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language.extra import libdevice

    source, name = job["source"], job["name"]
    filename = f"<dynamotor {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope: dict[str, Any] = {
        "triton": triton,
        "tl": tl,
        "libdevice": libdevice,
        "__name__": "dynamotor_kernels",
        "ALIGNED": tl.constexpr(job["aligned"]),
    }
    exec(compile(source, filename, "exec"), scope)
    function = scope[name]
    signature = {
        name: kind.split(":")[0] for name, kind in zip(function.arg_names, job["signature"], strict=True)
    }
    by_16 = [
        n
        for n, kind in enumerate(job["signature"])
        if kind.endswith(":16") or (kind[0] == "*" and job["aligned"])
    ]
    aligned = {(n,): [["tt.divisibility", 16]] for n in by_16}
    # Without contraction each op rounds its result, as in eager, and a value that two kernels calculate is
    # the same in both. Kernels with matrix products keep it: the softmax of attention is faster with it.
    options = {"num_warps": job["warps"], "debug": job["debug"], "sanitize_overflow": False}
    options["enable_fp_fusion"] = "tl.dot" in source
    options |= {"num_stages": job["stages"]} if job["stages"] else {}
    built = triton.compile(
        ASTSource(function, signature, {}, aligned), GPUTarget("cuda", job["arch"], 32), options
    )
    meta = built.metadata
    if (
        meta.global_scratch_size > job["scratch"]
        or meta.global_scratch_align > SCRATCH_ALIGNMENT
        or meta.num_ctas != 1
    ):
        raise RuntimeError("the kernel asks for memory or clusters that the launcher does not give")
    entry = built.asm["ptx"].split(f".entry {meta.name}(", 1)[1].split(")", 1)[0]
    return {
        "cubin": built.asm["cubin"],
        "symbol": meta.name,
        "shared": meta.shared,
        "warps": meta.num_warps,
        "extra": entry.count(".param") - len(signature),
    }


def _load() -> None:
    """Import the modules that the first kernel needs, and let triton not read its own hundreds of megabytes
    for the keys
    of a cache that ends with the worker.
    """
    importlib.import_module("triton.compiler.code_generator")
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):  # where versions of triton have it
        module = importlib.import_module(name)
        if hasattr(module, "triton_key"):
            vars(module)["triton_key"] = lambda: "dynamotor"


def _answer(connection: socket.socket) -> None:
    """Serve compile requests from the socket until its other end is closed."""
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    stream: Any = connection.makefile("rwb")
    with tempfile.TemporaryDirectory(prefix="dynamotor-triton-", dir=room) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        while (job := receive(stream)) is not None:
            try:
                answer = compile_kernel(job)
            except Exception as error:  # whatever triton says goes back as text
                answer = {"error": f"{type(error).__name__}: {error}"}
            send(stream, answer)


def main() -> None:
    """Fork a worker for each socket that comes over standard input, until that is closed."""
    os.dup2(2, 1)  # what triton prints
    with socket.socket(fileno=0) as control:
        os.environ.pop("TRITON_INTERPRET", None)
        with contextlib.suppress(Exception):  # the worker reports a broken triton for each job
            _load()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets workers that have ended
        while fds := socket.recv_fds(control, 1, 1)[1]:
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # triton waits for ptxas
                control.close()  # senders of sockets must learn when the reader is gone
                with contextlib.suppress(OSError), socket.socket(fileno=fds[0]) as connection:
                    _answer(connection)  # a socket that breaks ends the worker
                os._exit(0)
            os.close(fds[0])


if __name__ == "__main__":
    main()
