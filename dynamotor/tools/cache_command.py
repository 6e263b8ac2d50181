"""`python -m dynamotor cache [show | prune | verify]`: the disk cache of libraries, kernels and programs.

show: entries and megabytes by kind. prune: remove the least recently used until at most `--megabytes` are
left (0: everything). verify: read every entry, remove entries that are damaged or could have been written
by others;
the exit status is 1 when there was any.
"""

from __future__ import annotations

import argparse
import contextlib
import time

from ..base import cache
from ..base.config import config
from ..base.errors import UsageError
from .tables import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the cache command."""
    parser.add_argument("action", nargs="?", choices=("show", "prune", "verify"), default="show")
    parser.add_argument(
        "--megabytes", type=int, default=None, help="what prune leaves (default: config.cache_megabytes)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 when verify found an entry that is not whole."""
    if args.action == "prune":
        bound = config.cache_megabytes if args.megabytes is None else args.megabytes
        if bound < 0:
            raise UsageError("DM143", f"--megabytes {bound} is below zero", cure="0 removes everything")
        print(f"{cache.prune(bound << 20)} entries removed")
    wrong = [entry for entry in cache.entries() if not entry.is_whole()] if args.action == "verify" else []
    for entry in wrong:
        print(f"removed, not whole: {entry.path}")
        with contextlib.suppress(OSError):
            entry.path.unlink()
    print(f"{config.cache_dir} (at most {config.cache_megabytes} MB)")
    print(render(_rows(), ("kind", "entries", "MB", "last used")))
    return 1 if wrong else 0


def _rows() -> list[list[str]]:
    found = sorted(cache.entries(), key=lambda entry: entry.kind)
    rows = []
    for kind in dict.fromkeys(entry.kind for entry in found):
        mine = [entry for entry in found if entry.kind == kind]
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(entry.used for entry in mine)))
        rows.append([kind, str(len(mine)), f"{sum(entry.nbytes for entry in mine) / 2**20:.1f}", used])
    return rows
