"""Programs that once gave another answer on the xla device than on the CPU, each as small as it can be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("jax", reason="the xla device needs jax")

import dynamotor.xla  # noqa: E402, F401
import dynamotor.xla.start  # noqa: E402, F401

CASES: dict[str, Callable[[str], object]] = {}


def case(program: Callable[[str], object]) -> Callable[[str], object]:
    """A program of a device; its results are compared: tensors with their strides, anything else by
    equality.
    """
    CASES[program.__name__] = program
    return program


def numbers(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def assert_same(want: object, got: object) -> None:
    want, got = (torch.utils._pytree.tree_leaves(result) for result in (want, got))
    assert len(want) == len(got)
    for a, b in zip(want, got):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-9, atol=1e-9, equal_nan=True)
            assert (b.stride(), b.storage_offset()) == (a.stride(), a.storage_offset())
        else:
            assert a == b


def outcome(program: Callable[[str], object], device: str) -> object:
    torch.manual_seed(0)
    return program(device)


# -- copies and views ----------------------------------------------------------------------------------------


@case
def contiguous_of_a_transposed_tensor_is_a_copy(device):
    x = numbers(device, 2, 3)
    x.t().contiguous().add_(1)
    return x


@case
def reshape_and_flatten_copy_where_strides_demand_it(device):
    x = numbers(device, 2, 3)
    x.t().reshape(-1).add_(1)
    x.mT.flatten().mul_(2)
    x[:, 1:].reshape(-1).zero_()
    x.reshape(3, 2)[0].add_(1)
    return x


@case
def results_keep_the_order_of_dimensions(device):
    x = numbers(device, 2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    return (
        last,
        last + 1,
        last.t().shape if last.dim() == 2 else None,
        torch.empty_like(last).zero_(),
        last.clone(),
        x.permute(3, 0, 1, 2).sin(),
    )


@case
def what_view_refuses(device):
    x = numbers(device, 2, 3)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.t().view(-1)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        x.as_strided((4, 2), (2, 1))
    return x.t().is_contiguous(), x.view(-1).is_contiguous(), x[1].storage_offset()


@case
def as_strided_counts_from_the_start_of_the_storage(device):
    x = numbers(device, 3, 4)
    x.t()[1:].as_strided((2, 2), (1, 4), 1).mul_(2)
    return x, x[2].as_strided((4,), (2,), 0), x.t().clone().as_strided((2, 6), (1, 2))


@case
def parts_of_expanded_tensors_can_be_written(device):
    x = numbers(device, 6)
    x.view(2, 3).expand(4, 2, 3)[1].mul_(2)
    x.unfold(0, 3, 1)[1].neg_()
    return x


@case
def rows_of_overlapping_strides_are_written_one_after_the_other(device):
    x = numbers(device, 6)
    rows = x.as_strided((2, 4), (2, 1))
    rows[0].add_(1)
    rows[1].mul_(10)
    numbers(device, 9).as_strided((3, 2), (2, 3)).add_(1)  # interleaved, and no place twice
    return x, rows


@case
def gradients_of_expanded_tensors_are_copied(device):
    x = torch.ones(2, 3, device=device, requires_grad=True)
    x.sum().backward()
    x.grad[0].add_(1)
    return x.grad


@case
def deep_copies_share_memory_as_their_originals_do(device):
    x = numbers(device, 2, 3)
    whole, part = copy.deepcopy([x, x.t()[1:]])
    whole.add_(1)
    return x, whole, part


@case
def copies_between_devices_keep_strides(device):
    return (
        numbers("cpu", 2, 3).t().to(device),
        numbers(device, 2, 3).t().cpu(),
        numbers(device, 2, 3)[:, ::2].clone().cpu(),
    )


@case
def memory_with_holes_is_memory(device):
    x = torch.empty_strided((2, 2), (5, 2), dtype=torch.float64, device=device).fill_(1)
    x.t()[0].add_(1)
    return x


# -- inference mode ------------------------------------------------------------------------------------------


@case
def inference_mode_makes_views_of_normal_tensors(device):
    x = numbers(device, 2, 3)
    with torch.inference_mode():
        x.reshape(-1)[0] = 5
        x.flatten().add_(1)
        parts = x.t(), x.detach(), x.contiguous()
        fresh = x * 2
        fresh.t().reshape(-1).zero_()
    return x, parts, [part.is_inference() for part in parts], fresh.clone()


@case
def transformer_encoder_in_inference_mode(device):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval().to(device)
    with torch.inference_mode():
        return layer(numbers(device, 2, 3, 8)).clone()


# -- transforms and packed sequences -------------------------------------------------------------------------


@case
def second_derivatives_through_views(device):
    return torch.func.hessian(lambda v: (v**3).sum() * v[0])(numbers(device, 3, 3)[1])


@case
def packed_sequences(device):
    rows = numbers(device, 3, 5, 3).requires_grad_()
    packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([5, 3, 2]), batch_first=True)
    output, lengths = nn.utils.rnn.pad_packed_sequence(
        nn.LSTM(3, 4, batch_first=True).double().to(device)(packed)[0]
    )
    output.sum().backward()
    return output, lengths, rows.grad, packed.batch_sizes


@case
def complex_numbers_of_two_parts(device):
    x = numbers(device, 3).bfloat16().float()
    return torch.complex(x, x + 1), torch.polar(x.abs(), x)


@case
def statistics_of_half_precision_normalisations(device):
    x, found = numbers(device, 2, 4, 4).bfloat16(), []
    for weight in (None, torch.ones(4, dtype=torch.bfloat16, device=device), torch.ones(4, device=device)):
        found += torch.ops.aten.native_layer_norm(x, [4], weight, weight, 1e-5)[1:]
        found += torch.ops.aten.native_group_norm(x, weight, weight, 2, 4, 4, 2, 1e-5)[1:]
        found += torch.ops.aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)[1:]
    return [t.dtype for t in found]


@case
def shifts_of_booleans(device):
    x = torch.tensor([True, False], device=device)
    return x << 2, x >> 1, 1 << x


# -- tensors as Python objects ------------------------------------------------------------------------------


@case
def tensors_stay_where_they_are(device):
    x = numbers(device, 3).requires_grad_()
    return x.to(device) is x, torch.as_tensor(x, device=device) is x, x.to(device).is_leaf


@case
def numbers_in_format_strings(device):
    x = numbers(device, 3)
    return f"{x[0]:.3f} {x[1]:>8.2e}", f"{x.new_tensor(3)}"


@case
def what_copies_and_pickles_keep(device):
    x, p = numbers(device, 3).requires_grad_(), nn.Parameter(numbers(device, 3), requires_grad=False)
    x.tag, p.tag = [1], 2
    p.grad = torch.ones_like(p)
    model = nn.Linear(2, 2, dtype=torch.float64).to(device)
    made = [copy.deepcopy(x), *pickle.loads(pickle.dumps([x, p, *model.parameters()])), copy.deepcopy(p)]
    return [
        (isinstance(t, nn.Parameter), t.requires_grad, getattr(t, "tag", None), t.grad is None) for t in made
    ]


@case
def resized_like_another_tensor(device):
    x, y = numbers(device, 16), numbers(device, 1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    orders = torch.contiguous_format, torch.channels_last, torch.preserve_format
    resized = [x.clone().resize_as_(y, memory_format=order) for order in orders]
    return resized, x.clone().resize_as_(y), x.clone().resize_(1, 3, 1, 2, memory_format=orders[1])


@case
def the_same_part_of_memory(device):
    x = numbers(device, 6)
    others = x, x.view(6), x.view(2, 3), x.clone(), x[1:], x[:5], x.view(torch.int64), x.detach()
    return [x.is_set_to(other) for other in others], x[1:].is_set_to(x[1:])


@case
def an_index_of_floats(device):
    with pytest.raises(IndexError, match="must be long, int, byte or bool"):
        numbers(device, 3)[torch.ones(1, device=device)]
    return "refused"


@case
def values_where_a_mask_picks(device):
    x, mask = torch.arange(10, device=device).view(5, 2), torch.tensor([1, 0, 1, 1, 1], device=device) > 0
    y, flags = x.clone(), torch.zeros(5, dtype=torch.bool, device=device)
    y[mask] = x[mask].flip(0)
    y[mask, torch.tensor([0, 1, 0, 1], device=device)] = 7
    flags[mask] = torch.tensor([True, False, True, True], device=device)
    return y, flags


@case
def positions_that_do_not_meet(device):
    x, two, three = torch.ones(4, 4, device=device), torch.arange(2), torch.arange(3)
    with pytest.raises(IndexError, match=r"not be broadcast together with shapes \[2\], \[3\]"):
        x[two, three]
    with pytest.raises(IndexError, match=r"not be broadcast together with shapes \[2\], \[3\]"):
        x[two, three] = 1
    return "refused"


@case
def float8_of_large_numbers(device):
    x = torch.tensor([449.0, -1e6, float("inf"), float("nan"), 3.3], device=device)
    kinds = torch.float8_e4m3fn, torch.float8_e5m2
    whole = torch.tensor([500, 7], device=device).to(kinds[0]).float()
    return [t.to(kind).float() for t in (x, x.bfloat16(), x.double()) for kind in kinds], whole


@case
def unsigned_integers_compared(device):
    x = torch.tensor([1, 65535], dtype=torch.uint16).to(device)
    return x == x, x != x[:1]


@case
def conjugates_inside_of_a_kernel_of_the_cpu(device):
    x = torch.complex(numbers(device, 3, 3), numbers(device, 3, 3, seed=1))
    assert torch.allclose(torch.linalg.pinv(x) @ x, torch.eye(3, dtype=x.dtype, device=device))
    return "inverse"


@case
def the_value_of_a_view_that_a_copy_gave_up(device):
    x, y = numbers(device, 2, 3), numbers(device, 6, seed=1)
    v = x.view(-1).add_(5)
    y.copy_(v)
    copied, totals = v.clone(), [v.sum().item()]
    for tensor in (
        copied,
        y,
        copied,
        y,
    ):  # a write that a flush follows gives the memory of the old value away
        totals.append(tensor.add_(2).sum().item())
    return [round(total, 9) for total in totals], x, v, copied, y


@pytest.mark.parametrize("name", CASES)
def test_the_device_does_what_the_cpu_does(name: str) -> None:
    assert_same(outcome(CASES[name], "cpu"), outcome(CASES[name], "xla"))


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(dynamotor.xla.ir.XlaError, match="layout torch.sparse_coo"):
        torch.eye(2).to_sparse().to("xla")
