"""Kernels that differ in numbers alone share one C++ function, and calculate what each of them would."""

import re
import struct

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.codegen import cpp, cpp_family
from dynamotor.codegen.call_program import Writer
from dynamotor.codegen.cpp import CFunction


def tables(*sources):
    """The two tables of a writer: a function and a kernel for each source, whose title is dm_f."""
    functions = {f"dm_f_{n}": CFunction(f"dm_f_{n}", text, ("float",)) for n, text in enumerate(sources)}
    kernels = {f"k{n}": (name, 1, (7,)) for n, name in enumerate(functions)}
    return functions, kernels


def with_numbers(function, ints):
    """A joint function's text with the numbers of one of its kernels in their places."""
    text = function.source
    for declared, kind, name, at in re.findall(
        r"(const (i64|int|float|double) (c\d+_)=[^;]*\[(\d+)\];)", text
    ):
        value = ints[int(at)]
        if kind in ("float", "double"):
            code, whole = ("f", "i") if kind == "float" else ("d", "q")
            value = struct.unpack(code, struct.pack(whole, value))[0]
        text = text.replace(declared, "").replace(name, f"<{value}>")
    return text.replace(function.name, "@")


def test_equal_texts_around_numbers_are_one_function_and_keep_their_own_integers():
    functions, kernels = tables(
        "void dm_f_0(i64*ints){for(i64 i=0;i<8;i++)p[i]=ints[0]*2.5f+16l*i+1;}",
        "void dm_f_1(i64*ints){for(i64 i=0;i<9;i++)p[i]=ints[0]*0.25f+32l*i+1;}",
    )
    made, rows = cpp_family.merged(functions, kernels)
    (one,) = made.values()
    assert one.name not in functions
    assert {row[0] for row in rows.values()} == {one.name}
    assert [row[2][0] for row in rows.values()] == [7, 7]
    wanted = "void @(i64*ints){for(i64 i=0;i<<%s>;i++)p[i]=ints[0]*<%s>+<%s>*i+1;}"
    assert with_numbers(one, rows["k0"][2]) == wanted % (8, 2.5, 16)
    assert with_numbers(one, rows["k1"][2]) == wanted % (9, 0.25, 32)


def test_equal_columns_are_one_argument():
    functions, kernels = tables("void dm_f_0(){a(8l);b(8l);c(8);}", "void dm_f_1(){a(9l);b(9l);c(9);}")
    made, rows = cpp_family.merged(functions, kernels)
    (one,) = made.values()
    assert one.source.count("ints[") == 2  # 8l and 8 have two types
    assert rows["k1"][2] == (7, 9, 9)


def test_numbers_beyond_32_bits_keep_theirs():
    functions, kernels = tables(
        "void dm_f_0(){a(4294967296);b(8589934592l);}", "void dm_f_1(){a(4294967297);b(8589934593l);}"
    )
    made, rows = cpp_family.merged(functions, kernels)
    (one,) = made.values()
    assert "const int " not in one.source
    assert rows["k1"][2] == (7, 4294967297, 8589934593)


def test_a_number_that_is_an_int_in_one_and_long_in_another_keeps_them_apart():
    functions, kernels = tables("void dm_f_0(){a(8);}", "void dm_f_1(){a(4294967296);}")
    assert cpp_family.merged(functions, kernels) == (functions, kernels)


def test_two_names_of_one_text_are_one_function_without_arguments():
    functions, kernels = tables("void dm_f_0(){a(8);}", "void dm_f_1(){a(8);}")
    made, rows = cpp_family.merged(functions, kernels)
    assert len(made) == 1
    assert [row[2] for row in rows.values()] == [(7,), (7,)]


@pytest.mark.parametrize(
    "first, second",
    [
        ("x/49", "x/196"),  # divisors
        ("(x)%49", "(x)%196"),
        ("float b[64];", "float b[128];"),  # sizes
        ("f<4>(x)", "f<8>(x)"),
        ("\n#pragma omp parallel for num_threads(2)\n", "\n#pragma omp parallel for num_threads(4)\n"),
        ("x4", "x8"),  # names
        ("x+1l", "x+1"),  # types
        ("x+1.0f", "x+1.0"),
        ("x-3", "x+3"),
    ],
)
def test_what_the_compiler_must_know_keeps_functions_apart(first, second):
    functions, kernels = tables(f"void dm_f_0(){{{first};}}", f"void dm_f_1(){{{second};}}")
    made, rows = cpp_family.merged(functions, kernels)
    assert (made, rows) == (functions, kernels)


def layers(*tensors):
    made = []
    for x in tensors:
        y = F.batch_norm(x, None, None, training=True).relu()
        made += [y.mean((2, 3)), (y * 3).permute(0, 2, 3, 1).contiguous(), F.max_pool2d(y, 3, 2, 1)]
        made.append(F.dropout(y.flatten(2).softmax(-1), 0.5))
    return made


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_joint_functions_give_the_bits_of_separate_ones(dtype, monkeypatch):
    written = []
    listing = Writer.listing
    monkeypatch.setattr(Writer, "listing", lambda self: (listing(self), written.append(self))[0])
    torch.manual_seed(0)
    inputs = [torch.randn(2, c, s, s, dtype=dtype) for c, s in ((8, 12), (16, 12), (24, 20), (40, 7))]
    results = []
    for merged in (cpp_family.merged, lambda *tables: tables):
        monkeypatch.setattr(cpp_family, "merged", merged)
        torch.manual_seed(1)
        results.append(dynamotor.compile(lambda *tensors: layers(*tensors))(*inputs))
    joint, apart = (writer.functions for writer in written)
    assert len(joint) < len(apart)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_unit_of_joint_functions_holds_each_once():
    functions, kernels = tables("void dm_f_0(i64*ints){a(8l);}", "void dm_f_1(i64*ints){a(9l);}")
    made, _ = cpp_family.merged(functions, kernels)
    assert cpp.emit_unit(made.values()).count("{a(") + cpp.emit_unit(made.values()).count(";a(") == 1
