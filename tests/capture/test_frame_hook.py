"""The frame hook: functions entered while it is on are answered by dispatchers, with references and
exceptions right.
"""

import gc
import sys
import threading
import weakref

import pytest
import torch

from dynamotor import _C


def dispatcher_of(function):
    """A dispatcher that never hits: its miss calls the function on the bound parameters."""
    return _C.Dispatcher(lambda self, args, kwnames: function(*args), function, "test")


def hook_for(name, answer):
    """A hook that answers for functions of one name, and counts the questions."""
    asked = []

    def callback(code, function):
        asked.append(code.co_name)
        return answer if code.co_name == name else None

    hook = _C.FrameHook(callback)
    return hook, asked


def target(a, b=2, *rest, c, **more):
    return ("native", a, b, rest, c, more)


def calls_target(x):
    return target(x, c=3), target(x, 1, 2, 3, c=4, d=5)


def test_bound_parameters_reach_the_dispatcher_and_its_result_is_the_calls():
    hook, asked = hook_for("target", dispatcher_of(lambda *values: values))
    assert hook.call(calls_target, 9) == ((9, 2, 3, (), {}), (9, 1, 4, (2, 3), {"d": 5}))
    assert asked == ["calls_target", "target"], "asked once for each code object"
    assert target(1, c=1)[0] == "native", "the hook is off again"


def test_functions_without_an_answer_run_natively():
    hook, _ = hook_for("nothing", None)
    assert hook.call(calls_target, 9)[0] == target(9, c=3)


def test_exceptions_come_out_at_the_call():
    def fails(*values):
        raise KeyError(values[0])

    hook, _ = hook_for("target", dispatcher_of(fails))

    def caller(x):
        try:
            target(x, c=1)
        except KeyError as error:
            return error.args
        return None

    for _ in range(3):
        assert hook.call(caller, 4) == (4,)
    with pytest.raises(KeyError):
        hook.call(lambda: target(5, c=1))


def test_an_exception_of_the_callback_comes_out():
    def callback(code, function):
        raise ValueError("callback")

    with pytest.raises(ValueError, match="callback"):
        _C.FrameHook(callback).call(one_local, 1)
    with pytest.raises(TypeError, match="Dispatcher or None"):
        _C.FrameHook(lambda code, function: 3).call(one_local, 1)


def no_parameters():
    return len("native") and "native"


def one_local(x):
    return x


def test_functions_without_parameters():
    hook, _ = hook_for("no_parameters", dispatcher_of(lambda: "answered"))
    assert hook.call(lambda: no_parameters()) == "answered"


def test_references_balance():
    class Thing:
        pass

    hook, _ = hook_for("one_local", dispatcher_of(lambda x: [x]))
    thing = Thing()
    before = sys.getrefcount(thing)
    for _ in range(100):
        result = hook.call(lambda: one_local(thing))  # noqa: F821
        assert result == [thing]
    del result
    gc.collect()
    assert sys.getrefcount(thing) == before
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


def test_generators_classes_and_comprehensions_still_work():
    hook, asked = hook_for("nothing", None)

    def body():
        class Inner:
            x = [i for i in range(3)]  # noqa: C416

        def generator():
            got = yield 1
            yield got

        g = generator()
        return (
            Inner.x,
            next(g),
            g.send(5),
            [k * 2 for k in (1, 2)],
            sorted([3, 1], key=lambda v: v),
            eval("1+1"),
        )

    assert hook.call(body) == ([0, 1, 2], 1, 5, [2, 4], [1, 3], 2)
    assert "generator" not in asked and "Inner" not in asked


def test_closures_are_asked_for_each_function():
    def make(n):
        def inner():
            return n

        return inner

    asked = []

    def callback(code, function):
        if code.co_name != "inner":
            return None
        asked.append(function)
        return dispatcher_of(lambda: ("answered", function()))

    hook = _C.FrameHook(callback)
    one, two = make(1), make(2)
    assert hook.call(lambda: (one(), two(), one())) == (("answered", 1), ("answered", 2), ("answered", 1))
    assert asked == [one, two, one]


