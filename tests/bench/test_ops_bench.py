"""`python -m bench ops`: rows of single ops, worst first."""

import json

import pytest

from bench import ops


@pytest.mark.slow  # imports PyTorch's database of operators
def test_rows_of_each_kind_of_op(tmp_path, capsys):
    arguments = (
        "--ops sin,add,sum,roll_rows --dtypes float32 --layouts dense,transposed --sizes L1 --seconds 0.02"
    )
    ops.main([*arguments.split(), "--json", str(tmp_path / "ops.json")])
    rows = [json.loads(line) for line in (tmp_path / "ops.json").read_text().splitlines()]
    assert {r["op"] for r in rows} == {"sin", "add", "sum(1)", "sum(0)", "sum()", "roll_rows"}
    assert {r["layout"] for r in rows} == {"dense", "transposed"} and all(r["us"]["ours"] > 0 for r in rows)
    assert "ours / eager 0" in capsys.readouterr().out


def test_the_worst_row_comes_first():
    about = {"op": "sin", "dtype": "float32", "layout": "dense", "size": "L1"}
    rows = [about | {"us": {"eager": 2.0, "ours": 2.0 * r}, "ratio": r} for r in (0.5, 2.0)]
    lines = ops.summary([*rows, about | {"failed": "RuntimeError"}], 5).splitlines()
    assert lines[1].endswith("2.00") and lines[2].endswith("0.50")
    assert lines[3].startswith("failed") and "ours / eager 1.000, 1 above 1.05" in lines[-1]
