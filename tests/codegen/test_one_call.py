"""Programs that are one call of PyTorch run without a frame of Python."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import _C
from dynamotor.base.config import config
from dynamotor.codegen.one_call import one_call


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


def test_a_compiled_function_of_one_op_is_one_call_and_still_shows_in_a_profile():
    with config.patch(check=False):
        compiled = dynamotor.compile(lambda x: torch.erfinv(x), dynamic=False)
        x = torch.rand(4)
        torch.testing.assert_close(compiled(x), x.erfinv())
        with torch.profiler.profile() as profile:
            compiled(x)
    assert "aten::erfinv" in [event.key for event in profile.key_averages()]
