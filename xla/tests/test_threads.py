"""Several threads on one device: each gets its own results, whatever the others record, flush or compile
meanwhile.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
from dynamotor.xla.device import lane_of  # noqa: E402
from dynamotor.xla.distributed.parallel_loader import MpDeviceLoader  # noqa: E402
from dynamotor.xla.step import compile_step  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402
from dynamotor.xla.transfer import wrap_array  # noqa: E402


@pytest.fixture(autouse=True)
def switch_threads_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def program(number, device):
    x = torch.arange(4.0, requires_grad=True, device=device) * number
    y = (x * 2 + 1).relu()
    z = y.view(2, 2).clone()
    z[0].add_(1)
    if number % 3 == 0 and device == "xla":
        sync()
    (z.t()[1] * x[:2]).sum().backward()
    return [(y.sum() + z.sum()).item(), *z.t().tolist()]


@pytest.mark.slow
def test_a_storm_of_threads_computes_what_one_does():
    numbers = [i for i in range(5) for _ in range(5)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: program(n, "xla"), numbers))
    assert found == [program(n, "cpu") for n in numbers]


def test_threads_share_a_compiled_function_and_parameters():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    expected = model(torch.arange(4.0)).detach()
    fast = dynamotor.compile(model.to("xla"), backend="xla")

    def call(number):
        run = fast if number % 2 else model
        return (run(torch.arange(4.0, device="xla")) * number).detach().cpu()

    call(1)
    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(call, range(20))):
            torch.testing.assert_close(found, expected * number)


def test_loader_threads_move_batches_while_a_step_is_recorded():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 2))
    model = torch.nn.Linear(4, 2)
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.to("xla").parameters(), lr=0.1)
    step = compile_step(model, torch.nn.functional.mse_loss, optimizer)
    stop = threading.Event()

    def disturb():
        while not stop.is_set():
            assert (torch.ones(3).to("xla") + 1).tolist() == [2.0, 2.0, 2.0]

    with ThreadPoolExecutor(2) as pool:
        disturbers = [pool.submit(disturb) for _ in range(2)]
        try:
            for x, y in MpDeviceLoader(torch.utils.data.DataLoader(data, batch_size=4), "xla"):
                step(x, y)
        finally:
            stop.set()
        for disturber in disturbers:
            disturber.result()
    cpu = torch.optim.SGD(reference, lr=0.1)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4):
        torch.nn.functional.mse_loss(torch.nn.functional.linear(x, *reference), y).backward()
        cpu.step()
        cpu.zero_grad()
    for mine, expected in zip(model.parameters(), reference):
        torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_what_another_thread_uploads_is_not_of_a_graph_that_is_recorded_apart():
    arrays, made, done = jax.numpy.ones(2), [], threading.Event()

    def upload():
        while not done.is_set():
            made.append(wrap_array(arrays))

    thread = threading.Thread(target=upload)
    thread.start()
    for size in range(2, 42):  # each is traced for itself
        torch.softmax(torch.ones(2, size, device="xla"), 1)
    done.set()
    thread.join()
    assert made and {tensor._alias.lane for tensor in made} == {lane_of(torch.device("xla", 0))}