def test_a_dispatcher_runs_with_the_hook_off_and_it_is_on_again_after():
    seen = []

    def answered(x):
        seen.append("in")
        return calls_target(x)[0][0]

    hook, asked = hook_for("one_local", dispatcher_of(answered))
    assert hook.call(lambda: (one_local(1), one_local(2))) == ("native", "native")
    assert len(seen) == 2
    assert "target" not in asked, "the dispatcher's own calls are not hooked"


def test_a_disabled_dispatcher_lets_the_frame_run():
    dispatcher = dispatcher_of(lambda x: "answered")
    dispatcher.disabled = True
    hook, _ = hook_for("one_local", dispatcher)
    assert hook.call(lambda: one_local(1)) == 1


def test_other_threads_are_not_hooked():
    hook, _ = hook_for("one_local", dispatcher_of(lambda x: "answered"))
    results = []

    def body():
        thread = threading.Thread(target=lambda: results.append(one_local(1)))
        thread.start()
        thread.join()
        results.append(one_local(2))

    hook.call(body)
    assert results == [1, "answered"]


def test_hooks_nest_and_are_restored():
    outer, _ = hook_for("one_local", dispatcher_of(lambda x: "outer"))
    inner, _ = hook_for("one_local", dispatcher_of(lambda x: "inner"))

    def body():
        return one_local(1), inner.call(lambda: one_local(1)), one_local(1)

    assert outer.call(body) == ("outer", "inner", "outer")
    previous = _C.set_frame_hook(outer)
    assert previous is None
    try:
        assert one_local(1) == "outer"
    finally:
        assert _C.set_frame_hook(None) is outer
    assert one_local(1) == 1


def test_deep_recursion_still_raises_recursion_error():
    hook, _ = hook_for("nothing", None)

    def deep(n):
        return deep(n + 1)

    with pytest.raises(RecursionError):
        hook.call(deep, 0)


def test_only_frames_that_concern_some_classes_are_asked_for():
    seen = []

    def callback(code, function):
        seen.append(code.co_name)

    def takes(x, *rest, **more):
        return x

    def body(value):
        return takes(value)

    hook = _C.FrameHook(callback, (torch.Tensor, torch.nn.Module))
    for value, asked in ((3, []), ([3], []), (torch.ones(1), ["body", "takes"])):
        seen.clear()
        hook.call(body, value)
        assert seen == asked
    for wrap in (lambda t: [t], lambda t: (1, t), lambda t: {"k": t}):
        hook = _C.FrameHook(callback, (torch.Tensor,))
        seen.clear()
        hook.call(body, wrap(torch.ones(1)))
        assert seen == ["body", "takes"]
    hook = _C.FrameHook(callback, (torch.nn.Module,))
    hook.skip(body.__code__)
    seen.clear()
    hook.call(body, torch.nn.ReLU())
    assert seen == ["takes"]
    with pytest.raises(TypeError):
        _C.FrameHook(callback, (3,))


@pytest.mark.parametrize("install", [sys.settrace, sys.setprofile], ids=["trace", "profile"])
def test_tracing_and_profiling_go_on(install):
    events = []

    def tracer(frame, event, argument):
        events.append(event)
        return tracer

    hook, _ = hook_for("one_local", dispatcher_of(lambda x: ("answered", x)))
    raising, _ = hook_for("one_local", dispatcher_of(lambda x: [].pop()))
    before = (sys.gettrace if install is sys.settrace else sys.getprofile)()
    install(tracer)
    try:
        result = hook.call(lambda: one_local(1))
        with pytest.raises(IndexError):
            raising.call(lambda: one_local(1))
    finally:
        install(before)
    assert result == ("answered", 1) and "call" in events and "return" in events
