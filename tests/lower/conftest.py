"""The kernels of a test of this room are built by one run of the compiler."""

import harness
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    with harness.together():
        return (yield)
