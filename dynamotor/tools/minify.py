"""`python -m dynamotor minify script.py`: from a program that fails to a small script that fails in the same
way.

The program runs under `config.check`, so that wrong results fail too. The first graph that fails by itself is
cut down node by node; the rest is written beside the program as `script.min.py`, its inputs as
`script.min.safetensors`. Internal errors write such a script of the whole graph, and their message says
where.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from ..backends import resolve
from ..base.config import config
from ..base.errors import DynamotorError, UsageError
from ..base.events import Event, subscribe
from ..graph.module import copied, copy_of
from ..graph.nodes import reached
from ..graph.spec import TensorSpec
from .lowered import call_both_ways

Inputs = Sequence[Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m dynamotor minify`."""
    parser.add_argument("script", help="a program that fails")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def main(args: argparse.Namespace) -> int:
    """Write the small script; 0 when there is one. DM108 where there is no such program."""
    script = Path(args.script)
    UsageError.when(
        not script.is_file(),
        "DM108",
        f"there is no program {args.script}",
        cure="give the path of a Python file",
    )
    graphs = run_program(script, args.args)
    for gm, inputs in graphs:
        if code := failure(gm, inputs):
            small = minify(gm, inputs, code)
            path = write_script(
                *small, DynamotorError(code, f"made from {script.name}"), script.with_suffix(".min.py")
            )
            print(f"{code}: {_calls(small[0])} of {_calls(gm)} calls are left in {path}")
            return 0
    print(f"none of the {len(graphs)} graphs that {script} compiles fails by itself")
    return 1


def run_program(script: Path, arguments: Sequence[str]) -> list[tuple[fx.GraphModule, list[Any]]]:
    """The graphs that a program captures before it ends or fails, with their inputs."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(event: Event) -> None:
        if event.data["graph"] is not None:
            found.append((event.data["graph"], list(event.data["captured"].examples)))

    remove = subscribe(keep, "capture")
    argv, path = [str(script), *arguments], [str(script.resolve().parent), *sys.path[1:]]
    with (
        config.patch(check=True, strict=False),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", path),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (Exception, SystemExit) as error:  # whatever the user's program raises: it is to be repeated
            print(f"{script.name} ended with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    remove()
    return found


def failure(gm: fx.GraphModule, inputs: Inputs) -> str:
    """The code of the error that a graph's compilation, call or backward raises; "" where all is well."""
    given = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs
    ]
    with config.patch(check=True, verify=True):
        try:
            call_both_ways(resolve("native")(copy_of(gm), given), tuple(given), {})
        except Exception as error:  # whatever a mistake of the compiler's raises
            return error.code if isinstance(error, DynamotorError) else type(error).__name__
    return ""


def minify(gm: fx.GraphModule, inputs: Inputs, code: str) -> tuple[fx.GraphModule, list[Any]]:
    """The smallest graph, found by cutting nodes and outputs off, that still fails with this code; and its
    inputs.
    """
    best, given = gm, list(inputs)
    changed = True
    while changed:
        changed = False
        for candidate, wanted in _smaller(best, given):
            if failure(candidate, wanted) == code:
                best, given, changed = candidate, wanted, True
                break
    return best, given


def _smaller(gm: fx.GraphModule, inputs: Inputs) -> Iterator[tuple[fx.GraphModule, list[Any]]]:
    """Smaller graphs, the smallest first: one call with its operands as inputs, the end from a call on, the
    beginning up to one, single outputs."""
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    values = Values(gm).values(inputs)
    for outputs, start in (
        (lambda n: [n], lambda i: i),
        (lambda n: _outputs(gm), lambda i: i),
        (lambda n: [n], lambda i: 0),
    ):
        for i, node in reversed(list(enumerate(calls))):
            cut = _cut(gm, calls[start(i) :], outputs(node), values)
            if cut is not None and _calls(cut[0]) < len(calls):
                yield cut
    for node in _outputs(gm) if len(_outputs(gm)) > 1 else []:
        if (cut := _cut(gm, calls, [node], values)) is not None:
            yield cut


class Values(fx.Interpreter):
    """Runs a graph and keeps each node's value."""

    def values(self, inputs: Inputs) -> dict[fx.Node, Any]:
        """By node; a value that a later node writes in place is copied."""
        self.kept: dict[fx.Node, Any] = {}
        with torch.no_grad():
            self.run(*[x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs])
        return self.kept

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.kept[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return value


def _outputs(gm: fx.GraphModule) -> list[fx.Node]:
    end = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
    return [n for n in dict.fromkeys(end) if isinstance(n, fx.Node)]


def _calls(gm: fx.GraphModule) -> int:
    return sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes)


