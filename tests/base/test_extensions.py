"""Parts of the package that other distributions install: found where they are there, named where they are not."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

from children import run_forked

import dynamotor
from dynamotor.base import extensions
from dynamotor.base.extensions import MissingExtension

ROOT = Path(dynamotor.__file__).parents[1]

CORE_ALONE = """
import sys
sys.path[:] = [path for path in sys.path if not path.rstrip("/").endswith("/xla")]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
sys.modules["jax"] = None
import importlib.metadata as metadata
found = metadata.entry_points
def of_others(**by):
    points = found(**by)
    return metadata.EntryPoints(p for p in points if "dynamotor.xla" not in p.value) if by else points
metadata.entry_points = of_others
import torch, dynamotor
assert len(dynamotor.__path__) == 1, dynamotor.__path__
"""


def run(program: str, *folders: Path) -> str:
    """The output of a program that finds packages in these folders, too."""
    done = run_forked("import sys\nsys.path += sys.argv[1:]\n" + program, *map(str, folders))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_alone_compiles_and_says_where_xla_comes_from() -> None:
    program = """
f = lambda x: x.sin() * 2
x = torch.ones(3, requires_grad=True)
torch.testing.assert_close(dynamotor.compile(f)(x), f(x))
assert not [name for name in dynamotor.list_backends() if name == "xla"]
for ask in (lambda: __import__("dynamotor.xla"), lambda: dynamotor.compile(f, backend="xla")(x)):
    try:
        ask()
    except ImportError as error:
        assert error.code == "DM690" and "pip install dynamotor[xla]" in str(error), error
    else:
        raise AssertionError("no error")
assert "jax" not in [name for name, module in sys.modules.items() if module is not None]
"""
    run(CORE_ALONE + program)


def test_the_command_line_says_where_xla_comes_from(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    program = f"from dynamotor.__main__ import main\nprint(main(['run', '--torch-xla', {str(tmp_path / 'program.py')!r}]))"
    assert run(CORE_ALONE + program).strip() == "2"


def test_a_part_in_a_folder_of_its_own_is_found_and_a_copy_of_the_core_is_not(tmp_path: Path) -> None:
    part, copy = tmp_path / "part", tmp_path / "copy"
    for folder, name in ((part / "dynamotor", "some"), (copy / "dynamotor", "other")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("value = 1\n")
    (copy / "dynamotor" / "__init__.py").write_text("")
    program = """
import importlib.util
import dynamotor, dynamotor.some
assert dynamotor.some.value == 1 and importlib.util.find_spec("dynamotor.other") is None
"""
    run(program, part, copy)


def test_entry_points_give_backends(tmp_path: Path) -> None:
    info = tmp_path / "more-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dynamotor.backends]\nmore_eager = more:eager\n")
    (tmp_path / "more.py").write_text(
        "def eager(gm, inputs):\n    print('compiled')\n    return gm.forward\n"
    )
    program = """
import torch, dynamotor
assert "more_eager" in dynamotor.list_backends()
print(dynamotor.compile(lambda x: x + 1, backend="more_eager")(torch.ones(1)).item())
"""
    said = run(program, tmp_path)
    assert said.split() == ["compiled", "2.0"]


def test_the_error_is_an_import_error_that_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(MissingExtension("backend 'xla'")))
    assert isinstance(error, ModuleNotFoundError) and error.code == "DM690" and "backend 'xla'" in str(error)
    assert extensions.provided(extensions.BACKENDS, "no such backend") is None


def test_both_distributions_have_one_version() -> None:
    core, xla = (tomllib.loads((ROOT / p / "pyproject.toml").read_text())["project"] for p in (".", "xla"))
    assert core["version"] == xla["version"] == dynamotor.__version__
    assert f"dynamotor=={core['version']}" in xla["dependencies"]
    assert core["optional-dependencies"]["xla"] == [f"dynamotor-xla=={core['version']}"]
    assert not [name for name in core["dependencies"] if "jax" in name]
