"""Aten graphs for tests of passes: traced from plain functions, specs taken from a run."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamotor.graph.spec import TensorSpec


class _Specs(fx.Interpreter):
    def run_node(self, n):
        result = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = self._spec(result)
        return result

    def _spec(self, value):
        if isinstance(value, torch.Tensor):
            return TensorSpec.of(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._spec(v) for v in value)
        return value


def aten_graph(fn, *inputs):
    """The aten graph of fn(*inputs) (no in-place ops in fn), with a flat tuple as output."""

    def flat(*args):
        result = fn(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    with torch.no_grad():
        gm = make_fx(flat)(*inputs)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        _Specs(gm).run(*inputs)
    return gm


def module_graph(module, *inputs):
    """The aten graph of a module with its parameters and buffers as first inputs, and these tensors."""
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    tensors = [t for _, t in [*module.named_parameters(), *module.named_buffers()]]

    def run(*args):
        return torch.func.functional_call(module, dict(zip(names, args)), args[len(names) :])

    return aten_graph(run, *tensors, *inputs), tensors
