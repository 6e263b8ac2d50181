"""The file cache of a data set, local and on a cloud filesystem."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
import torch

pytest.importorskip("jax")
memory = pytest.importorskip("fsspec.implementations.memory")
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.utils import gcsfs  # noqa: E402
from dynamotor.xla.utils.cached_dataset import CachedDataset  # noqa: E402


class Squares(torch.utils.data.Dataset):
    def __init__(self, count=25):
        self.count, self.computed = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.computed.append(index)
        return {
            "x": torch.full((3,), float(index)),
            "n": np.arange(index),
            "y": (index**2, "é", np.float32(index)),
        }


def check(sample, index):
    assert sample["x"].tolist() == [index] * 3 and sample["n"].tolist() == list(range(index))
    assert sample["y"] == (index**2, "é", np.float32(index))


@pytest.fixture(params=["local", "gs"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "local":
        return str(tmp_path / "cache")
    fs = memory.MemoryFileSystem()
    fs.store.clear()
    monkeypatch.setattr(gcsfs, "_filesystem", lambda: fs)
    return "gs://bucket/cache"


@pytest.mark.parametrize("compress", [True, False])
def test_samples_are_computed_once(folder, compress):
    source = Squares()
    dataset = CachedDataset(source, folder, max_files_per_folder=4, compress=compress)
    for index in (3, 24, 0, 3, -1):
        check(dataset[index], index % 25)
    assert source.computed == [3, 24, 0] and len(dataset) == 25
    dataset.warmup()
    assert sorted(source.computed) == list(range(25))
    with pytest.raises(IndexError):
        dataset[25]
    alone = CachedDataset(None, folder)
    assert len(alone) == 25
    for index, sample in enumerate(alone):
        check(sample, index)


def test_no_folder_gets_more_files_than_allowed(tmp_path):
    CachedDataset(Squares(), str(tmp_path), max_files_per_folder=4).warmup()
    for folder, folders, files in os.walk(tmp_path):
        assert len([f for f in files if f != "METADATA"]) <= 4 and len(folders) <= 4, folder
    assert (tmp_path / "1/2/24.pt").exists() or (tmp_path / "1" / "2").exists()


def test_compression_compresses(tmp_path):
    class Zeros(Squares):
        def __getitem__(self, index):
            return torch.zeros(10000)

    sizes = []
    for compress in (True, False):
        CachedDataset(Zeros(1), str(tmp_path / str(compress)), compress=compress).warmup()
        sizes.append(sum(f.stat().st_size for f in pathlib.Path(tmp_path / str(compress)).rglob("*.pt")))
    assert sizes[0] * 10 < sizes[1]


def test_damaged_samples_are_computed_anew_or_reported(tmp_path):
    CachedDataset(Squares(3), str(tmp_path)).warmup()
    for file in tmp_path.rglob("1.pt"):
        file.write_bytes(file.read_bytes()[:30])
    with pytest.raises(DynamotorError, match="DM654"):
        CachedDataset(None, str(tmp_path))[1]
    source = Squares(3)
    check(CachedDataset(source, str(tmp_path))[1], 1)
    assert source.computed == [1]
    check(CachedDataset(None, str(tmp_path))[1], 1)


def test_what_is_missing_or_of_another_data_set_is_an_error(tmp_path):
    CachedDataset(Squares(3), str(tmp_path))[0]
    with pytest.raises(DynamotorError, match="DM657"):
        CachedDataset(None, str(tmp_path))[2]
    with pytest.raises(DynamotorError, match="DM656"):
        CachedDataset(Squares(4), str(tmp_path))
    with pytest.raises(DynamotorError, match="DM656"):
        CachedDataset(None, str(tmp_path / "nothing"))


class Custom:
    pass


def test_other_objects_only_when_asked(tmp_path):
    class Objects(Squares):
        def __getitem__(self, index):
            return Custom()

    dataset = CachedDataset(Objects(2), str(tmp_path))
    dataset[0]
    with pytest.raises(DynamotorError, match="DM655"):
        dataset[0]
    assert isinstance(CachedDataset(None, str(tmp_path), weights_only=False)[0], Custom)


def test_a_data_loader_with_workers_reads_it(tmp_path):
    CachedDataset(Squares(8), str(tmp_path)).warmup()
    loader = torch.utils.data.DataLoader(CachedDataset(None, str(tmp_path)), batch_size=None, num_workers=0)
    for index, sample in enumerate(loader):
        assert sample["x"].tolist() == [index] * 3


def test_a_row_of_a_large_tensor_is_kept_without_the_others(tmp_path):
    rows = torch.randn(3, 100_000)[:, :10]
    data_set = CachedDataset(
        [(row, {"again": row[2:]}) for row in rows], str(tmp_path / "cache"), compress=False
    )
    data_set.warmup()
    assert max(path.stat().st_size for path in (tmp_path / "cache").rglob("*.pt")) < 20_000
    found, other = data_set[1]
    assert torch.equal(found, rows[1]) and torch.equal(other["again"], rows[1, 2:])
