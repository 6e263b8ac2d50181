"""The guide's programs, as they are written there, after `import torch_xla` was made to mean dynamotor.xla.

What the guide leaves to its reader (MNIST, train_loader, lr, momentum, model, path) are small stand-ins on
scikit-learn's digits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("jax")
if importlib.util.find_spec("sklearn") is None:  # imported only where it is used: it takes a second
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
import dynamotor.xla  # noqa: E402
from dynamotor.xla.install import uninstall  # noqa: E402

PRELUDE = """
import torch
from sklearn.datasets import load_digits
from torch import nn, optim

lr, momentum = 0.05, 0.5
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
train_loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images[:256], torch.tensor(digits.target)[:256]), batch_size=64)


def MNIST():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(dim=1))
"""

CREATING = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

t = torch.randn(2, 2, device=xm.xla_device())
print(t.device)
print(t)
"""

ADDING = """
t0 = torch.randn(2, 2, device=xm.xla_device())
t1 = torch.randn(2, 2, device=xm.xla_device())
print(t0 + t1)
"""

MULTIPLYING = """
print(t0.mm(t1))
"""

MODULE = """
l_in = torch.randn(10, device=xm.xla_device())
linear = torch.nn.Linear(10, 20).to(xm.xla_device())
l_out = linear(l_in)
print(l_out)
"""

MIXED = """
l_in = torch.randn(10, device=xm.xla_device())
linear = torch.nn.Linear(10, 20)
l_out = linear(l_in)
print(l_out)
"""

SINGLE = """
import torch_xla.core.xla_model as xm

device = xm.xla_device()
model = MNIST().train().to(device)
loss_fn = nn.NLLLoss()
optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

for data, target in train_loader:
  optimizer.zero_grad()
  data = data.to(device)
  target = target.to(device)
  output = model(data)
  loss = loss_fn(output, target)
  loss.backward()

  optimizer.step()
  xm.mark_step()
"""

MULTI = """
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp

def _mp_fn(index):
  device = xm.xla_device()
  mp_device_loader = pl.MpDeviceLoader(train_loader, device)

  model = MNIST().train().to(device)
  loss_fn = nn.NLLLoss()
  optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

  for data, target in mp_device_loader:
    optimizer.zero_grad()
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    xm.optimizer_step(optimizer)
{report}
if __name__ == '__main__':
  xmp.spawn(_mp_fn, args=())
"""

SAVING = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

device = xm.xla_device()

t0 = torch.randn(2, 2, device=device)
t1 = torch.randn(2, 2, device=device)

tensors = (t0.cpu(), t1.cpu())

torch.save(tensors, 'tensors.pt')

tensors = torch.load('tensors.pt')

t0 = tensors[0].to(device)
t1 = tensors[1].to(device)
"""

XM_SAVE = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

xm.save(model.state_dict(), path)
"""

XSER_SAVE = """
import torch_xla.utils.serialization as xser

xser.save(model.state_dict(), path)
"""

XSER_LOAD = """
import torch_xla.utils.serialization as xser

state_dict = xser.load(path)
model.load_state_dict(state_dict)
"""


@pytest.fixture(autouse=True)
def alias(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dynamotor.xla.install_as_torch_xla()
    yield
    uninstall()


def run(*snippets, **names):
    space = {"__name__": "guide", **names}
    for snippet in snippets:
        exec(snippet, space)  # noqa: S102
    return space


def eager_weights():
    """Results of the training loop of the guide in eager mode."""
    space = run(PRELUDE)
    model, loss_fn = space["MNIST"](), torch.nn.NLLLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=space["lr"], momentum=space["momentum"])
    for data, target in space["train_loader"]:
        optimizer.zero_grad()
        loss_fn(model(data), target).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_creating_tensors(capsys):
    space = run(CREATING, ADDING, MULTIPLYING)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "xla:0" and lines[1].startswith("tensor([[") and lines[2].endswith("device='xla:0')")
    t0, t1 = space["t0"].cpu(), space["t1"].cpu()
    torch.testing.assert_close(space["t0"].mm(space["t1"]).cpu(), t0.mm(t1))
    torch.testing.assert_close((space["t0"] + space["t1"]).cpu(), t0 + t1)


