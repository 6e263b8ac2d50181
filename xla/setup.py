"""Builds the C extension `dynamotor.xla._C` (calls of executables, times); everything else is in
pyproject.toml.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "dynamotor.xla._C",
            sources=sorted(glob("dynamotor/xla/csrc/*.c")),
            depends=sorted(glob("dynamotor/xla/csrc/*.h")),
            extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"],
        )
    ]
)
