"""What PyTorch's own test suite found, its tests compiled (`python -m bench torch_tests`)."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor.autograd.autograd_nodes import Backward


class Kept(torch.autograd.Function):
    seen: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Kept.seen += ctx.saved_tensors
        return grad, None


def test_saved_tensors_are_unpacked_once():
    """Under a checkpoint a second read of them raises, and a trace read them too."""
    x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)

    def fn(x, y):
        checkpoint(Kept.apply, x, y, use_reentrant=False).backward()

    dynamotor.compile(fn, backend="eager")(x, y)
    assert Kept.seen == [y] and x.grad == 1


def test_what_a_node_saved_is_unpacked_when_it_is_read():
    seen = []

    def read(node):
        return node._saved_result + 1

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: seen.append(x) or x):
        node = torch.ones(2, requires_grad=True).exp().grad_fn
    compiled = dynamotor.compile(read, backend="eager")
    for calls in (1, 2, 3):
        compiled(node)
        assert len(seen) == calls


@pytest.mark.parametrize("how", ["argument", "no_grad", "returned"])
def test_a_leaf_that_is_made_inside_gathers_its_gradient(how):
    """It was an output of the compiled graph, and its gradient None."""

    def fn(w):
        leaf = torch.ones(2, requires_grad=True)
        with torch.set_grad_enabled(how != "no_grad"):
            out = leaf * w
        out = out + leaf
        if how != "returned":
            out.sum().backward()
        return leaf, out

    grads = []
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        w = torch.tensor([2.0, 3.0], requires_grad=True)
        leaf, out = run(w)
        if how == "returned":
            out.sum().backward()
        assert leaf.is_leaf and leaf.requires_grad
        grads.append([leaf.grad, w.grad])
    assert str(grads[0]) == str(grads[1])


@pytest.mark.parametrize("program", [lambda x: x.clone(), lambda x: (x.t(), x + x), lambda x: x * 2])
def test_a_second_backward_where_nothing_was_saved(program):
    """Autograd frees nothing then, and may be asked again."""
    said = []
    for run in (program, dynamotor.compile(program, backend="aot_eager")):
        x = torch.ones(2, 2, requires_grad=True)
        out = run(x)
        out = out[0] if isinstance(out, tuple) else out
        try:
            for _ in range(2):
                out.backward(torch.ones(2, 2))
            said.append(str(x.grad))
        except RuntimeError as error:
            said.append(str(error)[:50])
    assert said[0] == said[1]


class _Parent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.child = torch.nn.ReLU()


def test_a_module_that_a_break_makes_has_its_submodules():
    """Its `__init__` is captured on its own, over a module that is there already."""
    make = dynamotor.disable(lambda cls: cls(), recursive=False)
    made = dynamotor.compile(lambda cls: make(cls), backend="eager")(_Parent)
    assert list(made._modules) == ["child"] and "child" not in made.__dict__


@pytest.mark.parametrize("uses", [lambda z, h: z.register_hook(h), lambda z, h: z.retain_grad()])
def test_hooks_on_what_others_were_calculated_from(uses):
    """The gradient from the others stays inside of a compiled graph: a hook was not called, without a word."""

    def fn(x, seen):
        z = x * 2
        out = z.sin()
        uses(z, seen.append)
        return (out, z) if z.retains_grad else (out,)

    said = []
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        seen = []
        out, *more = run(torch.ones(2, requires_grad=True), seen)
        out.sum().backward()
        said.append(str((seen, [z.grad for z in more])))
    assert said[0] == said[1]


def test_hooks_on_an_output_that_is_gone():
    z, out = dynamotor.compile(lambda x: (z := x * 2, z.sin()), backend="aot_eager")(
        torch.ones(2, requires_grad=True)
    )
    z.register_hook(lambda grad: None)
    del z
    with pytest.raises(dynamotor.BackendError, match="DM403"):
        out.sum().backward()


def test_gradients_of_what_was_calculated_on_the_way():
    def fn(x, w):
        between = w * 2
        out = (between * x).sin().sum()
        (grad,) = torch.autograd.grad(out, between)
        return grad

    x, w = torch.ones(2), torch.ones(2, requires_grad=True) * 1
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        assert torch.equal(run(x, w), torch.full((2,), torch.tensor(2.0).cos()))


def test_a_copy_has_the_gradient():
    x = torch.zeros(2)
    compiled = dynamotor.compile(copy.deepcopy, backend="eager")
    assert compiled(x).grad is None
    x.grad = torch.ones(2)
    assert compiled(x).grad.tolist() == [1, 1]


def test_an_op_whose_name_is_a_keyword_of_python():
    compiled = dynamotor.compile(lambda x: x.random_(3, 4) + 1, backend="aot_eager")
    assert compiled(torch.zeros(2)).tolist() == [4, 4]


class _Settings(types.ModuleType):
    kept = 1

    @property
    def value(self):
        return _Settings.kept

    @value.setter
    def value(self, new):
        _Settings.kept = new


settings = _Settings("settings")


def test_a_name_that_a_modules_class_sets():
    """As those of torch.backends: it was stored beside, and nothing was set."""

    def fn(new):
        settings.value = new
        return settings.value

    compiled = dynamotor.compile(fn, backend="eager")
    for new in (2, 3, 2):
        assert compiled(new) == new == _Settings.kept
    assert "value" not in vars(settings)


def test_settings_of_backends_are_set():
    def fn(x):
        torch.backends.cudnn.deterministic = True
        return x + 1

    with getattr(torch.backends, "__allow_nonbracketed_mutation")():  # PyTorch's test library forbids it
        before = torch.backends.cudnn.deterministic
        try:
            dynamotor.compile(fn, backend="eager")(torch.ones(1))
            assert torch._C._get_cudnn_deterministic()
        finally:
            torch.backends.cudnn.deterministic = before


class _OfAClass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.nn.Parameter(x.as_subclass(_OfAClass)),
        torch.nn.Buffer,
        lambda x: torch.nn.Buffer(x, persistent=False),
    ],
)
def test_parameters_and_buffers_whose_class_does_not_say_so(made):
    """Set in a module, they were plain attributes: in no `state_dict`, and `parameters()` lacked them."""

    def outside(module, tensor):
        module.it = tensor
        return module

    def inside(module, tensor):
        module.it = made(tensor.detach().as_subclass(torch.Tensor))
        return module

    for fn in (outside, inside):
        said = []
        for run in (fn, dynamotor.compile(fn, backend="eager")):
            module = run(torch.nn.Module(), made(torch.ones(2)))
            tables = (module._parameters, module._buffers, module._non_persistent_buffers_set)
            said.append((str(tables), "it" in module.__dict__))
        assert said[0] == said[1]


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


@pytest.mark.parametrize("then", [None, 2.5, True, "no", torch.ones(2), [2], 9])
def test_integers_that_were_equal_and_are_none(then):
    """What tells sizes apart computed with None: a TypeError for the user's call."""

    def fn(x, a, b):
        if a is None or isinstance(a, str | list):
            return x + 1
        return x + a if isinstance(a, int) and a == b else x * a

    compiled, x = dynamotor.compile(fn, backend="eager"), torch.ones(2)
    for pair in [(3, 3), (4, 4), (5, 5), (then, 6), (7, 7), (then, then)]:
        assert torch.equal(compiled(x, *pair), fn(x, *pair))