def test_modules(capsys):
    space = run(CREATING, MODULE)
    torch.testing.assert_close(
        space["l_out"].detach().cpu(), space["linear"].cpu()(space["l_in"].cpu()).detach()
    )
    assert "grad_fn" in capsys.readouterr().out


def test_mixed_devices_raise():
    with pytest.raises(RuntimeError, match=r"Input tensor is not an XLA tensor: torch.FloatTensor"):
        run(CREATING, MIXED)


@pytest.mark.slow
def test_a_single_device():
    space = run(PRELUDE, SINGLE)
    for p, expected in zip(space["model"].parameters(), eager_weights()):
        torch.testing.assert_close(p.detach().cpu(), expected, rtol=1e-4, atol=1e-5)


REPORT = """
  import json
  with open(f'weights{index}.json', 'w') as f:
    json.dump([p.tolist() for p in model.parameters()], f)
"""


@pytest.mark.slow  # test_torchrun.py and test_install.py launch replicas
def test_several_devices(tmp_path):
    program = tmp_path / "guide.py"
    program.write_text(PRELUDE + MULTI.replace("{report}", REPORT))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.dirname, dynamotor.__path__)),
        "CPU_NUM_DEVICES": "2",
    }
    command = [sys.executable, "-m", "dynamotor", "run", "--torch-xla", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    for index in (
        0,
        1,
    ):  # both replicas saw the same data, so that the mean of their gradients is the gradient
        weights = [torch.tensor(w) for w in json.loads((tmp_path / f"weights{index}.json").read_text())]
        for w, expected in zip(weights, eager_weights()):
            torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-5)


def test_saving_and_loading():
    space = run(SAVING)
    assert str(space["t0"].device) == "xla:0" and torch.equal(space["t1"].cpu(), space["tensors"][1])


@pytest.mark.parametrize("save", [XM_SAVE, XSER_SAVE])
def test_saving_a_model(save):
    model = torch.nn.Linear(3, 2).to("xla")
    before = model.weight.detach().cpu().clone()
    run(save, model=model, path="model.pt")
    with torch.no_grad():
        model.weight.zero_()
    if save is XSER_SAVE:
        run(XSER_LOAD, model=model, path="model.pt")
    else:
        model.load_state_dict(torch.load("model.pt"))
    assert torch.equal(model.weight.detach().cpu(), before) and model.weight.device.type == "xla"


DATASET = """
train_dataset = CachedDataset(train_dataset, FLAGS.dscache_dir)
"""


def test_utilities_as_documented(tmp_path):
    import argparse

    from torch_xla.utils.cached_dataset import CachedDataset

    flags = argparse.Namespace(dscache_dir=str(tmp_path / "cache"))
    space = run(PRELUDE)
    names = {"CachedDataset": CachedDataset, "FLAGS": flags}
    first = run(DATASET, train_dataset=space["train_loader"].dataset, **names)["train_dataset"]
    first.warmup()
    again = run(DATASET, train_dataset=None, **names)["train_dataset"]
    assert len(again) == 256 and torch.equal(again[5][0], space["images"][5])


WRAPPERS = """
import sys
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
from torch import nn

MyNetwork = lambda: nn.Linear(2, 2)
maybe_download_and_load = len

WRAPPED_MODEL = xmp.MpModelWrapper(MyNetwork())
SERIAL_EXEC = xmp.MpSerialExecutor()

def load_dataset(path):
  return maybe_download_and_load(path)

def _mp_fn(index, flags):
  device = xm.xla_device()
  model = WRAPPED_MODEL.to(device)
  dataset = SERIAL_EXEC.run(lambda: load_dataset('/tmp/mnist-data'))
  sys.stdout.write(f"{index} {dataset} {next(model.parameters()).device} {flags}\\n")  # one write: two processes share the stream
  sys.stdout.flush()

if __name__ == '__main__':
  xmp.spawn(_mp_fn, args=('f',), nprocs=2, start_method='fork')
"""


@pytest.mark.slow  # test_spawn.py forks replicas that take a wrapped model and run a function serially
def test_wrapped_models_and_serial_execution(tmp_path):
    program = tmp_path / "wrappers.py"
    program.write_text(textwrap.dedent(WRAPPERS))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.dirname, dynamotor.__path__))}
    command = [sys.executable, "-m", "dynamotor", "run", "--torch-xla", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.endswith(" f"))  # gloo prints there, too
    assert lines == ["0 15 xla:0 f", "1 15 xla:0 f"]
