"""Every op of real training steps, in float32 and under bf16 autocast: shape inference agrees with what the CPU
kernel did.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import models, torchvision_stub
from dynamotor.graph.op_facts import facts
from dynamotor.graph.shape_tensor import DataDependent, infer_spec, spec_of
from dynamotor.graph.spec import TensorSpec

pytest.importorskip("transformers")
torchvision_stub.prepare()
pytest.importorskip("timm")


def describe(value):
    if isinstance(value, torch.Tensor):
        value = TensorSpec.of(value)
    if isinstance(value, TensorSpec):
        return value.shape, value.stride if value.numel else None, value.dtype
    return [describe(v) for v in value] if isinstance(value, (tuple, list)) else None


class Compare(TorchDispatchMode):
    """Runs ops as they are and collects those whose inferred spec differs."""

    def __init__(self):
        super().__init__()
        self.wrong, self.checked = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        specs = tuple(spec_of(a) for a in args), {k: spec_of(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        if not facts(func).writes and not facts(func).changes_metadata:
            try:
                got = infer_spec(func, *specs)
            except DataDependent:
                return out
            self.checked += 1
            if describe(got) != describe(out):
                self.wrong.setdefault(str(func), (specs, describe(got), describe(out)))
        return out


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", models.TWELVE)
def test_a_training_step(name, autocast):
    case = models.load(name, small=True)
    args, kwargs = case.make_inputs(train=True)
    case.model.train()
    with Compare() as compare:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = models.output_tensors(case.model(*args, **kwargs))
        sum(o.float().sum() for o in outputs if o.requires_grad).backward()
    assert not compare.wrong
    assert compare.checked > 50
