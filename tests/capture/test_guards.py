"""Guards: every row agrees with its C twin, on what passes, on what changed, and after it changed back."""

import collections
import enum
import math
import sys
import time
import types
import weakref

import pytest
import torch

from dynamotor import _C
from dynamotor.capture import guards
from dynamotor.capture.dispatch import compile_program
from dynamotor.capture.guards import (
    Absent,
    Ambient,
    Answer,
    Apart,
    ConstEquals,
    DictKeys,
    DigitLimit,
    Distinct,
    IdIs,
    Length,
    NoOverlap,
    Replaceable,
    SameObject,
    TensorIs,
    TensorMatch,
    TypeIs,
    const_equal,
    first_failure,
)
from dynamotor.capture.source import (
    Arg,
    Attr,
    Const,
    DictItem,
    InstanceDict,
    SeqItem,
    SlotOf,
    TypeAttr,
)

x, y = Arg(0, "x"), Arg(1, "y")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


CONSTANTS = [
    0,
    1,
    True,
    False,
    1.0,
    0.0,
    -0.0,
    math.nan,
    math.inf,
    "1",
    b"1",
    None,
    (1, 2),
    (1, 2.0),
    (1, (True,)),
    1 + 0j,
    slice(1, 2),
    slice(1, 2.0),
    ...,
    Color.RED,
    Color.BLUE,
    torch.float32,
    torch.float64,
    torch.device("cpu"),
    torch.device("meta"),
    torch.Size([1, 2]),
    frozenset({1}),
    frozenset({1.0}),
    range(3),
    torch.strided,
    10**30,
]


@pytest.mark.parametrize("then", range(len(CONSTANTS)))
def test_constants_are_equal_to_themselves_only(then):
    program = compile_program([ConstEquals(x, CONSTANTS[then])], [])
    for now, value in enumerate(CONSTANTS):
        assert const_equal(value, CONSTANTS[then]) == (now == then), (value, CONSTANTS[then])
        assert (program.check((value,)) is not None) == (now == then), (value, CONSTANTS[then])
    for fresh in (float("nan"), (1, (True,)), 10**30, "".join(["1"])):
        assert (program.check((fresh,)) is not None) == const_equal(fresh, CONSTANTS[then])


def tensors():
    base = torch.randn(4, 6)
    yield "same", torch.randn(2, 3), True
    yield "parameter", torch.nn.Parameter(torch.randn(2, 3)), False
    yield "shape", torch.randn(2, 4), False
    yield "rank", torch.randn(2, 3, 1), False
    yield "stride", torch.randn(3, 2).t(), False
    yield "dtype", torch.randn(2, 3).double(), False
    yield "device", torch.empty(2, 3, device="meta"), False
    yield "requires_grad", torch.randn(2, 3, requires_grad=True), False
    yield "view", base[:2, :3], False
    yield "offset", torch.randn(12)[6:].view(2, 3), True
    yield "sparse", torch.randn(2, 3).to_sparse(), False
    yield "conjugate", torch.randn(2, 3, dtype=torch.complex64).conj(), False
    with torch.inference_mode():
        inference = torch.randn(2, 3)
    yield "inference", inference, False
    yield "subclass", torch.randn(2, 3).as_subclass(type("Sub", (torch.Tensor,), {})), False
    yield "no tensor", 3, False


def replaced():
    raised = ValueError()
    try:
        raise raised
    except ValueError:
        yield raised, False  # its frames may hold what runs code at its end
    yield ValueError().with_traceback(None), True  # Python 3.11 stores None
    yield ValueError(), True
    yield type("Ends", (), {"__del__": lambda self: None})(), False
    yield 3, True


@pytest.mark.parametrize("value, passes", list(replaced()))
def test_what_may_be_replaced_without_running_code(value, passes):
    guard = Replaceable(x, "key")
    assert guard.check(({"key": value},)) == passes
    assert (compile_program([guard], []).check(({"key": value},)) is not None) == passes