def test_a_reentrant_checkpoint_of_what_has_no_gradient():
    """Its result requires one in eager, and a backward raises."""

    def fn(x):
        return checkpoint(lambda x: x.detach() * 2, x, use_reentrant=True)

    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        out = run(torch.ones(2, requires_grad=True))
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="not necessary"):
            out.sum().backward()


_w, _v = torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_(), torch.ones(3, requires_grad=True)


def _one_from_another(x):
    hidden = (x @ _w).tanh()
    return hidden, (hidden * _v).sum() ** 2


def _a_chain(x):
    first = (x @ _w).tanh()
    second = first.sin() + first
    return first, second, (second * _v + first).sum()


def _drawn(x):
    hidden = torch.nn.functional.dropout(x @ _w, 0.5)
    return hidden, (hidden * hidden).sum()


@pytest.mark.parametrize(
    ("fn", "asks"),
    [
        (_one_from_another, lambda hidden, loss: torch.autograd.grad(loss, hidden)),
        (_one_from_another, lambda hidden, loss: torch.autograd.grad((hidden.exp() * loss).sum(), hidden)),
        (_one_from_another, lambda hidden, loss: (loss.backward(inputs=[hidden]), hidden.grad)),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(
                torch.autograd.grad(loss, hidden, create_graph=True)[0].sin().sum(), [_w, _v]
            ),
        ),
        (
            _one_from_another,
            lambda hidden, loss: [
                torch.autograd.grad(loss, one, retain_graph=True) for one in (hidden, _w, hidden)
            ],
        ),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, first)),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, second)),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(second.sum() + loss, first)),
        (_one_from_another, lambda hidden, loss: torch.autograd.grad(loss, [hidden, _w])),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(loss + hidden.exp().sum(), [hidden, _w]),
        ),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(
                sum(g.sin().sum() for g in torch.autograd.grad(loss, [hidden, _w, _v], create_graph=True)), _w
            ),
        ),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(
                loss, [hidden, _w], torch.ones(4), is_grads_batched=True
            ),
        ),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, [first, second])),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss + second.sum(), [_w, second, first])),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, [second, _v])),
        (_drawn, lambda hidden, loss: (torch.autograd.grad(loss, hidden)[0] == 2 * hidden).all()),
    ],
)
def test_gradients_of_one_output_by_another(fn, asks):
    """Both come from one node: it was "not used in the graph", or None."""
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    expected, found = (asks(*run(x)) for run in (fn, dynamotor.compile(fn, backend="aot_eager")))
    torch.testing.assert_close(found, expected)


