"""Builds the C extension `dynamotor._C` (frame hook, guards, dispatch, launch); everything else is in
pyproject.toml.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "dynamotor._C",
            sources=sorted(glob("dynamotor/csrc/*.c")),
            depends=sorted(glob("dynamotor/csrc/*.h")),
            extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"],
            libraries=["dl"],
        )
    ]
)
