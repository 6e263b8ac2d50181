"""Checkpoints: streamed, whole at any moment, damage found, and nothing but data unpickled."""

from __future__ import annotations

import collections
import os
import pathlib
import shutil

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla.core.xla_model as xm  # noqa: E402
import dynamotor.xla.utils.serialization as xser  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402

Pair = collections.namedtuple("Pair", "a b")


def structure(device):
    shared = torch.randn(3, device=device)
    return {
        "model": collections.OrderedDict(w=torch.randn(4, 5, device=device), b=torch.zeros(0, device=device)),
        "list": [shared, {"again": shared}, 3, 2.5, "x", None, True],
        "types": (
            torch.arange(3, device=device),
            torch.tensor(1.5, device=device),
            torch.ones(2, dtype=torch.bfloat16, device=device),
        ),
        "cpu": torch.randn(2),
    }


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (
            b.device.type == "cpu"
            and a.dtype == b.dtype
            and torch.equal(a, b)
            and a.requires_grad == b.requires_grad
        )
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def on_cpu(data):
    if isinstance(data, torch.Tensor):
        return data.cpu()
    if isinstance(data, dict):
        return type(data)((k, on_cpu(v)) for k, v in data.items())
    return type(data)(map(on_cpu, data)) if isinstance(data, (list, tuple)) else data


def test_round_trip(tmp_path):
    data = structure("xla")
    path = str(tmp_path / "c")
    xser.save(data, path)
    loaded = xser.load(path)
    assert_same(on_cpu(data), loaded)
    assert loaded["list"][0] is loaded["list"][1]["again"]
    assert len(os.listdir(path + ".tensors")) == 1


