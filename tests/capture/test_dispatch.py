"""Dispatchers: hits, misses, keywords, methods, garbage collection, reentrancy and threads."""

import functools
import gc
import sys
import threading
import weakref

import pytest
import torch

import dynamotor
from dynamotor import _C
from dynamotor.capture.dispatch import arg_sources, compile_program, make_entry, miss_reason
from dynamotor.capture.guards import Ambient, Answer, ConstEquals, IdIs, TensorMatch, TypeIs
from dynamotor.capture.source import Arg, Const, DictItem, InstanceDict, SeqItem, TypeAttr


def specialise(limit=16):
    """A dispatcher whose miss makes an entry for the constants it is called with; it counts its misses."""
    made = []

    def miss(dispatcher, args, kwnames):
        made.append((args, kwnames))
        n = len(args) - len(kwnames)
        guards = [
            ConstEquals(source, value) for source, value in zip(arg_sources(["a", "b"], n, kwnames), args)
        ]
        entry = make_entry(guards, [], lambda args=args: ("made for", args), None, n, kwnames)
        if len(dispatcher.entries) < limit:
            dispatcher.add(entry)
        return "missed"

    return _C.Dispatcher(miss, lambda *args, **kwargs: "original", "f"), made


def test_a_miss_makes_an_entry_and_the_next_call_hits():
    f, made = specialise()
    assert f(1, 2) == "missed"
    assert f(1, 2) == ("made for", (1, 2)) == f(1, 2)
    assert (f.hits, f.misses, len(made)) == (2, 1, 1)
    assert "f: 1 entries" in repr(f)


def test_positionals_and_keywords_are_told_apart():
    f, made = specialise()
    for call in (lambda: f(1, b=2), lambda: f(a=1, b=2), lambda: f(b=2, a=1), lambda: f(1, 2)):
        assert call() == "missed" and call() != "missed"
    assert [kwnames for _, kwnames in made] == [("b",), ("a", "b"), ("b", "a"), ()]
    assert f(*[1], **{"".join(["b"]): 2}) == ("made for", (1, 2)), "names are compared by value"


def test_the_entry_that_hits_moves_to_the_front():
    f, _ = specialise()
    for value in range(4):
        f(value)
    first = f.entries[-1]
    f(0)
    assert f.entries[0] is first and len(set(f.entries)) == 4
    f.remove(first)
    assert first not in f.entries and f(0) == "missed"
    f.clear()
    assert f.entries == ()


def test_inputs_are_gathered_and_finish_makes_the_result():
    x = Arg(0, "x")
    table = {"w": torch.ones(2)}
    inputs = [SeqItem(x, 0), DictItem(Const(table, "t"), "w")]
    guards = [
        TypeIs(x, list),
        TensorMatch.of(inputs[0], torch.ones(2)),
        TensorMatch.of(inputs[1], table["w"]),
    ]
    entry = make_entry(
        guards, inputs, lambda a, w: (a + w, a), lambda outs, args: {"sum": outs[0], "args": args}, 1
    )
    f = _C.Dispatcher(lambda *a: "missed", None)
    f.add(entry)
    argument = [torch.full((2,), 3.0)]
    result = f(argument)
    assert result["sum"].tolist() == [4, 4] and result["args"][0] is argument
    table["w"] = torch.full((2,), 5.0)
    assert f(argument)["sum"].tolist() == [8, 8], "a tensor put in the place of another is used from then on"
    assert f([torch.ones(3)]) == "missed"


def test_more_inputs_than_fit_on_the_stack():
    tensors = [torch.full((1,), float(i)) for i in range(700)]
    x = Arg(0, "x")
    inputs = [SeqItem(x, i) for i in range(700)]
    f = _C.Dispatcher(lambda *a: "missed", None)
    f.add(
        make_entry(
            [TypeIs(x, list)],
            inputs,
            lambda *ts: len(ts) == 700 and all(a is b for a, b in zip(ts, tensors)),
            None,
            1,
        )
    )
    assert f(tensors) is True
    assert f(tensors[:10]) == "missed"


