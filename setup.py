"""What pyproject.toml cannot say: how the C extension is built, and that its wheel is for every Python from 3.11 on."""

import sys
import sysconfig
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))

from native.build import BuildExt

# cffi leaves the stable ABI where Python has no global lock, which has none.
stable = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}}
setup(cffi_modules=["native/build.py:ffi"], cmdclass={"build_ext": BuildExt}, options=stable)