def _cut(
    gm: fx.GraphModule, kept: Sequence[fx.Node], outputs: Sequence[fx.Node], values: dict[fx.Node, Any]
) -> tuple[fx.GraphModule, list[Any]] | None:
    """The graph of these calls as far as the outputs need them; operands from other calls are inputs. None:
    not of tensors.
    """
    among = set(kept)
    needed = reached(among.intersection(outputs), lambda node: among.intersection(node.all_input_nodes))
    if not needed:
        return None
    graph, inputs = fx.Graph(), []
    reads = dict.fromkeys(
        i for n in gm.graph.nodes if n in needed for i in n.all_input_nodes if i not in needed
    )
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    static = {places[k] for k in gm.meta.get("static_inputs", ())}
    env = copied(graph, reads, [node for node in gm.graph.nodes if node in needed])
    for node in reads:
        value = values[node]
        if not isinstance(value, (torch.Tensor, int)):
            return None
        env[node].meta["val"] = TensorSpec.of(value) if isinstance(value, torch.Tensor) else value
        inputs.append(
            value.requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        )
    graph.output(tuple(env[n] for n in outputs if n in needed))
    made = fx.GraphModule(torch.nn.Module(), graph)
    made.meta["static_inputs"] = frozenset(k for k, node in enumerate(reads) if node in static)
    return made, inputs


# -- the script ----------------------------------------------------------------------------------------------
SCRIPT = '''"""{error}"""

from pathlib import Path

import torch
from safetensors.torch import load_file

import dynamotor
{imports}

{graph}


def tensor(name, shape, stride, requires_grad):
    """An input as it was laid out."""
    found = saved[name]
    made = torch.empty_strided(shape, stride, dtype=found.dtype).copy_(found)
    return made.requires_grad_(requires_grad)


saved = load_file(Path(__file__).with_suffix(".safetensors"))
inputs = [
{inputs}
]
with dynamotor.config.patch(check=True, verify=True):
    outputs = dynamotor.compile(graph{options})(*inputs)
    loss = sum(t.sum() for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
print("it does not fail here")
'''


def write_script(graph: Any, inputs: Inputs, error: Exception, path: Path | None = None) -> Path:
    """A script that calls the compiled graph, or function of a file, with these inputs; its tensors lie
    beside it. Without a path: in the cache's folder `failures`. ValueError where a function or an input
    cannot be written down."""
    from safetensors.torch import save_file

    if path is None:
        folder = Path(config.cache_dir) / "failures"
        folder.mkdir(parents=True, exist_ok=True)
        path = (
            folder / f"{getattr(error, 'code', 'failure')}-{os.getpid()}-{time.time_ns() // 1000 % 10**9}.py"
        )
    is_graph = isinstance(graph, fx.GraphModule)
    imports, text = _graph_text(graph) if is_graph else _file_text(graph)
    options = ", fullgraph=True" if is_graph else ""
    tensors = {
        f"input{k}": x.detach().cpu().contiguous().clone()
        for k, x in enumerate(inputs)
        if isinstance(x, torch.Tensor)
    }
    rows = [f"    {_input(k, x)}," for k, x in enumerate(inputs)]
    said = str(error).replace('"""', "'''").replace("\\", "/")
    text = SCRIPT.format(error=said, imports=imports, graph=text, options=options, inputs="\n".join(rows))
    path.write_text(text, encoding="utf-8")
    save_file(tensors, str(path.with_suffix(".safetensors")))
    return path


def _graph_text(gm: fx.GraphModule) -> tuple[str, str]:
    """The imports of a graph, and the graph as a function."""
    code = gm.graph.python_code("self")
    source = re.sub(r";  [\w = ]* = None", "", code.src.strip())
    used = [
        (name, value) for name, value in sorted(code.globals.items()) if re.search(rf"\b{name}\b", source)
    ]
    signature = source.removeprefix("def forward").replace("(self, ", "(", 1).replace("(self)", "()", 1)
    return "\n".join(filter(None, (_import(name, value) for name, value in used))), f"def graph{signature}"


def _file_text(fn: Callable[..., Any]) -> tuple[str, str]:
    """What imports a function of a file. ValueError for any other callable."""
    name, file = (
        getattr(fn, "__qualname__", ""),
        inspect.getsourcefile(fn) if inspect.isfunction(fn) else None,
    )
    if file is None or not name.isidentifier() or not os.path.isfile(file):
        raise ValueError(f"{name or type(fn).__name__} is no function at the top of a file")
    return "import runpy\n", f"graph = runpy.run_path({os.path.abspath(file)!r})[{name!r}]"


def _input(k: int, x: Any) -> str:
    """The expression that makes an input again."""
    if not isinstance(x, torch.Tensor):
        if not isinstance(x, int | float | str | type(None)):
            raise ValueError(f"argument {k} is a {type(x).__name__}")
        return repr(x)
    to = "" if x.device.type == "cpu" else f".to('{x.device}')"
    return f"tensor('input{k}', {tuple(x.shape)}, {tuple(x.stride())}, {x.requires_grad}){to}"


def _import(name: str, value: Any) -> str:
    """The line that makes a global of a graph's text."""
    if name in ("torch",) or name.startswith("__"):
        return ""
    if isinstance(value, float):
        return f"{name} = float('{value}')"
    if isinstance(value, type(sys)):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "builtins") or not own:
        return f"{name} = {value!r}"
    return f"from {module} import {own} as {name}" if own != name else f"from {module} import {own}"
