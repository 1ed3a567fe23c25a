"""What this package needs beside ktforge's own requirements; to import it is to ask."""

from importlib.metadata import version
from importlib.util import find_spec

from ktforge.errors import ConfigError

if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
    raise ConfigError(f"this needs {' and '.join(missing)}: pip install 'ktforge[hf]'")
if int(version("transformers").partition(".")[0]) < 5:
    raise ConfigError(
        f"transformers {version('transformers')} has no interface for the computation of experts, which came with "
        "version 5: pip install --upgrade 'ktforge[hf]'"
    )
