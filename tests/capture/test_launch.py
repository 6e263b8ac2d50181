"""Kernels called on tensors' data, and the stamps that tell whether data changed."""

import ctypes

import pytest
import torch

from dynamotor import _C

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64))


def kernel_that_records(n_tensors, n_numbers, **options):
    """A kernel over a C function made by ctypes, and the list of (pointers, numbers) that it was called
    with.
    """
    calls = []

    @CALLBACK
    def function(pointers, numbers):
        calls.append(([pointers[i] for i in range(n_tensors)], [numbers[i] for i in range(n_numbers)]))

    address = ctypes.cast(function, ctypes.c_void_p).value
    fixed = options.pop("numbers", ())
    return _C.Kernel(address, n_tensors, fixed, owner=function, **options), calls


@pytest.mark.parametrize("release_gil", [False, True])
def test_a_kernel_gets_pointers_and_numbers(release_gil):
    kernel, calls = kernel_that_records(2, 3, numbers=(7, -(2**40)), release_gil=release_gil)
    a, b = torch.randn(4), torch.randn(6)[2:]
    assert kernel(a, b, 5) is None
    assert calls == [([a.data_ptr(), b.data_ptr()], [7, -(2**40), 5])]
    assert kernel.n_tensors == 2


def test_many_tensors_and_numbers():
    kernel, calls = kernel_that_records(100, 90, numbers=range(80))
    tensors = [torch.zeros(1) for _ in range(100)]
    kernel(*tensors, *range(10))
    assert calls == [([t.data_ptr() for t in tensors], [*range(80), *range(10)])]


def test_an_integer_in_the_place_of_a_tensor_is_an_address():
    kernel, calls = kernel_that_records(2, 0)
    a, b = torch.zeros(3), torch.zeros(3)
    kernel(a, b.data_ptr())
    assert calls == [([a.data_ptr(), b.data_ptr()], [])]


def test_wrong_arguments_are_refused():
    kernel, calls = kernel_that_records(2, 0)
    for arguments in (
        (),
        (torch.ones(1),),
        (torch.ones(1), 3.5),
        (torch.ones(1), "x"),
        (torch.ones(1), torch.ones(1), "x"),
    ):
        with pytest.raises(TypeError):
            kernel(*arguments)
    with pytest.raises(TypeError):
        kernel(torch.ones(1), torch.ones(1), n=3)
    with pytest.raises(ValueError, match="address"):
        _C.Kernel(0, 1)
    assert not calls


def test_data_pointers():
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(4)[1:]]
    assert _C.data_ptrs(tensors) == tuple(t.data_ptr() for t in tensors)
    with pytest.raises(TypeError):
        _C.data_ptrs([1])


def test_stamps_move_with_the_data():
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    stamps = _C.tensor_stamps(tensors)
    assert stamps == _C.tensor_stamps(tuple(tensors)) and len(stamps) == 32
    tensors[0].add_(1)
    after = _C.tensor_stamps(tensors)
    assert after != stamps
    tensors[1].data = torch.zeros(3)
    assert _C.tensor_stamps(tensors) != after
    with torch.inference_mode():
        assert len(_C.tensor_stamps([torch.ones(2)])) == 16
    with pytest.raises(TypeError):
        _C.tensor_stamps([None])
