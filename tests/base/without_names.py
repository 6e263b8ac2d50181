"""Runs the README's example once for each private PyTorch name, which dynamotor takes to be missing, in a fork
of a process that has imported PyTorch: `python without_names.py NAME...` prints a JSON object a line.
"""

import io
import json
import os
import sys
import traceback

import sympy  # noqa: F401
import torch
import torch.distributed._functional_collectives
import torch.fx.experimental.proxy_tensor
import torch.testing
import torch.utils.checkpoint  # noqa: F401  (with those above: imports of the example, most of its time)


def example():
    """The README's: a compiled module beside eager, in inference and training."""
    import dynamotor

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    x = torch.randn(4, 8)
    fast = dynamotor.compile(net)
    results = []
    for module in (fast, net):
        net.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for p in net.parameters()]])
    torch.testing.assert_close(*results)
    return dynamotor.explain(net)(x).graph_count


def without(name):
    """Output and effects of a process without the name."""
    os.environ["DYNAMOTOR_HIDE_NAMES"] = name
    sys.stderr = warned = io.StringIO()
    try:
        graphs, error = example(), ""
    except BaseException:
        graphs, error = 0, traceback.format_exc()
    return {"name": name, "graphs": graphs, "error": error, "warned": warned.getvalue()}


for name in sys.argv[1:]:
    if not (child := os.fork()):
        print(json.dumps(without(name)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
