"""An example for each public name: `<name>_example` is shown on the API page and run by tests/test_docs.py.

A function's body stands alone: the page shows it without the function around it.
"""

# ruff: noqa: PLC0415  # an example imports its own names


def compile_example() -> None:
    import torch

    import dynamotor

    model = torch.nn.Linear(4, 2)
    fast = dynamotor.compile(model, fullgraph=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), model(x))

    @dynamotor.compile(dynamic=True)
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.sin() * factor

    assert scaled(torch.zeros(5), 2.0).sum() == 0


def compile_step_example() -> None:
    import torch

    import dynamotor

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dynamotor.compile_step(model, torch.nn.functional.mse_loss, optimizer)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    losses = [float(step(x, y)) for _ in range(5)]  # forward, loss, backward and update
    assert losses[-1] < losses[0]


def compile_fx_example() -> None:
    import torch

    import dynamotor

    graph = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    x = torch.zeros(3)
    run = dynamotor.compile_fx(graph, [x])
    torch.testing.assert_close(run(x), x + 1)


def disable_example() -> None:
    import torch

    import dynamotor

    @dynamotor.disable
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    found = dynamotor.explain(lambda x: plain(x.sin()).cos())(torch.ones(2))
    assert found.graph_break_count == 1


def reset_example() -> None:
    import torch

    import dynamotor

    fast = dynamotor.compile(lambda x: x + 1)
    fast(torch.ones(2))
    dynamotor.reset()  # programs and counters are forgotten; the next call compiles again
    assert fast(torch.ones(2)).tolist() == [2.0, 2.0]


def run_example() -> None:
    import torch

    import dynamotor

    fast = dynamotor.compile(lambda x: x + 1)
    fast(torch.ones(2))
    assert dynamotor.run(fast)(torch.ones(2)).tolist() == [2.0, 2.0]  # a new size would run in eager


def set_stance_example() -> None:
    import torch

    import dynamotor

    fast = dynamotor.compile(lambda x: x + 1)
    with dynamotor.set_stance("force_eager"):
        fast(torch.ones(2))  # nothing is compiled


def is_compiling_example() -> None:
    import torch

    import dynamotor

    fast = dynamotor.compile(lambda x: x + 1 if dynamotor.is_compiling() else x)
    assert fast(torch.zeros(1)).item() == 1 and not dynamotor.is_compiling()


def mark_dynamic_example() -> None:
    import torch

    import dynamotor

    fast = dynamotor.compile(lambda x: x * 2)
    x = torch.randn(8, 3)
    dynamotor.mark_dynamic(x, 0, min=2, max=64)
    fast(x), fast(torch.randn(16, 3))
    assert dynamotor.counters["frames"]["captured"] >= 1  # one program serves both


def mark_static_example() -> None:
    import torch

    import dynamotor

    x = torch.randn(8, 3)
    dynamotor.mark_static(x, 1)  # each size of dimension 1 has a program of its own
    dynamotor.compile(lambda x: x * 2)(x)


def allow_in_graph_example() -> None:
    import torch

    import dynamotor

    @dynamotor.allow_in_graph
    def helper(x: torch.Tensor) -> torch.Tensor:  # a node of the graph: its Python is not captured
        return x * 2

    assert dynamotor.explain(lambda x: helper(x) + 1)(torch.ones(2)).graph_break_count == 0


def disallow_in_graph_example() -> None:
    import torch

    import dynamotor

    @dynamotor.disallow_in_graph
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert dynamotor.explain(lambda x: helper(x) + 1)(torch.ones(2)).graph_break_count == 1


def assume_constant_result_example() -> None:
    import torch

    import dynamotor

    @dynamotor.assume_constant_result
    def factor() -> float:
        return 2.0

    assert dynamotor.compile(lambda x: x * factor(), fullgraph=True)(torch.ones(1)).item() == 2


def nested_compile_region_example() -> None:
    import torch

    import dynamotor

    @dynamotor.nested_compile_region
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x

    assert dynamotor.compile(lambda x: block(block(x)), fullgraph=True)(torch.zeros(1)).item() == 0