@pytest.mark.parametrize(
    "name, value, passes", list(tensors()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_tensor_match(name, value, passes):
    guard = TensorMatch.of(x, torch.randn(2, 3))
    assert guard.check((value,)) == passes
    assert (compile_program([guard], []).check((value,)) is not None) == passes
    assert passes or "was" in guard.reason((value,))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint16]
)
def test_tensor_match_of_every_kind_of_dtype(dtype):
    tensor = torch.empty(3, dtype=dtype)
    program = compile_program([TensorMatch.of(x, tensor)], [x])
    assert program.check((torch.empty(3, dtype=dtype),)) is not None
    assert program.check((torch.empty(3),)) is None


def test_tensor_match_with_wild_sizes():
    guard = TensorMatch(
        x,
        torch.Tensor,
        (None, 3),
        (None, 1),
        torch.float32,
        torch.device("cpu"),
        False,
        TensorMatch.of(x, torch.ones(1)).keys,
    )
    program = compile_program([guard], [])
    for value, passes in ((torch.ones(7, 3), True), (torch.ones(7, 4), False), (torch.ones(3), False)):
        assert guard.check((value,)) == passes == (program.check((value,)) is not None)


class Plain:
    here = "class"

    def __init__(self, **values):
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("a", "b")


def held(value):
    return Const(value, "held")


def check_change(guards, change, undo, args=(), inputs=()):
    """The guards hold; after `change` they do not, after `undo` they do: in Python and in C, called again and
    again.
    """
    program = compile_program(guards, list(inputs))

    def both():
        in_python = first_failure(tuple(guards), args) is None
        in_c = [program.check(args) is not None for _ in range(3)]
        assert in_c == [in_python] * 3, (in_c, in_python)
        return in_python

    assert both()
    for _ in range(2):
        change()
        assert not both()
        assert all(guard.reason(args) for guard in guards if not guard.check(args))
        undo()
        assert both()
    return program


def test_a_tensor_that_is_not_kept_alive():
    box = Plain(w=torch.ones(2))
    first, other = box.w, torch.ones(2)
    guard = TensorIs.of(DictItem(InstanceDict(held(box)), "w"), box.w)
    program = check_change([guard], setter(box, "w", other), setter(box, "w", first))
    box.w = None
    del first
    assert guard.is_gone and program.check(()) is None and not guard.check(())


def setter(target, name, value):
    return lambda: setattr(target, name, value)


def test_an_attribute():
    obj = Plain(k=3)
    check_change(
        [ConstEquals(DictItem(InstanceDict(held(obj)), "k"), 3)], setter(obj, "k", 4), setter(obj, "k", 3)
    )


def test_stores_that_the_interpreter_specialises():
    """CPython keeps attributes outside a dict until one is asked for, and specialises stores: both must move
    the version.
    """

    class Bare:
        def __init__(self):
            self.k = 0

    def store(obj, value):
        obj.k = value

    first = Bare()
    for i in range(200):
        store(first, i)
    obj = Bare()
    program = compile_program([ConstEquals(DictItem(InstanceDict(held(obj)), "k"), 0)], [])
    for i in range(300):
        store(obj, i % 2)
        assert (program.check(()) is not None) == (i % 2 == 0)
        store(first, i)


def test_an_attribute_of_an_argument():
    obj = Plain(k=3)
    guards = [TypeIs(x, Plain), ConstEquals(DictItem(InstanceDict(x), "k"), 3)]
    check_change(guards, setter(obj, "k", 4), setter(obj, "k", 3), (obj,))


def test_an_attribute_deleted():
    obj = Plain(k=3)
    check_change(
        [ConstEquals(DictItem(InstanceDict(held(obj)), "k"), 3)],
        lambda: delattr(obj, "k"),
        setter(obj, "k", 3),
    )


def test_an_unrelated_attribute_does_not_matter():
    obj = Plain(k=3, count=0)
    program = compile_program([ConstEquals(DictItem(InstanceDict(held(obj)), "k"), 3)], [])
    for _ in range(5):
        obj.count += 1
        assert program.check(()) is not None
    assert program.sizes["rebinds"] == 1, "only the keys read from the dict are looked at again"


