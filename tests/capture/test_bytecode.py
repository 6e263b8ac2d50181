"""Decoding: one set of instructions for all versions, jumps that land, exception tables that survive a round
trip.
"""

import dis
import sys
import types

import pytest

from dynamotor.capture.bytecode import decode, encode_exception_table, parse_exception_table, returns_nothing
from dynamotor.capture.opcode_tables import VERSION


def functions_of_loaded_modules(limit=4000):
    found = []
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if isinstance(value, types.FunctionType):
                found.append(value.__code__)
            elif isinstance(value, type):
                found += [v.__code__ for v in vars(value).values() if isinstance(v, types.FunctionType)]
    return list(dict.fromkeys(found))[:limit]


@pytest.fixture(scope="module")
def codes():
    return functions_of_loaded_modules()


@pytest.mark.slow
def test_every_jump_lands_on_an_instruction(codes):
    assert len(codes) > 1000
    for code in codes:
        info = decode(code)
        for instr in info.instrs:
            if instr.target is not None:
                assert info.at(instr.target).offset >= 0
        assert info.instrs[-1].end == len(code.co_code)


@pytest.mark.slow
def test_jump_targets_are_those_of_dis(codes):
    for code in codes:
        info, known = decode(code), {i.offset: i for i in dis.get_instructions(code)}
        for instr in info.instrs:
            last = known.get(instr.last)
            if instr.target is None or last is None or last.opname == "EXTENDED_ARG":
                continue
            past_the_end = 2 * len(VERSION.loop_end) if instr.op == "FOR_ITER" else 0
            assert instr.target == last.argval + past_the_end, (code, instr)


def test_exception_tables_encode_back(codes):
    for code in codes:
        ranges = parse_exception_table(code)
        assert encode_exception_table(ranges) == code.co_exceptiontable


def test_no_version_specific_instruction_is_left(codes):
    ops = {instr.op for code in codes for instr in decode(code).instrs}
    gone = {
        "CACHE",
        "RESUME",
        "EXTENDED_ARG",
        "PRECALL",
        "KW_NAMES",
        "LOAD_FAST_CHECK",
        "RETURN_CONST",
        "JUMP_BACKWARD",
        "JUMP_FORWARD",
        "POP_JUMP_FORWARD_IF_TRUE",
        "POP_JUMP_BACKWARD_IF_TRUE",
    }
    assert not ops & gone
    assert {"CALL", "JUMP", "POP_JUMP_IF_FALSE", "FOR_ITER", "LOAD_METHOD", "BINARY_OP"} <= ops


def ops(function):
    return [(i.op, i.argval) for i in decode(function.__code__).instrs]


def test_calls_carry_their_keywords():
    def f(a):
        return a(1, x=2, y=3)

    call = next(i for i in decode(f.__code__).instrs if i.op == "CALL")
    assert (call.arg, call.argval) == (3, ("x", "y"))
    plain = next(i for i in decode((lambda a: a(1)).__code__).instrs if i.op == "CALL")
    assert (plain.arg, plain.argval) == (1, ())


def test_operators_and_names_are_text():
    def f(a, b):
        a += b
        return a.real < b, a is not b, a not in b, sys.path

    seen = ops(f)
    for expected in [
        ("BINARY_OP", "+="),
        ("COMPARE_OP", "<"),
        ("IS_OP", True),
        ("CONTAINS_OP", True),
        ("LOAD_ATTR", "real"),
        ("LOAD_GLOBAL", "sys"),
        ("LOAD_FAST", "a"),
    ]:
        assert expected in seen


def test_fused_instructions_are_apart():
    """Pairs of loads and stores, and a comparison that gives a bool, are one instruction in some versions."""

    def f(a, b):
        c, d = b, a
        while c < d:
            c = d
        return c

    info = decode(f.__code__)
    seen = [(i.op, i.argval) for i in info.instrs]
    loads = [argval for op, argval in seen if op == "LOAD_FAST"]
    assert loads[:4] == ["b", "a", "c", "d"]
    assert seen.index(("STORE_FAST", "d")) + 1 == seen.index(("STORE_FAST", "c"))
    compared = seen.index(("COMPARE_OP", "<"))
    assert info.instrs[compared + 1].op in ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE")
    assert all(info.at(i.offset) is i for i in info.instrs)


def test_functions_that_return_nothing():
    def falls_off(x):
        x()

    def gives_false(x):
        if x():
            return False

    def gives_true(x):
        if x():
            return True

    def gives_one(x):
        return 1

    def gives_either(x):
        return x or False

    assert returns_nothing(falls_off.__code__) and returns_nothing(gives_false.__code__)
    assert not any(returns_nothing(f.__code__) for f in (gives_true, gives_one, gives_either, lambda x: x()))


def test_method_loads_and_pushed_nulls():
    instrs = decode((lambda a: a.foo(len(a))).__code__).instrs
    assert [i.op for i in instrs] == [
        "LOAD_FAST",
        "LOAD_METHOD",
        "LOAD_GLOBAL",
        "LOAD_FAST",
        "CALL",
        "CALL",
        "RETURN_VALUE",
    ]
    assert instrs[2].arg is True


def test_long_jumps_and_large_arguments_fold_extended_arg():
    source = "def f(x):\n for i in x:\n" + "".join(f"  y{i} = x\n" for i in range(400)) + " return y399\n"
    namespace = {}
    exec(source, namespace)
    info = decode(namespace["f"].__code__)
    assert ("STORE_FAST", "y399") in [(i.op, i.argval) for i in info.instrs]
    loop = next(i for i in info.instrs if i.op == "FOR_ITER")
    assert info.at(loop.target).argval == "y399"


def test_lines_and_handlers():
    def f(x):
        try:
            return x()
        except ValueError:
            return 3

    info = decode(f.__code__)
    call = next(i for i in info.instrs if i.op == "CALL")
    assert call.line == f.__code__.co_firstlineno + 2
    assert info.at(info.handler(call.offset).target).op == "PUSH_EXC_INFO"
    assert info.handler(info.instrs[0].offset) is None
    assert decode(f.__code__) is info