def cudagraph_mark_step_begin_example() -> None:
    import torch

    import dynamotor

    fast = dynamotor.compile(lambda x: x + 1, mode="reduce-overhead")
    for _ in range(3):
        dynamotor.cudagraph_mark_step_begin()  # results of the step before may be overwritten from here on
        fast(torch.ones(2))


def explain_example() -> None:
    import torch

    import dynamotor

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        return y.cos()

    found = dynamotor.explain(program)(torch.ones(2))
    assert (found.graph_count, found.graph_break_count) == (2, 1)
    print(found)  # each break with its line, its cause and its cure


def lower_example() -> None:
    import torch

    import dynamotor

    found = dynamotor.lower(lambda x: (x.sin() + 1).sum(), torch.ones(8))
    assert "sin" in str(found)  # the graphs, the schedule and the generated code


def report_example() -> None:
    import tempfile
    from pathlib import Path

    import torch

    import dynamotor

    with tempfile.TemporaryDirectory() as folder:
        dynamotor.report(lambda x: x.sin() + 1, torch.ones(8), path=f"{folder}/report.html")
        assert Path(folder, "report.html").stat().st_size > 1000


def counters_example() -> None:
    import torch

    import dynamotor

    dynamotor.reset()
    dynamotor.compile(lambda x: x + 1)(torch.ones(2))
    assert dynamotor.counters["frames"]["captured"] == 1


def export_example() -> None:
    import torch

    import dynamotor

    model = torch.nn.Linear(4, 2)
    x = torch.randn(3, 4)
    exported = dynamotor.export(model, x, dynamic_shapes=({0: "batch"},))
    torch.testing.assert_close(exported.module()(torch.ones(7, 4)), model(torch.ones(7, 4)))
    print(exported.graph_module.code)


def load_example() -> None:
    import tempfile

    import torch

    import dynamotor

    model, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    with tempfile.TemporaryDirectory() as folder:
        dynamotor.export(model, x).package(f"{folder}/model.dm")
        loaded = dynamotor.load(f"{folder}/model.dm")
    torch.testing.assert_close(loaded(x), model(x))


def package_example() -> None:
    import tempfile

    import torch

    import dynamotor

    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.total.add_(x.sum(0)) * 2

    model, x = Running(), torch.ones(4, 3)
    with tempfile.TemporaryDirectory() as folder:
        several = dynamotor.export(model, x, dynamic_shapes={"x": {0: "n"}})
        one = dynamotor.export(model, x[:1])
        dynamotor.package(f"{folder}/running.dm", {"several": several, "one": one})
        loaded = dynamotor.load(f"{folder}/running.dm")
    loaded.several(torch.ones(9, 3))
    assert loaded.one(x[:1]).tolist() == [20, 20, 20]
    assert loaded.state["total"].tolist() == [10, 10, 10]


def save_cache_artifacts_example() -> None:
    import torch

    import dynamotor

    dynamotor.compile(lambda x: x.sin() + 1)(torch.ones(2))
    saved = dynamotor.save_cache_artifacts()  # bytes for other machines of the same kind
    assert dynamotor.load_cache_artifacts(saved) >= 1


load_cache_artifacts_example = save_cache_artifacts_example


def register_backend_example() -> None:
    from collections.abc import Callable, Sequence

    import torch

    import dynamotor

    @dynamotor.register_backend
    def printing(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        print(graph.code)
        return graph.forward

    assert dynamotor.compile(lambda x: x + 1, backend="printing")(torch.zeros(1)).item() == 1


def list_backends_example() -> None:
    import dynamotor

    assert {"native", "eager", "aot_eager"} <= set(dynamotor.list_backends())


def replace_torch_compile_example() -> None:
    import torch

    import dynamotor

    with dynamotor.replace_torch_compile():
        fast = torch.compile(lambda x: x + 1)  # dynamotor compiles it
    assert fast(torch.zeros(1)).item() == 1


def config_example() -> None:
    import torch

    import dynamotor

    with dynamotor.config.patch(check=True):  # each graph beside eager: a wrong result raises
        dynamotor.compile(lambda x: x.sin() + 1)(torch.ones(2))


def options_example() -> None:
    import torch

    import dynamotor

    options: dynamotor.Options = {"threads": 1, "exact": True}  # settings for one callable, typed
    dynamotor.compile(lambda x: x.sin() + 1, options=options)(torch.ones(2))