def test_instance_attribute_shadows_the_class():
    obj = Plain()
    guards = [
        Absent(DictItem(InstanceDict(held(obj)), "here")),
        ConstEquals(TypeAttr(held(Plain), "here"), "class"),
    ]
    check_change(guards, setter(obj, "here", 1), lambda: delattr(obj, "here"))
    check_change(guards, setter(Plain, "here", 1), setter(Plain, "here", "class"))


def test_the_class_of_an_object():
    class Other(Plain):
        pass

    obj = Plain()
    check_change([TypeIs(held(obj), Plain)], setter(obj, "__class__", Other), setter(obj, "__class__", Plain))
    check_change(
        [Absent(DictItem(InstanceDict(held(obj)), "q"))], setter(obj, "q", 1), lambda: delattr(obj, "q")
    )
    program = compile_program([Absent(DictItem(InstanceDict(held(obj)), "q"))], [])
    assert program.check(()) is not None
    obj.__class__ = Other
    assert program.check(()) is None, "reading a held object's dict guards its class"


def test_the_dict_of_an_object_replaced():
    obj = Plain(k=3)
    old, new = obj.__dict__, {"k": 4}
    guards = [ConstEquals(DictItem(InstanceDict(held(obj)), "k"), 3)]
    check_change(guards, setter(obj, "__dict__", new), setter(obj, "__dict__", old))


def test_a_method_on_the_class_and_on_a_base():
    class Base:
        def method(self):
            return 1

    class Derived(Base):
        pass

    obj, original = Derived(), Base.method
    guards = [
        TypeIs(x, Derived),
        IdIs(TypeAttr(held(Derived), "method"), original),
        Absent(TypeAttr(held(Derived), "extra")),
    ]
    check_change(guards, setter(Base, "method", len), setter(Base, "method", original), (obj,))
    check_change(guards, setter(Derived, "method", len), lambda: delattr(Derived, "method"), (obj,))
    check_change(guards, setter(Base, "extra", 1), lambda: delattr(Base, "extra"), (obj,))

    class Another:
        def method(self):
            return 2

    check_change(
        guards, setter(Derived, "__bases__", (Another,)), setter(Derived, "__bases__", (Base,)), (obj,)
    )


def test_a_class_whose_method_changes_at_every_call_stays_correct():
    class Thing:
        value = 0

    program = compile_program([ConstEquals(TypeAttr(held(Thing), "value"), 0)], [])
    for i in range(300):
        Thing.value = i % 3
        assert (program.check(()) is not None) == (i % 3 == 0)


def test_globals_closures_and_defaults():
    namespace = {"g": 1}
    exec("def f(a, b=2, *, c=3):\n return g, len", namespace)
    f = namespace["f"]
    check_change(
        [ConstEquals(DictItem(SlotOf(held(f), "__globals__"), "g"), 1)],
        lambda: namespace.update(g=2),
        lambda: namespace.update(g=1),
    )
    check_change(
        [Absent(DictItem(SlotOf(held(f), "__globals__"), "len"))],
        lambda: namespace.update(len=3),
        lambda: namespace.pop("len"),
    )
    check_change(
        [ConstEquals(SeqItem(SlotOf(held(f), "__defaults__"), 0), 2)],
        setter(f, "__defaults__", (5,)),
        setter(f, "__defaults__", (2,)),
    )
    check_change(
        [ConstEquals(DictItem(SlotOf(held(f), "__kwdefaults__"), "c"), 3)],
        lambda: f.__kwdefaults__.update(c=4),
        lambda: f.__kwdefaults__.update(c=3),
    )
    check_change(
        [ConstEquals(DictItem(SlotOf(held(f), "__kwdefaults__"), "c"), 3)],
        setter(f, "__kwdefaults__", None),
        setter(f, "__kwdefaults__", {"c": 3}),
    )
    code = f.__code__
    check_change(
        [IdIs(SlotOf(held(f), "__code__"), code)],
        setter(f, "__code__", (lambda a, b=2, *, c=3: 1).__code__),
        setter(f, "__code__", code),
    )
    check_change(
        [Absent(DictItem(SlotOf(held(f), "__dict__"), "mark"))],
        setter(f, "mark", 1),
        lambda: delattr(f, "mark"),
    )


