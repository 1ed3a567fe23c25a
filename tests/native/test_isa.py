import os
import subprocess
import sys

import pytest

from ktforge import ConfigError, native


def test_the_best_supported_isa_is_the_default():
    supported = [name for name, available in native.isas().items() if available]
    script = "from ktforge import native; print(native.current_isa())"
    environment = {k: v for k, v in os.environ.items() if k != native.ISA_VARIABLE}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == supported[-1]


@pytest.mark.parametrize("name", [name for name, available in native.isas().items() if available])
def test_the_environment_forces_one(name):
    script = "from ktforge import native; print(native.current_isa())"
    environment = {**os.environ, native.ISA_VARIABLE: name}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == name


def test_an_unknown_one_is_refused_with_the_usable_ones():
    with pytest.raises(ConfigError, match="no instruction set 'mmx'; usable: scalar"):
        native.use_isa("mmx")
