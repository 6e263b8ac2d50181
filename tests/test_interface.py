"""Names that users of torch.compile know: marks on functions, and stances."""

from __future__ import annotations

import warnings

import pytest
import torch
from warned import text_of

import dynamotor
from dynamotor import UsageError, counters

x = torch.randn(3, 4)


def graphs_and_breaks(function, *args):
    found = dynamotor.explain(function)(*(args or (x,)))
    torch.testing.assert_close(dynamotor.compile(function)(*(args or (x,))), function(*(args or (x,))))
    return found.graph_count, found.graph_break_count


def helper(y):
    return (y * 2).relu()


def plain(y):
    return helper(y) + 1


@dynamotor.disable
def disabled(y):
    return helper(y) + 1


@dynamotor.disable()
def disabled_by_call(y):
    return helper(y) + 1


@dynamotor.disable(recursive=False)
def disabled_alone(y):
    return helper(y) + 1


@torch.compiler.disable
def disabled_by_torch(y):
    return helper(y) + 1


@torch.compiler.disable(recursive=False)
def disabled_alone_by_torch(y):
    return helper(y) + 1


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (plain, (1, 0)),
        (disabled, (2, 1)),
        (disabled_by_call, (2, 1)),
        (disabled_by_torch, (2, 1)),
        (disabled_alone, (3, 1)),
        (disabled_alone_by_torch, (3, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_disable(inner, expected):
    assert graphs_and_breaks(lambda x: inner(x * 2) * 2) == expected


def test_disable_as_a_block():
    compiled = dynamotor.compile(plain)
    counters.clear()
    with dynamotor.disable():
        torch.testing.assert_close(compiled(x), plain(x))
    assert not counters["frames"] and not compiled.entries
    compiled(x)
    assert len(compiled.entries) == 1


seen = []


@dynamotor.allow_in_graph
def opaque(y, scale=2):
    seen.append(type(y).__name__)
    print(end="")
    return y * scale, y + 1


def test_allow_in_graph():
    def function(x):
        first, second = opaque(x, scale=3)
        return first + second

    compiled = dynamotor.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))
    n = len(seen)
    torch.testing.assert_close(compiled(x), x * 3 + x + 1)
    assert len(seen) == n  # not called again
    mine = x.clone().requires_grad_()
    compiled(mine).sum().backward()
    torch.testing.assert_close(mine.grad, torch.full_like(x, 4.0))


def test_torchs_allow_in_graph():
    @torch.compiler.allow_in_graph
    def allowed(y):
        print(end="")
        return y * 2

    assert graphs_and_breaks(lambda x: allowed(x) + 1) == (1, 0)


def test_disallow_in_graph():
    @dynamotor.disallow_in_graph
    def refused(y):
        return y * 2

    assert graphs_and_breaks(lambda x: refused(x + 1) + 1) == (2, 1)


def test_disallowing_one_of_torchs_functions():
    from dynamotor.capture.values.base import builtin_rules

    before = builtin_rules.get(torch.sinc)
    dynamotor.disallow_in_graph(torch.sinc)
    try:
        assert graphs_and_breaks(lambda x: torch.sinc(x + 1) + 1) == (2, 1)
    finally:
        builtin_rules.pop(torch.sinc)
        if before is not None:
            builtin_rules[torch.sinc] = before


@pytest.mark.parametrize("mark", [dynamotor.assume_constant_result, torch.compiler.assume_constant_result])
def test_assume_constant_result(mark):
    calls = []

    @mark
    def settings(name):
        calls.append(name)
        print(end="")
        return {"scale": 3}[name]

    compiled = dynamotor.compile(lambda x: x * settings("scale"), fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x * 3)
    assert calls == ["scale"]


def test_is_compiling():
    assert not dynamotor.is_compiling()
    assert dynamotor.compile(lambda x: x + 1 if dynamotor.is_compiling() else x)(x).equal(x + 1)


