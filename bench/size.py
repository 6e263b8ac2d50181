"""Python statements by room, so that formatting does not matter: `python -m bench size`; with `--mechanisms`
by mechanism, with `--against REF` beside those of another commit.

A statement is a node of `ast` that is one; a docstring is one too. tests/bench/test_size.py has each room's
limit, and CI prints the difference that a pull request makes.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
XLA = ROOT / "xla" / "dynamotor" / "xla"  # the package of the distribution dynamotor-xla


@functools.cache
def statements(text: str) -> int:
    """The statements of a file's text."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


@functools.cache
def rooms(package: Path = ROOT / "dynamotor") -> Counter[str]:
    """Statements of each folder of the package; files beside them are "."."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        found[parts[0] if len(parts) > 1 else "."] += statements(path.read_text())
    return found


# The purpose of the files: the first mechanism with a matching pattern (of paths in the package) has a
# file.
MECHANISMS: dict[str, str] = {
    "padding to buckets (backend xla)": "graph/bucket_padding*",
    "symbolic sizes": "graph/siz* graph/sym_* graph/data_sizes* capture/symbolic_inputs* capture/values/size* codegen/triton_sizes* "
    "codegen/triton_family* lower/instance* autograd/variants*",
    "functions inside graphs (vmap, cond, flex_attention, checkpoints)": "graph/subgraphs* graph/control_flow* graph/flex* "
    "capture/bodies* capture/rules_control_flow* capture/rules_attention* capture/rules_transforms* capture/rules_autograd* codegen/flex_*",
    "definitions of ops: shapes, layouts, requirements, padding": "graph/ops/* graph/op_definition* graph/layouts*",
    "shapes and strides of eager's kernels": "graph/shape* graph/kernel_checks* graph/result_strides* graph/spec* graph/op_facts*",
    "bytecode: decoding, opcodes, breaks, resumption": "capture/bytecode* capture/ops_* capture/interpreter* capture/cut* "
    "capture/resume* capture/assembler* capture/inner_frames* capture/breaks* capture/result_emitter*",
    "guards and sources": "capture/guards* capture/source* capture/reader* capture/dispatch*",
    "Python objects in a trace": "capture/values/*",
    "rules of Python's builtins and libraries": "capture/rules_* capture/polyfills/* capture/protocol* capture/torch_rules*",
    "the compile loop of a callable": "capture/*",
    "second derivatives, parts cut out, kept programs": "autograd/double_backward* autograd/graph_split* autograd/program_cache* autograd/reach* "
    "autograd/stages* autograd/recipe*",
    "functionalisation and the joint graph": "autograd/func* autograd/aten_recorder* autograd/joint* autograd/autograd_nodes* autograd/inplace* "
    "autograd/decomp* autograd/random* autograd/missing_tangents* autograd/simplify*",
    "partition and run time of forward and backward": "autograd/*",
    "lowerings of aten ops": "lower/ops_* lower/conv* lower/embedding* lower/gemm* lower/value* lower/extern*",
    "loop IR, fusion, schedule": "lower/fusion* lower/schedule* lower/ir* lower/index* lower/space* lower/lower* lower/program*",
    "checks of IRs and of results (verify, check)": "lower/verify* codegen/verify* codegen/checked* codegen/rounding* graph/verify*",
    "passes before loops (folding, layout, padding)": "lower/*",
    "C++ kernels": "codegen/cpp*",
    "Triton: products and convolutions": "codegen/triton_gemm* codegen/triton_conv* codegen/triton_product* codegen/triton_tma* "
    "codegen/gemm_table* codegen/autotune*",
    "Triton: loops": "codegen/triton*",
    "call programs, stored programs": "codegen/*",
    "GPU at run time (CUDA graphs, builds, launches)": "runtime/cuda* runtime/device* runtime/triton*",
    "builds and memory": "runtime/*",
    "data-parallel training": "distributed/*",
    "whole training steps": "step/*",
    "what people see (report, minify, packages, doctor)": "tools/*",
    "settings, errors, events, caches": "base/* graph/*",
    "entry points and other compilers' backends": "*",
}


@functools.cache
def mechanisms(package: Path = ROOT / "dynamotor") -> Counter[str]:
    """Statements of each mechanism."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        which = next(
            m
            for m, patterns in MECHANISMS.items()
            if any(fnmatch(name, pattern) for pattern in patterns.split())
        )
        found[which] += statements(path.read_text())
    return found


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Statements of each room of the core, and of dynamotor-xla, in a tree of the repository."""
    found = {f"dynamotor/{room}": count for room, count in sorted(rooms(root / "dynamotor").items())}
    return found | {"dynamotor-xla": sum(rooms(root / XLA.relative_to(ROOT)).values())}


def differences(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """A line for each room whose statements changed, and one for all."""
    lines = [
        f"{room:24} {before.get(room, 0):7,} -> {now.get(room, 0):7,}  {now.get(room, 0) - before.get(room, 0):+,}"
        for room in sorted({*before, *now})
        if before.get(room) != now.get(room)
    ]
    return [*lines, f"all rooms: {sum(now.values()) - sum(before.values()):+,} statements"]


def sizes_of_commit(ref: str) -> dict[str, int]:
    """`sizes` of another commit of this repository."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", ref, "dynamotor", "xla/dynamotor"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return sizes(Path(folder))


def main() -> None:
    """Print the core's rooms, dynamotor-xla, and the folders beside them; or the core's mechanisms."""
    if "--mechanisms" in sys.argv:
        for name, count in mechanisms().most_common():
            print(f"{count:7,} {name}")
        return
    if "--against" in sys.argv:
        print("\n".join(differences(sizes_of_commit(sys.argv[-1]), sizes())))
        return
    found = rooms()
    for room, count in sorted(found.items()):
        print(f"{count:7,} dynamotor/{room}")
    print(f"{sum(found.values()):7,} dynamotor")
    print(f"{sum(rooms(XLA).values()):7,} dynamotor-xla")
    for other in ("bench", "fuzz", "tests", "xla/tests", "examples", "tools"):
        print(f"{sum(rooms(ROOT / other).values()):7,} {other}")


if __name__ == "__main__":
    main()