def test_cells():
    def outer(n):
        def inner():
            return n, later

        def set_n(value):
            nonlocal n
            n = value

        def set_later(value):
            nonlocal later
            later = value

        def drop_later():
            nonlocal later
            del later

        if False:
            later = 0
        return inner, set_n, set_later, drop_later

    inner, set_n, set_later, drop_later = outer(1)
    where = inner.__code__.co_freevars.index
    n, later = [
        SlotOf(SeqItem(SlotOf(held(inner), "__closure__"), where(name)), "cell_contents")
        for name in ("n", "later")
    ]
    check_change([ConstEquals(n, 1)], lambda: set_n(2), lambda: set_n(1))
    check_change([Absent(later)], lambda: set_later(2), drop_later)
    cell = inner.__closure__[where("n")]
    check_change([ConstEquals(SlotOf(held(cell), "cell_contents"), 1)], lambda: set_n(2), lambda: set_n(1))
    check_change([ConstEquals(SlotOf(x, "cell_contents"), 1)], lambda: set_n(2), lambda: set_n(1), (cell,))
    check_change(
        [Absent(SlotOf(x, "cell_contents"))],
        lambda: set_later(2),
        drop_later,
        (inner.__closure__[where("later")],),
    )


def test_lists_and_tuples():
    items = [1, "two", 3.0]
    guards = [TypeIs(held(items), list), Length(held(items), 3), ConstEquals(SeqItem(held(items), 1), "two")]
    check_change(guards, lambda: items.append(4), items.pop)
    check_change(guards, lambda: items.__setitem__(1, "2"), lambda: items.__setitem__(1, "two"))
    check_change(
        [Length(x, 3), ConstEquals(SeqItem(x, 1), "two")], lambda: items.append(4), items.pop, (items,)
    )
    check_change([ConstEquals(SeqItem(held(items), 2), 3.0)], items.pop, lambda: items.append(3.0))


def test_dicts():
    table = {"a": 1, "b": 2}
    guards = [DictKeys(held(table), ("a", "b")), ConstEquals(DictItem(held(table), "b"), 2)]
    check_change(guards, lambda: table.update(c=3), lambda: table.pop("c"))
    check_change(guards, lambda: table.update(b=3), lambda: table.update(b=2))

    def reorder():
        table["a"] = table.pop("a")

    def restore():
        table["b"] = table.pop("b")

    check_change(guards, reorder, restore)
    check_change([Length(held(table), 2)], lambda: table.update(c=3), lambda: table.pop("c"))
    check_change([DictKeys(x, ("a", "b"))], lambda: table.update(c=3), lambda: table.pop("c"), (table,))
    assert compile_program([DictKeys(x, (1,))], []).check(({True: 0},)) is None


def test_ordered_dicts_see_a_move():
    table = collections.OrderedDict(a=1, b=2)
    check_change(
        [DictKeys(held(table), ("a", "b"))], lambda: table.move_to_end("a"), lambda: table.move_to_end("b")
    )
    empty = collections.OrderedDict()
    check_change([DictKeys(held(empty), ())], lambda: empty.update(a=1), empty.clear)


def test_sets_and_questions():
    items = {1, 2}
    check_change(
        [Answer(held(items), frozenset, frozenset(items), "the items")],
        lambda: items.add(3),
        lambda: items.remove(3),
    )
    check_change(
        [Answer(held(items), frozenset, frozenset(items), "the items")],
        lambda: items.add(3),
        lambda: items.remove(3),
    )
    check_change([Length(held(items), 2)], lambda: items.add(3), lambda: items.remove(3))
    box = [1]
    check_change(
        [Answer(held(box), lambda b: b[0] < 2, True, "being small")],
        lambda: box.append(box.pop() + 5),
        lambda: box.append(box.pop() - 5),
    )
    failing = compile_program([Answer(x, lambda v: v / 0, 1, "a quotient")], [])
    assert failing.check((1,)) is None