def test_stances():
    compiled = dynamotor.compile(lambda x: x + 1 if dynamotor.is_compiling() else x - 1)
    with dynamotor.set_stance("fail_on_recompile"), pytest.raises(UsageError, match="DM111"):
        compiled(x)
    with dynamotor.set_stance("eager_on_recompile"):
        assert compiled(x).equal(x - 1)
    assert compiled(x).equal(x + 1)
    other = torch.randn(5)
    for stance, expected in (
        ("eager_on_recompile", other - 1),
        ("force_eager", other - 1),
        ("default", other + 1),
    ):
        with dynamotor.set_stance(stance):
            assert compiled(x).equal(x - 1 if stance == "force_eager" else x + 1)
            assert compiled(other).equal(expected)
    with dynamotor.set_stance("fail_on_recompile"):
        assert compiled(x).equal(x + 1)
        with pytest.raises(UsageError, match="DM111"):
            compiled(torch.randn(7))


def test_stances_as_a_function_and_a_decorator():
    compiled = dynamotor.compile(lambda x: x + 1 if dynamotor.is_compiling() else x - 1)

    @dynamotor.set_stance("force_eager")
    def eager(x):
        return compiled(x)

    assert compiled(x).equal(x + 1)
    assert eager(x).equal(x - 1) and compiled(x).equal(x + 1)
    dynamotor.set_stance("force_eager")
    assert compiled(x).equal(x - 1)
    dynamotor.set_stance("default")
    assert compiled(x).equal(x + 1)
    with pytest.raises(UsageError, match="DM110"):
        dynamotor.set_stance("eager")


def test_gradients_under_force_eager_are_eagers():
    compiled = dynamotor.compile(plain)
    mine = x.clone().requires_grad_()
    y = compiled(mine)
    with dynamotor.set_stance("force_eager"):
        y.sum().backward()  # the backward of a compiled forward is compiled
        (compiled(mine)).sum().backward()
    same = x.clone().requires_grad_()
    (plain(same).sum() * 2).backward()
    torch.testing.assert_close(mine.grad, same.grad)


def test_run_compiles_nothing():
    compiled = dynamotor.compile(lambda x: x + 1 if dynamotor.is_compiling() else x - 1)
    assert dynamotor.run(compiled)(x).equal(x - 1)
    compiled(x)
    assert dynamotor.run(compiled)(x).equal(x + 1)


def test_config_patch_as_a_decorator_and_the_rest():
    @dynamotor.config.patch(strict=True)
    def strict():
        return dynamotor.config.strict

    assert strict() and not dynamotor.config.strict and strict()
    assert dynamotor.cudagraph_mark_step_begin() is None
    assert "native" in dynamotor.list_backends()


@pytest.mark.parametrize(
    "mark",
    [
        dynamotor.nested_compile_region,
        dynamotor.nested_compile_region(),
        torch.compiler.nested_compile_region,
    ],
)
def test_nested_compile_regions_are_captured_like_other_functions(mark):
    region = mark(lambda y: (y * 2).sin())
    assert graphs_and_breaks(lambda x: region(x) + region(x + 1)) == (1, 0)


def test_options_of_inductor(recwarn):
    compiled = dynamotor.compile(
        plain, options={"epilogue_fusion": True, "triton.cudagraphs": False, "fallback_random": True}
    )
    torch.testing.assert_close(compiled(x), plain(x))
    assert "'epilogue_fusion'" in text_of(recwarn)
    settings = compiled.miss.__self__.options.options
    assert settings == {"cuda_graphs": False, "fallback_random": True}
    with pytest.raises(UsageError, match="DM105"):
        dynamotor.compile(plain, options={"warp": 9})


class Doubler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, y):
        return self.inner(y) * 2


def test_replace_torch_compile():
    theirs = torch.compile
    model, in_place = Doubler(), Doubler()
    with dynamotor.replace_torch_compile():
        compiled = torch.compile(model, mode="default", dynamic=None, name="doubler", recompile_limit=4)
        by_name = torch.compile(backend="eager")(plain)
        in_place.compile(backend="inductor", fullgraph=True)
        in_place.inner.compile()
        counters.clear()
        for fn in (compiled, by_name, in_place):
            original = {compiled: model, by_name: plain, in_place: in_place.forward}[fn]
            torch.testing.assert_close(fn(x), original(x))
        torch.compiler.set_stance("eager_then_compile")
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(UsageError, match="DM111"):
            compiled(torch.randn(7, 2, 4))
    assert (
        torch.compile is theirs and counters["capture"]["graphs"] == 4
    )  # in_place, and in_place.inner inside in_place.forward
    assert compiled.state_dict().keys() == model.state_dict().keys()
    in_place(torch.randn(5, 4))


