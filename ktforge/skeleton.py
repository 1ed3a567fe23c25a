"""Writes a new plugin package: one of those below tests that are shipped as data, under another name."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from ktforge.errors import ConfigError, OutputError

FILES = ("README.md", "ktforge_example.py", "pyproject.toml", "tests/test_ktforge_example.py")
#: What a package has, by its kind; without one, it has a quantizer and a layout.
KINDS = ("loader", "preprocess", "quantize", "layout", "writer", "observer")
_STAGES = {"preprocess": "preprocessor", "quantize": "quantizer"}
#: What stands in the description of the package that the others take their pyproject.toml from.
_BOTH = "quantizer and layout"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def write_skeleton(name: str, folder: Path | None = None, kind: str | None = None) -> Path:
    """Writes the package ``ktforge-{name}`` into ``folder`` (default: of that name, here) and returns the folder.

    Raises ConfigError for a name that is not lower-case words joined by hyphens or a kind that is none of KINDS,
    OutputError for a folder that has something in it or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no plugin name: lower-case letters, digits and single hyphens, such as my-int3")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"{kind!r} is no kind of plugin: there are {', '.join(KINDS)}")
    folder = folder or Path(f"ktforge-{name}")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder} exists already: choose another folder with --output")
        for file in FILES:
            target = folder / _renamed(file, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_renamed(_text(file, kind), name), "utf-8")
    except OSError as error:
        raise OutputError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return folder


def _text(file: str, kind: str | None) -> str:
    """A file of the example; the packages of one kind share the pyproject.toml of the other one."""
    data = files("ktforge") / "data"
    if kind is None or file == "pyproject.toml":
        text = data.joinpath("example_plugin", file).read_text("utf-8")
        return text if kind is None else text.replace(_BOTH, _STAGES.get(kind, kind))
    return data.joinpath("example_plugins", kind, file).read_text("utf-8")


def _renamed(text: str, name: str) -> str:
    """The example's module, class, variable and plain name replaced by those of ``name``."""
    camel = "".join(word.capitalize() for word in name.split("-"))
    snake = name.replace("-", "_")
    text = text.replace("ktforge_example", f"ktforge_{snake}").replace("EXAMPLE", snake.upper())
    return text.replace("Example", camel).replace("example", name)
