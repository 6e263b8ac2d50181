"""Builds the C extension `dynamotor._C` (frame hook, guards, dispatch, launch); everything else is in
pyproject.toml. In a checkout, `python setup.py build_ext --inplace` prepares dynamotor-xla, too.
"""

import runpy
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
XLA = ROOT / "xla"
source_digest = runpy.run_path(str(ROOT / "dynamotor/base/source_digest.py"))["source_digest"]


class BuildBoth(build_ext):
    """In place: dynamotor-xla's extension as well, and the entry points of both, by which the core finds its parts."""

    def run(self) -> None:
        super().run()
        if self.inplace and not self.editable_mode and (XLA / "setup.py").exists():
            self.run_command("egg_info")
            command = [sys.executable, "setup.py", "-q", "egg_info", "build_ext", "--inplace"]
            subprocess.run(command, cwd=XLA, check=True)


setup(
    cmdclass={"build_ext": BuildBoth},
    ext_modules=[
        Extension(
            "dynamotor._C",
            sources=sorted(glob("dynamotor/csrc/*.c") + glob("dynamotor/csrc/*.cpp")),
            depends=sorted(glob("dynamotor/csrc/*.h")),
            extra_compile_args=["-O2", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"],
            define_macros=[("BUILT_FROM", f'"{source_digest(ROOT / "dynamotor/csrc")}"')],
            libraries=["dl"],
        )
    ],
)