def test_slots_and_other_getattrs():
    obj = Slotted()
    obj.a = 1
    guards = [ConstEquals(Attr(held(obj), "a"), 1), Absent(Attr(held(obj), "b"))]
    check_change(guards, setter(obj, "a", 2), setter(obj, "a", 1))
    check_change(guards, setter(obj, "b", 2), lambda: delattr(obj, "b"))
    check_change([ConstEquals(Attr(x, "a"), 1)], lambda: delattr(obj, "a"), setter(obj, "a", 1), (obj,))
    holder = Plain(inner=obj)
    below = Attr(DictItem(InstanceDict(held(holder)), "inner"), "a")
    other = Slotted()
    check_change(
        [ConstEquals(below, 1)], setter(holder, "inner", other), setter(holder, "inner", obj), inputs=[below]
    )


def test_bound_methods():
    obj = Plain()
    method = types.MethodType(len, obj)
    guards = [TypeIs(x, types.MethodType), IdIs(SlotOf(x, "__self__"), obj), IdIs(SlotOf(x, "__func__"), len)]
    program = compile_program(guards, [])
    assert program.check((method,)) is not None
    assert program.check((types.MethodType(len, Plain()),)) is None
    assert program.check((types.MethodType(abs, obj),)) is None
    assert program.check((len,)) is None


def test_a_module_that_changes():
    module = types.ModuleType("m")
    module.value = 1
    guards = [ConstEquals(DictItem(InstanceDict(held(module)), "value"), 1)]
    check_change(guards, setter(module, "value", 2), setter(module, "value", 1))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)


def weight_source(root):
    modules = DictItem(InstanceDict(root), "_modules")
    inner = DictItem(modules, "inner")
    return DictItem(DictItem(InstanceDict(inner), "_parameters"), "weight")


@pytest.mark.parametrize("root_kind", ["held", "argument"])
def test_parameters_changed_in_place_and_replaced(root_kind):
    net = Net()
    root, args = (held(net), ()) if root_kind == "held" else (x, (net,))
    source = weight_source(root)
    guards = [TensorMatch.of(source, net.inner.weight)]
    check_change(guards, net.half, net.float, args, [source])
    check_change(
        guards,
        lambda: net.inner.weight.requires_grad_(False),
        lambda: net.inner.weight.requires_grad_(True),
        args,
        [source],
    )

    def set_data(shape):
        net.inner.weight.data = torch.zeros(shape)

    check_change(guards, lambda: set_data((4, 3)), lambda: set_data((3, 3)), args, [source])
    program = compile_program(guards, [source])
    assert program.check(args)[0] is net.inner.weight
    net.inner.weight = torch.nn.Parameter(torch.ones(3, 3))
    assert program.check(args)[0] is net.inner.weight, "a new parameter of the same kind is bound"
    net.inner = torch.nn.Linear(3, 3)
    assert program.check(args)[0] is net.inner.weight
    net.inner = torch.nn.Linear(3, 4)
    assert program.check(args) is None


def test_same_and_distinct_objects():
    a, b = torch.ones(2), torch.ones(2)
    same, distinct = (
        compile_program([SameObject(x, (y,))], []),
        compile_program([Distinct(x, (y, held(a)))], []),
    )
    assert same.check((a, a)) is not None and same.check((a, b)) is None
    assert distinct.check((a, b)) is None and distinct.check((b, b)) is None
    assert distinct.check((b, torch.ones(2))) is not None
    assert not Distinct(x, (y,)).check((a, a)) and Distinct(x, (y,)).check((a, b))


def test_changed_objects_are_distinct_from_all_others():
    a, b, c = torch.ones(2), torch.ones(2), torch.ones(2)
    guard = Distinct(x, (y, Arg(2, "z"), held(a)), 2)  # x and y change
    program = compile_program([guard], [])
    for args, holds in [
        ((b, c, torch.ones(2)), True),
        ((b, c, a), True),  # two others may be one object
        ((b, b, c), False),
        ((b, c, b), False),
        ((c, b, b), False),
        ((b, a, c), False),
        ((a, b, c), False),
    ]:
        assert guard.check(args) is (program.check(args) is not None) is holds
    assert guard.reason((b, c, b)) == "`x` and `z` were different objects and are one now"
    assert guard.reason((b, c)) == "`z` is gone"


