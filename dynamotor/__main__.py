"""The command line: `python -m dynamotor COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import __version__
from .base.errors import DynamotorError, UsageError
from .tools import cache_command, doctor, minify, package, ranks, run

COMMANDS = (
    ("cache", cache_command, "show, prune and verify the disk cache"),
    ("package", package, "list the contents of a package of `dynamotor.export`"),
    ("doctor", doctor, "what this machine has and whether a small compile works"),
    ("ranks", ranks, "the event streams of a program's ranks side by side, and as one file for Perfetto"),
    ("minify", minify, "from a program that fails to a small script that fails in the same way"),
    (
        "run",
        run,
        "a program, as it is, with dynamotor.xla as its torch_xla or dynamotor.compile as its torch.compile",
    ),
)
# Programs of the development package `bench`: they run in a process of their own, `python -m bench TOOL`.
PROGRAMS = {
    "demo": ("demo", "train digits, compile BERT and resnet18, print one table"),
    "bench": ("command", "models x phases x compilers, first call and steady state"),
    "ddp-plan": ("ddp_plan", "the gradient buckets of a model and a simulated step of many ranks"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 on success."""
    given = sys.argv[1:] if argv is None else argv
    try:
        if given and given[0] in PROGRAMS:
            return run_program(PROGRAMS[given[0]][0], given[1:])
        return _run_command(given)
    except DynamotorError as error:
        print(error, file=sys.stderr)
        return 2


def run_program(tool: str, arguments: list[str], root: Path = Path(__file__).parents[1]) -> int:
    """Run a program of the clone's folder `bench`; UsageError DM122 where there is none."""
    if not (root / "bench" / "__main__.py").is_file():
        raise UsageError(
            "DM122",
            "the benchmarks and their models are not installed",
            why=f"they are the folder `bench` of the repository, which no wheel holds; {root} has none",
            cure="clone the repository, `pip install -e .` there, and give the command again",
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: a `bench` in the current folder does not hide this one.
    command = [sys.executable, "-P", "-m", "bench", tool, *arguments]
    return subprocess.call(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def _run_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dynamotor", description="A compiler for PyTorch that you can read."
    )
    parser.add_argument("--version", action="version", version=f"dynamotor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)
    for name, module, text in COMMANDS:
        sub = commands.add_parser(
            name, help=text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.main)
    args, rest = parser.parse_known_args(argv)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