def test_replace_torch_compile_ends_with_an_error():
    theirs = torch.compile
    with pytest.raises(ZeroDivisionError), dynamotor.replace_torch_compile():
        assert torch.compile is not theirs
        _ = 1 / 0
    assert torch.compile is theirs


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.names = ["a", "b"]

    @dynamotor.assume_constant_result
    def parts(self, y):
        return {"same": y, "places": [torch.nonzero(y), len(self.names)]}

    def forward(self, y):
        made = self.linear(y)
        made.add_(1)
        of_made, of_input = self.parts(made), self.parts(y)
        return of_made["places"][0] + of_input["places"][1], of_input["same"] * y


def test_constant_results_of_tensors_and_modules():
    module, other = Counted(), torch.randn(3, 4)
    expected, compiled = module(x), dynamotor.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    later = compiled(other)
    assert later[0].equal(expected[0]) and later[1].allclose(x * other)


def test_a_result_is_not_taken_as_constant_after_a_change():
    @dynamotor.assume_constant_result
    def total(items):
        return sum(items)

    def program(y, items):
        items.append(2.0)
        return y * total(items)

    expected, items = x * 3.0, [1.0]
    assert dynamotor.compile(program)(x, items).equal(expected) and items == [1.0, 2.0]


def test_run_inside_of_a_graph():
    inner = dynamotor.run(lambda y: y.sin() * 10)
    compiled = dynamotor.compile(lambda y: inner(y) + 1, fullgraph=True, backend="eager")
    assert compiled(x).equal(x.sin() * 10 + 1)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, y):
        return self.linear(y.sigmoid())


@dynamotor.disable
class DisabledBlock(Block):
    pass


@pytest.mark.parametrize(
    ("block", "graphs"),
    [
        (lambda: dynamotor.disable(Block()), 2),
        (DisabledBlock, 2),
        (lambda: dynamotor.disable(recursive=False)(Block()), 4),  # the hook and forward are captured
    ],
)
def test_a_disabled_module_stays_a_module(block, graphs):
    model = torch.nn.Sequential(Block(), block(), Block())
    model[1].register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    assert graphs_and_breaks(model)[0] == graphs
    assert isinstance(model[1], Block) and "1.linear.weight" in model.state_dict()


def test_all_dimensions_stay_numbers():
    compiled = dynamotor.compile(plain, backend="eager")
    counters.clear()
    for rows in (2, 3, 4, 5):
        y = torch.randn(rows, 4)
        dynamotor.mark_static(y)
        compiled(y)
    assert counters["capture"]["graphs"] == 4


def test_a_custom_function_is_allowed_in_the_graph():
    @dynamotor.allow_in_graph
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            warnings.filterwarnings("ignore", "what no graph holds")
            ctx.rows = x.size(0)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.rows

    def program(x):
        return Scaled.apply(x.sin()).cos()

    given = x.clone().requires_grad_()
    for backend in ("eager", "native"):
        compiled = dynamotor.compile(program, backend=backend, fullgraph=True)
        found = [torch.autograd.grad(run(given).sum(), given)[0] for run in (compiled, program)]
        torch.testing.assert_close(*found)


@dynamotor.compile(backend="eager")
class Compiled(Block):
    @dynamotor.compile(backend="eager")
    def scaled(self, y):
        return self.linear(y) * 2

    def forward(self, y):
        return self.scaled(y.sin()) + 1


def test_a_class_is_compiled_for_its_instances():
    first, second = Compiled(), Compiled()
    counters.clear()
    for block in (first, second):
        torch.testing.assert_close(block(x), block.linear(x.sin()) * 2 + 1)
    assert isinstance(first, Compiled) and isinstance(first, Block)
    assert counters["capture"]["graphs"] == 2 and not counters["breaks"]


def test_methods_that_are_compiled_are_captured_as_what_they_were():
    assert graphs_and_breaks(torch.nn.Sequential(Compiled(), Compiled())) == (1, 0)


@dynamotor.disable
class Plain:
    def __init__(self, value):
        self.value = value


def test_a_disabled_class_stays_a_class():
    assert graphs_and_breaks(lambda x: x.sin() * Plain(2).value) == (2, 1)
    assert isinstance(Plain(1), Plain)