def test_overlapping_memory():
    memory = torch.zeros(10)
    guard = NoOverlap(x, (y,))
    program = compile_program([guard], [])
    cases = [
        (memory[:5], memory[5:], True),
        (memory[:5], memory[4:], False),
        (memory, memory, False),
        (memory[:0], memory, True),
        (memory[::2], memory[1::2], False),
        (torch.ones(2), torch.ones(2), True),
    ]
    for a, b, passes in cases:
        assert (program.check((a, b)) is not None) == passes


def test_written_tensors_stay_apart_as_tensors_move_and_come_back():
    memory = torch.zeros(12)
    z = Arg(2, "z")
    guard = Apart(x, (y, z), 1)  # x is written; y and z may share memory
    program = compile_program([guard], [])
    a, b, c = memory[:4], memory[4:8], memory[8:]
    cases = [
        ((a, b, c), True),
        ((a, b, b), True),
        ((a, b, memory[3:5]), False),
        ((a, b, c), True),
        ((a, memory[3:5], c), False),
        ((a, memory[3:5], c), False),  # a refused argument is looked at again
        ((b, a, c), True),
        ((memory[:5], b, c), False),  # the same start, another end
        ((b, b, c), False),
        ((memory[:0], memory, memory), True),
    ]
    for tensors, passes in cases:
        assert (program.check(tensors) is not None) == guard.check_value(list(tensors)) == passes


def ambient_changes():
    def mode(enter):
        def run(check):
            with enter():
                check()

        return run

    def default_dtype(check):
        torch.set_default_dtype(torch.float64)
        try:
            check()
        finally:
            torch.set_default_dtype(torch.float32)

    def deterministic(check):
        torch.use_deterministic_algorithms(True)
        try:
            check()
        finally:
            torch.use_deterministic_algorithms(False)

    the_mode = torch.overrides.BaseTorchFunctionMode()
    yield "no_grad", mode(torch.no_grad)
    yield "inference", mode(torch.inference_mode)
    yield "autocast", mode(lambda: torch.autocast("cpu", torch.bfloat16))
    yield "default device", mode(lambda: torch.device("meta"))
    yield "function mode", mode(lambda: the_mode)
    yield "function off", mode(torch._C.DisableTorchFunctionSubclass)
    yield "dispatch mode", mode(torch.utils._python_dispatch.TorchDispatchMode)
    yield "dtype", default_dtype
    yield "deterministic", deterministic


@pytest.mark.parametrize("name, run", list(ambient_changes()), ids=lambda v: v if isinstance(v, str) else "")
def test_the_ambient_state(name, run):
    outside = Ambient.current()
    program = compile_program([outside], [])
    assert outside.check(()) and program.check(()) is not None

    def inside():
        assert not outside.check(()) and program.check(()) is None
        assert "was" in outside.reason(())
        here = Ambient.current()
        program_here = compile_program([here], [])
        assert here.check(()) and program_here.check(()) is not None
        programs.append(program_here)

    programs = []
    run(inside)
    assert outside.check(()) and program.check(()) is not None
    assert programs[0].check(()) is None
    run(lambda: [p for p in programs if p.check(()) is not None] or pytest.fail("the state came back"))


def test_a_state_of_another_time():
    """A program may be made under another state than it guards; it is right at once and reads the state
    directly later.
    """
    outside = Ambient.current()
    with torch.no_grad():
        program = compile_program([outside], [])
        assert program.check(()) is None
    for _ in range(3):
        assert program.check(()) is not None
        with torch.no_grad():
            assert program.check(()) is None