def test_a_model_and_its_optimizer(tmp_path):
    model = torch.nn.Linear(3, 2).to("xla")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, device="xla")).sum().backward()
    optimizer.step()
    path = str(tmp_path / "c")
    xser.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loaded = xser.load(path)
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(loaded["model"])
    again = torch.optim.Adam(other.parameters())
    again.load_state_dict(loaded["optimizer"])
    assert torch.equal(other.weight, model.weight.cpu())
    assert torch.equal(again.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"].cpu())


def test_xm_save_gives_a_file_that_torch_loads(tmp_path):
    data = structure("xla")
    xm.save(data, str(tmp_path / "c"))
    xm.save(data, tmp_path / "c")
    with open(tmp_path / "f", "wb") as f:
        xm.save(data, f)
    for name in ("c", "f"):
        assert_same(on_cpu(data), torch.load(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["c", "f"]


class Holder:
    def __init__(self, tensor):
        self.tensor, self.me, self.plain = tensor, self, [1, 2]


def test_tensors_inside_of_objects_reach_the_cpu_too(tmp_path):
    t = torch.ones(2, device="xla")
    model, holder = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to("xla"), Holder(t)
    data = collections.UserDict({"a": t, "b": (t,), "pair": Pair(t, 1)})
    xm.save([model, holder, data, t], tmp_path / "c")
    loaded = torch.load(tmp_path / "c", weights_only=False)
    assert loaded[0][0].weight.device.type == "cpu" and torch.equal(
        loaded[0][0].weight, model[0].weight.cpu()
    )
    assert isinstance(loaded[0][0].weight, torch.nn.Parameter)
    assert loaded[1].tensor.device.type == "cpu" and loaded[1].plain == [1, 2]
    assert loaded[2]["a"] is loaded[3] is loaded[2]["b"][0] is loaded[2]["pair"].a
    assert holder.tensor is t and model[0].weight.device.type == "xla" and data["a"] is t


def test_a_second_save_replaces_the_first_and_a_broken_one_does_not(tmp_path, monkeypatch):
    path = str(tmp_path / "c")
    xser.save([torch.ones(2, device="xla"), torch.ones(3)], path)
    xser.save([torch.zeros(2, device="xla")], path)
    assert torch.equal(xser.load(path)[0], torch.zeros(2)) and len(os.listdir(path + ".tensors")) == 1
    real, calls = torch.save, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("disk full")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError):
        xser.save([torch.ones(2, device="xla"), torch.ones(3, device="xla")], path)
    monkeypatch.undo()
    assert torch.equal(xser.load(path)[0], torch.zeros(2))


def tensor_files(path):
    return sorted(pathlib.Path(path + ".tensors").rglob("tensor_*.pt"))


@pytest.mark.parametrize("which", ["structure", "tensor"])
@pytest.mark.parametrize("how", ["cut", "flip", "empty"])
def test_damage_is_found(tmp_path, which, how):
    path = str(tmp_path / "c")
    xser.save([torch.arange(5000, device="xla"), "text" * 50], path)
    file = pathlib.Path(path) if which == "structure" else tensor_files(path)[0]
    data = bytearray(file.read_bytes())
    if how == "flip":
        data[len(data) // 3] ^= 16
    file.write_bytes({"cut": data[: len(data) // 2], "flip": data, "empty": b""}[how])
    with pytest.raises(DynamotorError, match="DM654") as error:
        xser.load(path)
    assert str(file) in str(error.value) and "what to do" in str(error.value)


def test_a_missing_tensor_is_found(tmp_path):
    path = str(tmp_path / "c")
    xser.save([torch.ones(2)], path)
    shutil.move(path, tmp_path / "alone")
    with pytest.raises(DynamotorError, match="DM654.*(\n.*)*is missing"):
        xser.load(str(tmp_path / "alone"))
    with pytest.raises(FileNotFoundError):
        xser.load(path)


class Evil:
    def __reduce__(self):
        return (os.mkdir, (os.environ["EVIL_DIR"],))


def test_nothing_but_data_is_unpickled_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL_DIR", str(tmp_path / "evil"))
    path = str(tmp_path / "c")
    xser.save({"a": torch.ones(2), "b": Evil()}, path)
    with pytest.raises(DynamotorError, match="DM655.*(\n.*)*weights_only=False"):
        xser.load(path)
    assert not (tmp_path / "evil").exists()
    xser.load(path, weights_only=False)
    assert (tmp_path / "evil").exists()


def test_the_layout_of_the_original_can_be_read(tmp_path):
    path = str(tmp_path / "c")
    os.mkdir(path + ".tensors")
    torch.save(torch.ones(3), path + ".tensors/tensor_0.pt")
    torch.save({"w": xser.TensorReference(0)}, path)
    assert torch.equal(xser.load(path)["w"], torch.ones(3))


def test_only_the_master_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(xm, "is_master_ordinal", lambda local=True: False)
    xser.save([torch.ones(2)], str(tmp_path / "c"))
    xm.save([torch.ones(2)], str(tmp_path / "d"))
    assert not os.listdir(tmp_path)
    xser.save([torch.ones(2)], str(tmp_path / "c"), master_only=False)
    assert os.path.exists(tmp_path / "c")


def test_torch_load_puts_tensors_on_the_device_and_keeps_what_they_share(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    whole = [x, x[1], x.t(), x[:, 1:3], x.t().clone(), torch.tensor(3), torch.zeros(0, 3)]
    lazy = [torch.tensor([1 + 2j]).conj(), torch.tensor([1, 65535], dtype=torch.uint16)]
    torch.save({"all": whole + lazy, "w": torch.nn.Parameter(x.clone())}, tmp_path / "a")
    read = {device: torch.load(tmp_path / "a", map_location=device) for device in ("cpu", "xla")}
    for device, loaded in read.items():
        assert all(tensor.device.type == device for tensor in (*loaded["all"], loaded["w"]))
        loaded["all"][1].mul_(2)
        loaded["all"][2][0, 0] = 50
    for left, right in zip(read["cpu"]["all"], read["xla"]["all"]):
        assert left.stride() == right.stride() and left.dtype is right.dtype
        assert torch.equal(left, right.cpu())
    assert read["xla"]["w"].is_leaf and read["xla"]["w"].requires_grad
    torch.save(read["xla"], tmp_path / "b")
    assert torch.load(tmp_path / "b", map_location="cpu")["w"].device.type == "cpu"
