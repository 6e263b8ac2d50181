"""Every entry of torch_xla's API is there, with the parameters that users rely on, documented, and no
stub.
"""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
from bench import xla_api, xla_tests  # noqa: E402
from bench.tool import read_json  # noqa: E402


@pytest.mark.parametrize("entry", xla_api.DOCUMENTED + xla_api.LATER, ids=lambda e: e.name)
def test_entry(entry):
    assert xla_api.problem(entry) is None


def test_the_document_is_up_to_date():
    assert xla_api.DOCUMENT.read_text() == xla_api.document(), "run python -m bench.xla_api"


def _stub(a):
    """Does nothing."""
    raise NotImplementedError


class _Stubs:
    """Does nothing."""

    def method(self):
        pass


def test_the_check_finds_what_it_looks_for():
    def good(a, b=(), *, more=1):
        return a, b, more

    assert xla_api.is_stub(_stub) and xla_api.is_stub(_Stubs) and not xla_api.is_stub(good)
    assert xla_api.wrong_parameters(good, "a, b=[]") is None
    assert "parameter 1 is b, not c" in xla_api.wrong_parameters(good, "a, c=1")
    assert "default of b" in xla_api.wrong_parameters(good, "a, b=2")
    assert "without defaults" in xla_api.wrong_parameters(_stub, "")
    assert "missing" in xla_api.problem(xla_api.Entry("core.xla_model.no_such_thing"))


def test_each_test_of_theirs_that_does_not_pass_has_a_reason():
    groups = read_json(xla_api.RESULTS)["totals"]
    rows = {test: row for group in groups.values() for test, row in group["failing"].items()}
    assert len(rows) >= 80 and not [test for test, row in rows.items() if not row["reason"]]
    assert {row["kind"] for row in rows.values()} == set(xla_tests.KINDS)
    text = xla_api.document()
    names = [test.partition("::")[2].rpartition(".")[2].removeprefix("test_") for test in rows]
    assert not [name for name in names if name not in text]
    some = ["a/test_b::C.test_two", "test_a::C.test_x", "a/test_b::D.test_one"]
    assert xla_tests.compact(some) == "`a/test_b`: one, two; `test_a`: x"
