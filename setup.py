"""The one thing pyproject.toml cannot say: how the C extension is built."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))

from native.build import BuildExt

setup(cffi_modules=["native/build.py:ffi"], cmdclass={"build_ext": BuildExt})
