"""The table "Where to add" of docs/architecture.md: files and names exist, and rows are followed on a copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from children import run_forked
from overlay import IN_COPY, ROOT, overlay

from dynamotor import extension_api

TABLE = (ROOT / "docs" / "architecture.md").read_text().split("## Where to add")[1]
ROWS = [
    row for row in re.findall(r"^\| (.*?) \| (.*) \|$", TABLE, re.MULTILINE) if row[0] not in ("what", "---")
]
FOLDERS = (ROOT / "dynamotor", ROOT)
FILE = re.compile(r"[\w/<>*.]+\.(?:py|c|h|md|txt|toml)")

OP = {
    "dynamotor/graph/ops/pointwise.py": """

define(torch.ops.dummy.gate.default, shape=lambda x, y: broadcast([x.shape, y.shape]))
""",
    "dynamotor/lower/ops_pointwise.py": """

@lowering(torch.ops.dummy.gate.default)
def _gate(ctx: LoopBuilder, x: LoopValue, y: LoopValue) -> LoopValue:
    return ctx.pointwise(lambda a, b: mul(a, sigmoid(b)), x, y)
""",
}
ADDED = OP | {
    "dynamotor/lower/ops_pointwise.py": OP["dynamotor/lower/ops_pointwise.py"]
    + """

@lowering(torch.ops.dummy.twice.default)
def _twice(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    return ctx.pointwise(lambda a: op("dummy_twice", a), x)
""",
    "dynamotor/codegen/cpp_ops.py": """
TEXT["dummy_twice"] = "{0}+{0}"
""",
    "dynamotor/codegen/triton_ops.py": """
TEXT["dummy_twice"] = "{0} + {0}"
""",
    "dynamotor/autograd/decompositions.py": """

@decomposition(torch.ops.dummy.halve.default)
def _halve(recorder: GraphRecorder, func: OpOverload, x: ShapeTensor) -> Any:
    return recorder.call(aten.mul.Tensor, x, 0.5)
""",
    "dynamotor/capture/values/torch_function.py": """

@builtin_rule(torch.ops.dummy.halve)
def _halve(trace: Trace, x: Value, times: Value = Constant(1)) -> Value:
    for _ in range(times.as_constant()):
        x = torch_call(trace, torch.ops.dummy.halve.default, [x], {})
    return x
""",
    "dynamotor/capture/guards.py": '''

@dataclass(frozen=True)
class IsMultiple(Guard):
    """`value % of == 0`."""

    of: int
    code = "predicate"
    text = "{source} is {now}, no multiple of {of}"

    def check_value(self, value: Any) -> bool:
        return type(value) is int and value % self.of == 0
''',
    "dynamotor/capture/ops_stack.py": """

@opcode("DUMMY_DOUBLE_TOP")
def dummy_double_top(frame: Frame, instr: Instr, target: int) -> None:
    frame.stack.append(frame.stack[-1])
""",
    "dynamotor/backends.py": """

@register_backend
def dummy_backend(gm: Any, inputs: Any) -> Any:
    return gm


@register_backend
def dummy_error(gm: Any, inputs: Any) -> Any:
    raise UsageError("DM289", "the dummy error")
""",
    "dynamotor/lower/fusion.py": """

dummy_refuses = False


@rule
def dummy_rule(group: Group, m: Member) -> Refuse | None:
    return Refuse("the dummy rule") if dummy_refuses else None
""",
    "docs/errors.md": "| DM289 | a dummy | nothing |\n",
}
KNOB = "    strict: bool = False\n", "    # A dummy.\n    dummy_knob: int = 3\n"
KNOB_TYPE = "    strict: bool\n", "    dummy_knob: int\n"


@pytest.mark.parametrize(("what", "where"), ROWS, ids=[what for what, _ in ROWS])
def test_files_and_names_of_a_row_exist(what: str, where: str) -> None:
    quoted = re.findall(r"`([^`]+)`", where)
    names = [name for name in quoted if not FILE.fullmatch(name)]
    found = []
    for name in filter(FILE.fullmatch, quoted):
        pattern = re.sub(r"<\w+>", "*", name)
        files = [path for folder in FOLDERS for path in folder.glob(pattern)]
        assert files, name
        found += files
    text = "\n".join(path.read_text() for path in found)
    for name in names:
        last = re.findall(r"\w+", name.partition("(")[0])[-1]
        assert re.search(rf"\b{last}\b", text), name


@pytest.mark.slow
def test_added_rows_work_and_keep_the_rules_of_the_architecture(tmp_path: Path) -> None:
    """One process for all rows: a copy of the packages is imported only once."""
    paths = overlay(tmp_path, ADDED, {"dynamotor/base/config.py": (KNOB, KNOB_TYPE)})
    rows = str(ROOT / "tests" / "added_rows.py")
    done = run_forked(f"{IN_COPY}import runpy; runpy.run_path({rows!r}, run_name='__main__')", *paths)
    passed = re.findall(r"^passed (\w+)$", done.stdout, re.MULTILINE)
    assert len(passed) == 13 and not done.returncode, done.stdout + done.stderr


def test_every_name_of_the_extension_api_is_in_its_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().split("| names of `extension_api`")[1]
    assert set(re.findall(r"`(\w+)`", text.split("\n\n")[0])) == set(extension_api.__all__)


def test_an_op_for_cpus_gpus_and_xla_is_at_most_four_files() -> None:
    assert len(OP) + 1 <= 4  # and `xla/dynamotor/xla/ops_pointwise.py`