def test_exceptions_pass_through():
    f = _C.Dispatcher(lambda *a: 1 / 0, None)
    with pytest.raises(ZeroDivisionError):
        f(1)

    def fails(*args):
        raise KeyError("run")

    f.add(make_entry([], [], fails, None, 1))
    with pytest.raises(KeyError):
        f(1)
    f.clear()
    f.add(make_entry([], [], lambda: 1, fails, 1))
    with pytest.raises(KeyError):
        f(1)


def test_disabled_calls_the_original():
    f, _ = specialise()
    f.disabled = True
    assert f(1) == "original"
    f.disabled = False
    assert f(1) == "missed"


def test_it_stands_in_a_class_as_a_method():
    class Thing:
        method = _C.Dispatcher(lambda self, args, kwnames: args, None, "method")

    thing = Thing()
    assert thing.method(1) == (thing, 1)
    assert Thing.method(thing, 2) == (thing, 2)
    bound = thing.method
    assert bound(3) == (thing, 3) and bound.__self__ is thing


def test_it_can_be_wrapped_and_referenced_weakly():
    f, _ = specialise()
    functools.update_wrapper(f, test_disabled_calls_the_original)
    assert f.__name__ == "test_disabled_calls_the_original" and f.__wrapped__
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


def make_cycle():
    """A module that holds a dispatcher whose entry holds the module and its parameter."""
    module = torch.nn.Linear(2, 2)
    source = DictItem(DictItem(InstanceDict(Const(module, "self")), "_parameters"), "weight")
    f = _C.Dispatcher(lambda *a: None, module.forward)
    f.add(
        make_entry(
            [TensorMatch.of(source, module.weight)],
            [source],
            lambda w: w,
            lambda outs, args: (outs, module),
            0,
        )
    )
    result = f()
    object.__setattr__(module, "compiled", f)
    return weakref.ref(module), weakref.ref(module.weight), result[1] is module


def test_a_cycle_through_the_module_is_collected():
    module, weight, worked = make_cycle()
    gc.collect()
    assert worked and module() is None and weight() is None


def test_arguments_are_not_kept_alive():
    x = Arg(0, "x")
    f = _C.Dispatcher(lambda *a: "missed", None)
    f.add(
        make_entry([TensorMatch.of(SeqItem(x, 0), torch.ones(2))], [SeqItem(x, 0)], lambda t: t + 1, None, 1)
    )
    tensor = torch.ones(2)
    references = sys.getrefcount(tensor)
    argument = [tensor]
    for _ in range(10):
        f(argument)
    del argument
    assert sys.getrefcount(tensor) == references
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


def test_a_guard_that_calls_the_dispatcher_again():
    """Guards may run Python code (a predicate), which may call the same function, add and drop entries."""
    state = {"depth": 0, "value": 0}

    def nosy(value):
        if state["depth"] < 3:
            state["depth"] += 1
            f(0)
            state["value"] += 1  # moves the dict that the guards look at
            f.clear()
            f.add(entry)
            state["depth"] -= 1
        return True

    held = Const(state, "state")
    guards = [Answer(held, nosy, True, "being nosy"), TypeIs(DictItem(held, "value"), int)]
    entry = make_entry(guards, [DictItem(held, "value")], lambda v: v, None, 1)
    f = _C.Dispatcher(lambda *a: "missed", None)
    f.add(entry)
    for _ in range(20):
        # Each call moves the objects that it reads, so after some attempts it may give up: a miss, never a wrong hit.
        result = f(0)
        assert result in (state["value"], "missed")


def test_a_run_that_drops_its_own_dispatcher():
    holder = {}

    def run():
        holder.clear()
        gc.collect()
        return "done"

    holder["f"] = _C.Dispatcher(lambda *a: "missed", None)
    holder["f"].add(make_entry([], [], run, None, 0))
    assert holder["f"]() == "done" and not holder


