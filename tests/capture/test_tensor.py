"""Every attribute of tensors, and every method without arguments, that answers with something else than a
tensor: compiled once, then asked about tensors that differ in one fact each."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_changes import outcome
from torch import nn

import dynamotor


def leaf():
    return torch.arange(6.0).view(2, 3).clone().requires_grad_()


def hooked():
    t = leaf()
    t.register_hook(lambda g: g)
    return t


def with_grad():
    t = leaf()
    t.grad = torch.ones(2, 3)
    return t


def retaining():
    t = leaf() * 2
    t.retain_grad()
    return t


def written():
    t = torch.zeros(2, 3)
    t.add_(1)
    return t


def marked():
    t = torch.zeros(2, 3)
    t.mark = 1
    return t


def in_inference_mode():
    with torch.inference_mode():
        return torch.zeros(2, 3)


VARIANTS = {
    "plain": lambda: torch.zeros(2, 3),
    "at an offset": lambda: torch.zeros(4, 3)[2:],
    "at another offset": lambda: torch.zeros(4, 3)[1:3],
    "leaf": leaf,
    "result": lambda: leaf() * 2,
    "second of several results": lambda: torch.stack([leaf(), leaf()]).unbind(0)[1],
    "hooked": hooked,
    "hooked result": lambda: retaining(),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 3)),
    "with a gradient": with_grad,
    "written": written,
    "marked": marked,
    "shared": lambda: torch.zeros(2, 3).share_memory_(),
    "view": lambda: torch.zeros(6).view(2, 3),
    "view of a leaf": lambda: leaf().view(2, 3),
    "detached": lambda: leaf().detach(),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "expanded": lambda: torch.zeros(3).expand(2, 3),
    "double": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "integers": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "booleans": lambda: torch.zeros(2, 3, dtype=torch.bool),
    "complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "conjugate": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    "number": lambda: torch.tensor(1.0),
    "empty": lambda: torch.zeros(0, 3),
    "rank 4": lambda: torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "meta": lambda: torch.zeros(2, 3, device="meta"),
    "inference": in_inference_mode,
    "later batch": lambda: torch.zeros(3, 3),
}
# Attributes that are not asked for: each changes the tensor or PyTorch, makes objects that compare by identity, or is a number
# of this run.
NOT_ASKED = """
    backward register_hook register_post_accumulate_grad_hook __init__ __new__ __init_subclass__ __subclasshook__ __reduce__
    __getstate__ __dlpack__ storage untyped_storage _typed_storage __weakref__ __cuda_array_interface__ __dir__ __dict__
    __class__ cuda xpu mtia ipu hpu to_mkldnn pin_memory __sizeof__ _cdata __repr__ __str__ __hash__ _make_wrapper_subclass
    _make_dtensor _make_subclass __torch_function__ __torch_dispatch__ share_memory_ retain_grad _use_count numpy __array__
"""


def asked():
    """(name, whether it is a method) of each attribute that a plain tensor answers without a tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(dir(torch.Tensor)) - set(NOT_ASKED.split())):
            found = outcome(getattr, torch.zeros(2, 3), name)
            if callable(found) and not isinstance(found, type):
                answer = outcome(getattr(torch.zeros(2, 3), name))
                needs_arguments = isinstance(answer, type) and issubclass(answer, TypeError)
                first = answer[0] if isinstance(answer, tuple) and answer else answer
                if not needs_arguments and not isinstance(first, torch.Tensor):
                    yield name, True
            elif not isinstance(found, torch.Tensor):
                yield name, False


def same(a, b):
    return type(a) is type(b) and (a == b or a is b or type(a).__eq__ is object.__eq__)


@pytest.mark.sweep(21)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "is_method"), list(asked()), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("where", ["of an argument", "of a view"])
def test_an_answer_follows_the_tensor(name, is_method, where):
    def of_an_argument(x):
        return getattr(x, name)() if is_method else getattr(x, name)

    def of_a_view(x):
        y = x[:1]
        return getattr(y, name)() if is_method else getattr(y, name)

    read = of_an_argument if where == "of an argument" else of_a_view
    compiled = dynamotor.compile(read, backend="eager")
    dynamotor.counters.clear()
    with dynamotor.config.patch(cache_size_limit=len(VARIANTS)):
        for variant, make in VARIANTS.items():
            x = make()
            want, got = outcome(read, x), outcome(compiled, x)
            if isinstance(want, torch.Tensor):
                continue
            assert same(want, got), f"{variant}: eager {want}, compiled {got}"
    assert not dynamotor.counters["frames"]["failed"]


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "asks",
    [
        lambda z: z.conj().is_conj(),
        lambda z: torch.is_neg(z.conj().imag),
        lambda z: z + 1 if z.mH.is_conj() else z - 1,
        lambda z: torch._neg_view(z.real).is_neg(),
        lambda z: (z.is_conj(), z.resolve_conj().is_conj(), z.conj().clone().is_conj()),
    ],
)
def test_what_is_lazy_is_asked_of_real_tensors(asks, backend):
    """A trace's tensors have no such bits: it was always False, and branches went the other way."""
    z = torch.tensor([[1 + 2j, 3 + 4j]])
    compiled = dynamotor.compile(asks, backend=backend)
    assert str(compiled(z)) == str(compiled(z)) == str(asks(z))
