"""Settings of every test: a cache of its own, one thread, the verifier on, `--update-golden` for texts kept
in files.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# The workers and children of this process use its cache.
_own_cache = "" if "DYNAMOTOR_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="dynamotor-test-cache-")
os.environ.setdefault("DYNAMOTOR_CACHE_DIR", _own_cache)
os.environ.setdefault("DYNAMOTOR_VERIFY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# XLA's programs are written as LLVM's code at once, in one unit, and without optimisations: a fifth of the
# time. By way of MLIR, optimised and in many units, as users have them, they are in `make test-all`.
_quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    _jaxlib = importlib.metadata.version("jaxlib").split(".")
    if (int(_jaxlib[0]), int(_jaxlib[1])) < (0, 11):  # 0.11.1 and later ones end a process that names it
        _quick.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_quick))
# Hundreds of processes import the package and these tests: their bytecode is kept, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if not os.path.exists("/dev/nvidia0"):  # without a GPU, kernels for one run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

import bench.verification  # noqa: E402, F401  # registers the costly checks and the interpreter

# A seed for a device that is not there is kept with the text of the whole stack: 0.8 ms for each `torch.manual_seed`.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        _device.manual_seed_all = lambda seed: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the texts under tests/**/golden")


def pytest_unconfigure() -> None:
    if _own_cache:
        shutil.rmtree(_own_cache, ignore_errors=True)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no garbage collection of a test looks through it again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(params=["numbers", "symbols"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with sizes that are numbers, and with symbolic ones from the first call on. A check
    that knows only numbers lets the second pass."""
    import dynamotor

    if request.param == "symbols":
        monkeypatch.setattr(dynamotor, "compile", functools.partial(dynamotor.compile, dynamic=True))


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Objects that a test makes stay young, so that `gc.collect(1)` meets all of them: an automatic collection would
    move those that are still alive to the oldest generation, and a whole worker's heap takes a second to collect."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    """A test's random numbers are its own, whatever ran before it, and so are its compiled callables: those that
    wait for the collector share nothing with them."""
    siblings = sys.modules.get("dynamotor.capture.siblings")
    if siblings is not None:
        siblings.forget()
    torch.set_num_threads(1)
    torch.manual_seed(0)


# Tests that run in check mode (codegen/checked.py), each compiled graph beside eager, over poisoned and guarded
# memory: those of these rooms, and regression tests.
CHECKED = ("tests/autograd", "tests/codegen", "tests/lower", "tests/test_soundness.py")

# Of tests that compile much, those with more parameters than the first number: `make test` takes the first and one
# in so many of the others; a `sweep` says otherwise.
SAMPLED = {
    **dict.fromkeys(
        [f"tests/{room}" for room in ("autograd", "capture", "codegen", "lower", "models", "step")], (1, 20)
    ),
    "xla/tests": (1, 20),
    "tests/graph": (8, 5),
    "tests/tools": (8, 5),
    "tests/distributed": (1, 7),  # two processes each
    "tests/fuzz": (1, 10),
}

# Known to fail, each to be mended: they run, and a mend shows as XPASS.
KNOWN: dict[str, str] = {}


@functools.cache
def place_of(path: Path) -> str:
    """A path of the repository, as the tables here have it."""
    return (
        path.relative_to(Path(__file__).parent).as_posix()
        if path.is_relative_to(Path(__file__).parent)
        else ""
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions = [item.nodeid.partition("[")[0] for item in items]
    counts, places = Counter(functions), Counter[str]()
    for item, function in zip(items, functions, strict=True):
        sweep = item.get_closest_marker("sweep")
        many, one_in = SAMPLED.get(place_of(item.path.parent), (sys.maxsize, 1))
        if item.get_closest_marker("regression"):
            many, one_in = 2, 10
        if "update_golden" in getattr(item, "fixturenames", ()):  # cheap, and each has a text of its own
            left_out = False
        elif sweep:
            left_out = places[function] % sweep.args[0]
        else:  # by name: every third would be one of three types
            chosen = zlib.crc32(item.nodeid.encode()) % one_in == 0
            left_out = counts[function] > many and places[function] and not chosen
        if left_out:
            item.add_marker(pytest.mark.slow)
        places[function] += 1
        in_eager = any(map(item.get_closest_marker, ("slow", "runs_eager")))
        if item.path.parent.name in ("lower", "codegen") and not in_eager:  # or it compares eager with itself
            item.add_marker(pytest.mark.filterwarnings("error::dynamotor.base.errors.EagerWarning"))
        for part, reason in KNOWN.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


@pytest.fixture(autouse=True)
def _beside_eager(request: pytest.FixtureRequest) -> Iterator[None]:
    """DYNAMOTOR_CHECK=1 or 0 decides for all rooms instead."""
    from dynamotor.base.config import config

    before = config.check
    if "DYNAMOTOR_CHECK" not in os.environ:
        regression = request.node.get_closest_marker("regression") is not None
        config.check = regression or place_of(request.path).startswith(CHECKED)
    yield
    config.check = before
