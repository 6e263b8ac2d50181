"""Programs that are one call of PyTorch run without a frame of Python."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import _C
from dynamotor.base.config import config
from dynamotor.codegen.externs import Callee
from dynamotor.codegen.one_call import one_call

aten = torch.ops.aten


def as_it_is(value):
    return value


SCOPE = {
    "torch": torch,
    "erfinv": torch.erfinv,
    "sort": torch.sort,
    "unbind": torch.unbind,
    "clamp": torch.clamp,
    "to": torch.Tensor.to,
    "python": lambda x: x,
    "as_a": as_it_is,
    "as_b": as_it_is,
}


def text(parameters, *lines):
    return "\n    ".join([f"def call({parameters}):", *lines]) + "\n"


@pytest.mark.parametrize(
    ("parameters", "lines", "wanted"),
    [
        ("x", ("a = as_a(erfinv(x))", "return (a,)"), lambda x: (x.erfinv(),)),
        ("x, y", ("a = as_a(clamp(x, min=y))", "return (a,)"), lambda x, y: (x.clamp(min=y),)),
        ("x, y", ("a = as_a(clamp(y, x, max=None))", "return (a,)"), lambda x, y: (y.clamp(x),)),
        ("x", ("a = as_a(to(x, torch.float64))", "return (a,)"), lambda x: (x.double(),)),
        (
            "x",
            ("a, b = sort(x, 0)", "a = as_a(a)", "b = as_b(b)", "return (b, a)"),
            lambda x: x.sort(0)[::-1],
        ),
        ("x", ("_, b = sort(x, 0)", "b = as_b(b)", "return (b,)"), lambda x: (x.sort(0)[1],)),
        ("x", ("_, b, _, _ = unbind(x, 0)", "b = as_b(b)", "return (b,)"), lambda x: (x[1],)),
    ],
)
def test_a_text_of_one_call_and_its_checks_is_called_from_c(parameters, lines, wanted):
    call = one_call(text(parameters, *lines), SCOPE)
    assert type(call) is _C.OneCall
    inputs = [torch.rand(4) for _ in parameters.split(", ")]
    torch.testing.assert_close(call(*inputs), tuple(wanted(*inputs)))


@pytest.mark.parametrize(
    ("parameters", "lines"),
    [
        ("x", ("a = as_a(python(x))", "return (a,)")),
        ("x", ("a = as_a(unknown(x))", "return (a,)")),
        ("x", ("a = as_a(erfinv(view(x, (4,), (1,), 0)))", "return (a,)")),
        ("x", ("a = as_a(erfinv(x))", "return (a, a)")),
        ("x", ("a = as_a(erfinv(x))", "return (x,)")),
        ("x", ("a = as_a(erfinv(x))", "written([x])", "return (a,)")),
        ("x", ("a, b = sort(x, 0)", "a = as_a(a)", "return (a, b)")),
        ("x", ("a, b = sort(x, 0)", "a = as_a(b)", "return (a,)")),
        ("x", ("erfinv(x)", "return ()")),
        ("given", ("x, = given", "given.clear()", "a = as_a(erfinv(x))", "return (a,)")),
    ],
)
def test_other_texts_stay_functions_of_python(parameters, lines):
    assert one_call(text(parameters, *lines), SCOPE) is None


def test_a_call_refuses_another_number_of_inputs_and_keywords():
    call = one_call(text("x", "a = as_a(erfinv(x))", "return (a,)"), SCOPE)
    with pytest.raises(TypeError, match="1 inputs"):
        call()
    with pytest.raises(TypeError, match="no keywords"):
        call(torch.ones(1), x=1)
    with pytest.raises(ValueError, match="no such place"):
        _C.OneCall(torch.erfinv, (None,), (3,), (), (as_it_is,), (-1,), 1)
    with pytest.raises(ValueError, match="an input or -1"):
        _C.OneCall(torch.erfinv, (None,), (), (), (as_it_is,), (-1,), 1)


def test_errors_of_the_call_and_of_its_checks_are_raised():
    def refuse(value):
        raise RuntimeError("not as foretold")

    call = one_call(
        text("x", "a, b = sort(x, 0)", "a = as_a(a)", "b = no(b)", "return (a, b)"), {**SCOPE, "no": refuse}
    )
    with pytest.raises(RuntimeError, match="not as foretold"):
        call(torch.ones(2))
    with pytest.raises(TypeError):
        call("text")


needs_functions = pytest.mark.skipif(_C.AtenFunction is None, reason="this PyTorch does not export them")


@needs_functions
@pytest.mark.parametrize(
    "op",
    [aten.erfinv.default, aten.nextafter.default, aten.polar.default, aten.frexp.Tensor, aten.fmod.Tensor],
)
def test_an_elementwise_op_of_tensors_is_libtorchs_own_function(op):
    function = Callee(op).function
    assert type(function) is _C.AtenFunction
    for size in (3, 70):  # few elements, for which it keeps the lock of Python, and many
        inputs = [torch.rand(size, size) for _ in op._schema.arguments]
        torch.testing.assert_close(function(*inputs), op(*inputs), rtol=0, atol=0)
    broadcast = [torch.rand(5, 1), torch.rand(1, 7)][: len(inputs)]
    torch.testing.assert_close(function(*broadcast), op(*broadcast), rtol=0, atol=0)


@needs_functions
@pytest.mark.parametrize(
    "op", [aten.sort.default, aten.hash_tensor.default, aten.erfinv_.default, aten.pow.Tensor_Scalar]
)
def test_other_ops_have_no_function_of_libtorchs(op):
    assert type(Callee(op).function) is not _C.AtenFunction


@needs_functions
def test_the_binding_raises_the_errors_and_takes_what_is_no_tensor():
    nextafter, fmod = Callee(aten.nextafter.default).function, Callee(aten.fmod.Tensor).function
    with pytest.raises(RuntimeError, match="must match the size"):
        nextafter(torch.rand(2), torch.rand(3))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fmod(torch.tensor([3]), torch.tensor([0]))
    with pytest.raises(TypeError):
        nextafter(torch.rand(2))
    assert fmod(torch.tensor([7.0]), 4).item() == 3
    out = torch.empty(2)
    assert nextafter(torch.zeros(2), torch.ones(2), out=out) is out
    with pytest.raises(ValueError, match="no function"):
        _C.AtenFunction("_ZN2at4_ops4none4callERKNS_6TensorE", 1, 1, as_it_is)


@needs_functions
def test_subclasses_and_parameters_reach_what_they_override():
    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "told"

    erfinv = Callee(aten.erfinv.default).function
    assert erfinv(torch.rand(2).as_subclass(Told)) == "told"
    x = torch.nn.Parameter(torch.rand(2))
    (gradient,) = torch.autograd.grad(erfinv(x).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(x.erfinv().sum(), x)[0])


def test_a_compiled_function_of_one_op_is_one_call_and_still_shows_in_a_profile():
    with config.patch(check=False):
        compiled = dynamotor.compile(lambda x: torch.erfinv(x), dynamic=False)
        x = torch.rand(4)
        torch.testing.assert_close(compiled(x), x.erfinv())
        with torch.profiler.profile() as profile:
            compiled(x)
    assert "aten::erfinv" in [event.key for event in profile.key_averages()]
