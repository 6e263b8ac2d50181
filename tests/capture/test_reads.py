"""The rule of the reader: whoever looks at an object from outside installs a guard in the same breath, or
says why the answer stays.

The test reads the source: in a function of `capture/`, an attribute, an item, a length, a class test ... of
the object of a value (`value.obj`, `value.fn`, `value.value`, `value.real()`, `value.as_constant()`) asks
for a call that guards in that function.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dynamotor.capture.values.base import Value

CAPTURE = Path(__file__).resolve().parents[2] / "dynamotor" / "capture"
THE_READER = ("reader.py", "guards.py", "source.py")
STANDS_FOR = ("obj", "fn", "value")
REAL = ("real", "as_constant")
LOOKS = frozenset(
    (
        "getattr",
        "hasattr",
        "len",
        "isinstance",
        "issubclass",
        "callable",
        "vars",
        "dir",
        "iter",
        "list",
        "tuple",
        "set",
        "sorted",
        "dict",
        "frozenset",
        "enumerate",
        "bool",
        "repr",
        "str",
        "hash",
    )
)
GUARDS = frozenset(
    (
        "guard",
        "wrap",
        "ask",
        "attribute",
        "attribute_now",
        "guard_key",
        "guard_identity",
        "guard_distinct",
        "type_attr",
        "derives",
    )
)

PLAIN = "numbers, strings, tuples of such and torch's data types do not change"
NAMES = "only for a message"
FIXED = "CPython fixes it when the object is made"
LIBRARY = "descriptions of code by the standard library are taken as constant"
MEMBERS = "the members of an enum are fixed"
STAYS = {
    "bodies.py _is_back": "a key that was written has been looked up before, which guards it",
    "frontend.py InnerCompiler._split": FIXED,
    "rules_autograd.py _is_settled": "a module's own name",
    "rules_states.py _enter": "made in the trace",
    "values/function.py FunctionValue.globals": FIXED,
    "values/function.py FunctionValue.closure": "the cells are the code's; their contents are guarded when they are read",
    "values/torch_function.py TensorType.call": "a type of tensors stays the same for the life of the process",
    "marks.py CompiledValue._place": "known by identity; a user sets attributes of the original alone",
    "ops_control.py _instance": "a class of exceptions, which is called by the program and not asked",
    "ops_stack.py import_from": NAMES,
    "protocol.py ObjectProtocol.real_binary": PLAIN,
    "values/base.py Value.truth": "results of the program's own methods",
    "rules_builtins.py _callable": "constants: functions and classes can be called, data cannot",
    "rules_builtins.py _number": PLAIN,
    "rules_builtins.py _str_format": PLAIN,
    "rules_builtins.py (str.join,)": PLAIN,
    "rules_numpy.py _describing": PLAIN,
    "rules_numpy.py _describing.rule": PLAIN,
    "rules_contextvars.py _get": "a variable's default is fixed; its value is guarded in _read",
    "rules_library.py Held.getattr": LIBRARY,
    "rules_library.py _call_with_new_key": "asked at each call, by way of `trace.real`",
    "siblings.py _lasts": "object of a guard of a finished program",
    "values/torch_function.py _is_accepted": PLAIN,
    "values/klass.py ClassValue.setattr": NAMES,
    "values/klass.py ClassValue.delattr": NAMES,
    "values/klass.py ClassValue.describe": NAMES,
    "values/klass.py PythonModule.describe": NAMES,
    "values/klass.py Builtin.describe": NAMES,
    "values/klass.py Builtin.call": "the class of an object that is held by identity",
    "values/klass.py Builtin.getitem": "an alias of typing makes another alias",
    "values/klass.py _constant_member": "for plain data and libraries' classes; others are asked",
    "values/string.py _container_text": PLAIN,
    "values/string.py format_percent": PLAIN,
    "values/tensor.py TensorValue.contains": PLAIN,
}
# Whole classes and files that stand for plain data.
PLAIN_PLACES = (
    "values/constant.py Constant.",
    "values/containers.py ",
    "values/number.py ",
    "values/size.py ",
    "values/tensor.py _is_number",
)


def functions(tree, prefix=""):
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        if (
            not prefix and isinstance(node, ast.Tuple) and node.elts and isinstance(node.elts[-1], ast.Lambda)
        ):  # a table's row
            yield ast.unparse(node.elts[0]), node.elts[-1]
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def unguarded_reads(function):
    """Texts of the looks at outside objects in a function without a call that guards."""
    held = set()

    def is_outside(node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in REAL and not node.args
        return (
            isinstance(node, ast.Attribute)
            and node.attr in STANDS_FOR
            or isinstance(node, ast.Name)
            and node.id in held
        )

    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_outside(node.value):
            held |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GUARDS:
            return []
        looks = (
            isinstance(node, ast.Call)
            and node.args
            and (
                isinstance(node.func, ast.Name)
                and node.func.id in LOOKS
                and is_outside(node.args[0])
                or isinstance(node.func, ast.Attribute)
                and node.func.attr in ("real", "real_call")
                and any(map(is_outside, node.args))
            )
        )
        reads = (
            isinstance(node, ast.Attribute | ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and is_outside(node.value)
        )
        method = (
            isinstance(node, ast.Attribute) and not node.attr.startswith("__") and hasattr(Value, node.attr)
        )
        if looks or reads and not method:
            found.append(ast.unparse(node))
    return found


def all_reads():
    return {
        f"{path.relative_to(CAPTURE)} {name}": reads
        for path in sorted(CAPTURE.rglob("*.py"))
        if path.name not in THE_READER
        for name, function in functions(ast.parse(path.read_text()))
        if (reads := unguarded_reads(function))
    }


def test_who_looks_at_an_object_guards_or_says_why_not():
    loose = {
        where: reads
        for where, reads in all_reads().items()
        if where not in STAYS and not where.startswith(PLAIN_PLACES)
    }
    assert not loose, (
        "these look at objects from outside without a guard; use Reader.ask, Reader.attribute or Trace.wrap"
    )


def test_every_reason_is_needed():
    found = all_reads()
    assert not [where for where in STAYS if where not in found]
    assert all(any(where.startswith(place) for where in found) for place in PLAIN_PLACES)


@pytest.mark.parametrize(
    "body",
    [
        "return len(value.obj)",
        "return value.fn.__name__",
        "x = value.real()\n    return x[0]",
        "return hasattr(value.value, 'a')",
        "return trace.real_call(max, value.obj)",
    ],
)
def test_the_rule_sees_a_read(body):
    function = ast.parse(f"def f(trace, value):\n    {body}").body[0]
    assert unguarded_reads(function)
    guarded = ast.parse(
        f"def f(trace, value):\n    trace.reader.ask(value.source, value.obj, 'it', len)\n    {body}"
    ).body[0]
    assert not unguarded_reads(guarded)
