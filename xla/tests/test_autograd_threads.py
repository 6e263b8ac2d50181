"""Backwards on xla devices that autograd did not know at its first backward."""

import pytest
from replicas import run_script


@pytest.mark.regression
def test_a_cpu_backward_before_the_import_leaves_xla_its_threads() -> None:
    done = run_script(
        """
        import torch
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
        import dynamotor.xla
        for device in dynamotor.xla.devices()[::-1]:
            y = torch.arange(3.0, device=device, requires_grad=True)
            loss = torch.utils.checkpoint.checkpoint(lambda y: (y * y).sum(), y, use_reentrant=True)
            loss.backward()
            assert y.grad.device == device and y.grad.tolist() == [0, 2, 4], y.grad
        (x * 2).sum().backward()
        assert x.grad.tolist() == [4, 4]
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.returncode == 0, done.stderr


def test_devices_before_the_first_backward_are_counted_by_pytorch() -> None:
    done = run_script(
        """
        import dynamotor.xla, torch
        from dynamotor.xla import autograd_threads
        autograd_threads.load_library = lambda *a: 1 / 0
        y = torch.arange(3.0, device="xla:1", requires_grad=True)
        (y * y).sum().backward()
        assert y.grad.tolist() == [0, 2, 4]
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert done.returncode == 0, done.stderr
