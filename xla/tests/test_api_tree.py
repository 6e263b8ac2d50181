"""Every entry of torch_xla's API is there, with the parameters that users rely on, documented, and no
stub.
"""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
from bench import xla_api  # noqa: E402


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