def test_threads():
    class Settings:
        value = 0

    x = Arg(0, "x")
    f = _C.Dispatcher(lambda dispatcher, args, kwnames: ("missed", args), None)
    for i in range(4):
        guards = [
            ConstEquals(x, i),
            IdIs(TypeAttr(Const(Settings, "s"), "value"), 0),
            Ambient.current(),
        ]
        f.add(make_entry(guards, [], lambda i=i: i, None, 1))
    failures = []

    def work(seed):
        for i in range(3000):
            value = (i * seed) % 5
            result = f(value)
            if (
                result not in (value, ("missed", (value,)))
                or result != value
                and value < 4
                and not changing.is_set()
            ):
                failures.append((value, result))

    changing = threading.Event()
    changing.set()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for i in range(200):
        Settings.value = i % 2
    Settings.value = 0
    for thread in threads:
        thread.join()
    assert not failures


def test_reasons():
    x = Arg(0, "x")
    entry = make_entry([ConstEquals(x, 1)], [], lambda: 1, None, 1)
    assert miss_reason(entry, (2,), 1, ()) == "argument `x` is 2, was 1"
    assert "keywords ['y'], was 1 and []" in miss_reason(entry, (2,), 0, ("y",))
    assert "no guard fails" in miss_reason(entry, (1,), 1, ())
    entry = make_entry([TypeIs(x, list)], [SeqItem(x, 3)], lambda v: 1, None, 1)
    assert miss_reason(entry, ([],), 1, ()) == "x[3] is gone"


def test_sources_below_a_known_object_are_bound():
    x = Arg(0, "x")
    settings = type("Settings", (), {"k": 1})()
    settings.depth = [1]
    by_object = compile_program(
        [IdIs(x, settings), ConstEquals(SeqItem(DictItem(InstanceDict(x), "depth"), 0), 1)], []
    )
    assert by_object.check((settings,)) is not None and by_object.sizes["watches"] >= 3
    settings.depth[0] = 2
    assert by_object.check((settings,)) is None
    settings.depth = [1]
    assert by_object.check((settings,)) is not None
    assert by_object.check((object(),)) is None


def test_malformed_programs_are_refused():
    for nodes, checks, inputs in (
        ([("nothing", -1, 0)], [], []),
        ([("arg", 0, 0)], [], []),
        ([("seq_item", 3, 0)], [], []),
        ([("arg", -1, 0)], [("type_is", 4, int, None)], []),
        ([], [], [2]),
        ([("arg", -1, 0)], [("unknown", 0, int, None)], []),
        ([("const", -1, 0), ("arg", -1, 0)], [], []),
        ([("arg", -1, "x")], [], []),
    ):
        with pytest.raises((ValueError, TypeError)):
            _C.GuardProgram(nodes, checks, inputs)
    with pytest.raises(TypeError):
        _C.Dispatcher(print, print).add(3)


def test_named_results_are_made_without_python():
    x = torch.rand(3, 4)
    for function in (lambda x: x.max(1), torch.frexp, lambda x: torch.sort(x, 1)):
        compiled = dynamotor.compile(function)
        got, wanted = compiled(x), function(x)
        assert type(got) is type(wanted)
        torch.testing.assert_close(tuple(got), tuple(wanted))
        assert type(compiled.entries[0].finish) is type(_C.first_result)
    turned = dynamotor.compile(lambda x: torch.return_types.max(x.max(1)[::-1]))(x)
    assert torch.equal(turned[1], x.max(1)[0])
    finish = _C.named_by(torch.return_types.max)
    assert finish((1, 2), ()) == (1, 2)
    with pytest.raises(TypeError):
        finish((1, 2))
    with pytest.raises(TypeError, match="2-sequence"):
        finish((1, 2, 3), ())
