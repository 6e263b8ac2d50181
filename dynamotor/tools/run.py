"""Runs a Python program as `python script.py args...` would. With `--torch-xla`, `import torch_xla` in it
means `dynamotor.xla`; with `--replace-torch-compile`, its calls of `torch.compile` mean `dynamotor.compile`.

    python -m dynamotor run --torch-xla train.py --epochs 2
    python -m dynamotor run --replace-torch-compile train.py --epochs 2
    torchrun --nproc-per-node 2 -m dynamotor run --torch-xla train.py
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path

from ..base.errors import UsageError
from ..base.extensions import RUN, MissingExtension, provided
from .replace import replace_torch_compile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m dynamotor run`."""
    parser.add_argument(
        "--torch-xla", action="store_true", help="let `import torch_xla` mean `dynamotor.xla`"
    )
    parser.add_argument(
        "--replace-torch-compile", action="store_true", help="let `torch.compile` mean `dynamotor.compile`"
    )
    parser.add_argument("script", help="the program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the program in this process. DM108 where there is no such file; its own exceptions and exit status
    pass through.
    """
    script = Path(args.script)
    UsageError.when(
        not script.is_file(),
        "DM108",
        f"there is no program {args.script}",
        cure="give the path of a Python file",
    )
    sys.argv = [args.script, *args.args]
    sys.path[0] = str(script.resolve().parent)
    if args.torch_xla:
        install = provided(RUN, "torch-xla")
        if install is None:
            raise MissingExtension("--torch-xla")
        install()
    with replace_torch_compile() if args.replace_torch_compile else contextlib.nullcontext():
        runpy.run_path(args.script, run_name="__main__")
    return 0