def test_hooks_where_the_gradient_of_another_output_comes():
    """They are refused before they are called with None."""
    hidden, loss = dynamotor.compile(_one_from_another, backend="aot_eager")(torch.ones(2, 3))
    hidden.register_hook(lambda grad: grad * 2)
    with pytest.raises(dynamotor.BackendError, match="DM403"):
        loss.backward()


def _batched(fn, x):
    out = fn(x)
    return torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)


def _batched_twice(fn, x):
    (rows,) = torch.autograd.grad(fn(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(rows.sin().sum(), x)


def _under_vmap(fn, x):
    out = fn(x)
    return torch.vmap(lambda v: torch.autograd.grad(out, x, v, retain_graph=True)[0])(torch.eye(3))


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("asks", [_batched, _batched_twice, _under_vmap])
def test_gradients_of_many_at_once(asks, backend):
    """Generated kernels have no batches: "the tensor has no storage"."""

    def fn(x):
        return (x @ _w.detach()).tanh()

    x = torch.linspace(0, 1, 3).requires_grad_()
    torch.testing.assert_close(asks(dynamotor.compile(fn, backend=backend), x), asks(fn, x))


def test_gradients_of_many_by_another_output():
    said = []
    for run in (_one_from_another, dynamotor.compile(_one_from_another, backend="aot_eager")):
        hidden, loss = run(torch.linspace(0, 1, 6).reshape(2, 3))
        said.append(torch.autograd.grad(loss, hidden, torch.ones(4), is_grads_batched=True)[0])
    torch.testing.assert_close(*said)


def test_gradients_of_many_where_numbers_are_drawn():
    """Kernels raised "the tensor has no storage"."""
    x = torch.ones(3, requires_grad=True)
    out = dynamotor.compile(lambda x: torch.nn.functional.dropout(x, 0.5).tanh(), backend="native")(x)
    with pytest.raises(dynamotor.BackendError, match="DM408.*many gradients at once"):
        torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)


def test_errors_of_many_gradients_where_nothing_is_drawn():
    """They were called an error of a graph that draws random numbers."""

    def refuse(*_):
        raise RuntimeError("words of the backend")

    node = types.SimpleNamespace(draws=False, _run=refuse)
    with pytest.raises(RuntimeError, match="^words of the backend"):
        Backward._run_many(node, [], [], [])


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_ops_that_write_a_list_give_that_list(kind, backend):
    """It was another one, so that what was appended to it was lost."""

    def fn(items, made):
        written = torch._foreach_add_(items, 1.0)
        more = torch._foreach_mul_(self=made, scalar=2.0)
        more.append(torch.ones(1))
        return written is items, made, more is made

    def args():
        return kind([torch.ones(2), torch.ones(3)]), [torch.ones(2)]

    given, expected = args(), args()
    found = dynamotor.compile(fn, backend=backend, fullgraph=True)(*given)
    torch.testing.assert_close(found, fn(*expected))
    torch.testing.assert_close(given, expected)
    assert found[1] is given[1]


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_ops_that_write_a_list_stay_in_the_graph(backend):
    """One tensor after the other, as eager does; they were left to eager with "made of constants"."""

    def fn(items):
        torch._foreach_add_([items[0], items[1]], [items[1], items[0]])
        return items[0] - items[1]

    given, expected = ([torch.arange(3.0), torch.ones(3)] for _ in range(2))
    found = dynamotor.compile(fn, backend=backend, fullgraph=True)(given)
    torch.testing.assert_close(found, fn(expected))
    torch.testing.assert_close(given, expected)


def _made_on_a_device(x):
    with torch.device("meta"):
        made, named = torch.ones(2), torch.zeros(2, device="cpu")
        asked = torch.get_default_device().type
        with torch.device("cpu"):
            inner = torch.rand(1)
    return made, named, inner, torch.ones(2) + x, asked


def _a_break_in_a_region(x):
    with torch.device("meta"):
        before = torch.ones(2)
        torch.set_num_threads(torch.get_num_threads())
        after = torch.nn.Linear(2, 3).weight
    return before, after, torch.ones(2) + x


def _an_error_in_a_region(x):
    try:
        with torch.device("meta"):
            raise ValueError(torch.ones(2))
    except ValueError as error:
        return error.args[0], torch.ones(2) + x


def _left_open(x):
    torch.device("meta").__enter__()
    return torch.ones(2)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(
    "fn",
    [_made_on_a_device, _a_break_in_a_region, _an_error_in_a_region, _left_open],
    ids=lambda fn: fn.__name__,
)
def test_regions_of_a_device(fn, backend):
    """They were entered while the trace was made: its program made tensors elsewhere, and a break left them open."""

    def seen(run):
        depth = torch._C._len_torch_function_stack()
        devices = [str(getattr(one, "device", one)) for one in run(torch.ones(2))]
        opened = torch._C._len_torch_function_stack() - depth
        for _ in range(opened):
            torch.device("meta").__exit__(None, None, None)
        return devices, opened

    compiled = dynamotor.compile(fn, backend=backend)
    assert seen(compiled) == seen(compiled) == seen(fn)


def test_an_error_behind_a_break_in_a_recorded_function():
    """The profiler's region had not been entered: leaving it was an AssertionError."""
    seen = dynamotor.disable(lambda x: x)

    def fn(x):
        with torch.autograd.profiler.record_function("part"):
            return seen(x.sin()).reshape(7)

    with pytest.raises(RuntimeError, match="shape"):
        dynamotor.compile(fn, backend="eager")(torch.ones(2))
