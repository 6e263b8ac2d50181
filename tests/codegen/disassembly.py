"""The instructions of built GPU code, by the disassembler that comes with Triton."""

import subprocess
import tempfile
from pathlib import Path


def sass(cubin):
    """The text of all functions."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(tool), "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
