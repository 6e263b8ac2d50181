"""The command line: `python -m dynamotor COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import argparse
import sys

from . import __version__
from .base import checkout
from .base.errors import DynamotorError, UsageError
from .tools import cache_command, doctor, minify, package, run


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 on success."""
    parser = argparse.ArgumentParser(
        prog="dynamotor", description="A compiler for PyTorch that you can read."
    )
    parser.add_argument("--version", action="version", version=f"dynamotor {__version__}")
    given = sys.argv[1:] if argv is None else argv
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, text in (
        ("demo", "demo", "train digits, compile BERT and resnet18, print one table"),
        ("bench", "command", "models x phases x compilers, first call and steady state"),
        ("cache", cache_command, "show, prune and verify the disk cache"),
        ("package", package, "list the contents of a package of `dynamotor.export`"),
        ("doctor", doctor, "what this machine has and whether a small compile works"),
        ("ddp-plan", "ddp_plan", "the gradient buckets of a model and a simulated step of many ranks"),
        ("minify", minify, "from a program that fails to a small script that fails in the same way"),
        (
            "run",
            run,
            "a program, as it is, with dynamotor.xla as its torch_xla "
            "or dynamotor.compile as its torch.compile",
        ),
    ):
        if (
            isinstance(module, str) and name not in given
        ):  # the folder `bench` is loaded for its commands alone
            commands.add_parser(name, help=text, add_help=False)
            continue
        if isinstance(module, str):
            try:
                module = checkout.bench(module)
            except UsageError as missing:  # said where the command is asked for
                commands.add_parser(name, help=text, add_help=False).set_defaults(run=missing)
                continue
        sub = commands.add_parser(
            name, help=text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.main)
    args, rest = parser.parse_known_args(argv)
    try:
        if isinstance(args.run, UsageError):
            raise args.run
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return args.run(args)
    except DynamotorError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