def test_autocast_dtypes_differ():
    with torch.autocast("cpu", torch.bfloat16):
        program = compile_program([Ambient.current()], [])
    with torch.autocast("cpu", torch.float16):
        assert program.check(()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert program.check(()) is not None


def test_tensors_and_state_are_read_directly():
    assert _C.tensor_reads_are_direct() and _C.ambient_reads_are_direct, (
        "the fast paths are on with this PyTorch"
    )


def test_random_edits_agree_with_python():
    """A tree of objects under random edits: the C program always agrees with the rows."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)

    def rand(n):
        return int(torch.randint(n, (1,), generator=generator))

    root = Plain(child=Plain(k=0, items=[0, 1], table={"a": 0}), k=0)
    base, child = InstanceDict(held(root)), DictItem(InstanceDict(held(root)), "child")
    below = InstanceDict(child)
    guards = [
        ConstEquals(DictItem(base, "k"), 0),
        TypeIs(child, Plain),
        ConstEquals(DictItem(below, "k"), 0),
        Length(DictItem(below, "items"), 2),
        ConstEquals(SeqItem(DictItem(below, "items"), 0), 0),
        DictKeys(DictItem(below, "table"), ("a",)),
        ConstEquals(DictItem(DictItem(below, "table"), "a"), 0),
        Absent(DictItem(below, "extra")),
    ]
    program = compile_program(guards, [DictItem(base, "k")])

    def new_child():
        return Plain(k=rand(2), items=[rand(2), 1], table={"a": rand(2)})

    edits = [
        lambda: setattr(root, "k", rand(2)),
        lambda: setattr(root, "child", new_child()),
        lambda: setattr(root.child, "k", rand(2)),
        lambda: root.child.items.__setitem__(0, rand(2)),
        lambda: root.child.items.append(0),
        lambda: root.child.items.pop() if len(root.child.items) > 2 else None,
        lambda: setattr(root.child, "table", {"a": 0}),
        lambda: root.child.table.__setitem__("a", rand(2)),
        lambda: root.child.table.__setitem__("b", 0),
        lambda: root.child.table.pop("b", 0),
        lambda: setattr(root.child, "extra", 1),
        lambda: root.child.__dict__.pop("extra", 0),
        lambda: setattr(root, "other", rand(9)),
    ]
    agreed = {True: 0, False: 0}
    for _ in range(4000):
        for _ in range(1 + rand(2)):
            edits[rand(len(edits))]()
        expected = first_failure(guards, ()) is None
        assert (program.check(()) is not None) == expected
        agreed[expected] += 1
    assert min(agreed.values()) > 20, agreed


def test_the_limit_of_digits_is_a_fact_of_programs_with_long_integers_alone():
    row, before = DigitLimit.current(), sys.get_int_max_str_digits()
    program = compile_program([row], inputs=[Arg(0, "n")])
    assert program.check((1,)) == (1,) and row.check((1,))
    try:
        sys.set_int_max_str_digits(700)
        assert program.check((1,)) is None and not row.check((1,))
        assert row.reason((1,)) == f"integers may have 700 digits as text now, {before} before"
    finally:
        sys.set_int_max_str_digits(before)
    assert DigitLimit.concerns((1, 10**700)) and not DigitLimit.concerns((1, "1" * 700))


@pytest.mark.regression
def test_messages_do_not_print_the_memory_of_tensors():
    weights = torch.zeros(1 << 20)
    start = time.perf_counter()
    texts = [
        guards._short(value)
        for value in (
            weights.untyped_storage(),
            weakref.ref(weights.untyped_storage()),
            [weights] * 3,
            {"w": [weights.untyped_storage()]},
            "x" * 1000,
            10**4000,
        )
    ]
    assert time.perf_counter() - start < 5, "printing the bytes of a model takes minutes"
    assert texts[0] == "a UntypedStorage of 4194304 bytes" and texts[2].startswith("[a Tensor of ")
    assert all(len(text) <= 80 for text in texts)


def test_messages_name_values_that_have_no_text():
    array = type("array", (), {"__module__": "array"})  # reprlib takes it for an array of Python's
    assert guards._short(array()) == "<array>"
    assert guards._short(2**100000).startswith("<int")  # of Python itself since 3.14
    refuses = type("Refuses", (), {"__repr__": lambda self: 1 / 0})
    assert guards._short(refuses()) == "<Refuses>"
