"""`python -m bench TOOL ...` runs a tool of this folder: size, kernels, gpu_check, gpu_bench, xla_opinfo,
...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run `bench.TOOL` as a program."""
    tools = sorted(
        p.stem for p in Path(__file__).parent.glob("*.py") if 'if __name__ == "__main__"' in p.read_text()
    )
    if len(sys.argv) < 2 or sys.argv[1] not in tools or sys.argv[1] == "__main__":
        sys.exit("usage: python -m bench TOOL ...; tools: " + ", ".join(t for t in tools if t != "__main__"))
    del sys.argv[0]
    runpy.run_module(f"bench.{sys.argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
