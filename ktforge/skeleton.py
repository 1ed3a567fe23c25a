"""Writes a new plugin package: tests/example_plugin, which is shipped as data, under another name."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from ktforge.errors import ConfigError, OutputError

FILES = ("README.md", "ktforge_example.py", "pyproject.toml", "tests/test_ktforge_example.py")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def write_skeleton(name: str, folder: Path | None = None) -> Path:
    """Writes the package ``ktforge-{name}`` into ``folder`` (default: of that name, here) and returns the folder.

    Raises ConfigError for a name that is not lower-case words joined by hyphens, OutputError for a folder that has
    something in it or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no plugin name: lower-case letters, digits and single hyphens, such as my-int3")
    folder = folder or Path(f"ktforge-{name}")
    template = files("ktforge") / "data" / "example_plugin"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder} exists already: choose another folder with --output")
        for file in FILES:
            target = folder / _renamed(file, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_renamed(template.joinpath(file).read_text("utf-8"), name), "utf-8")
    except OSError as error:
        raise OutputError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return folder


def _renamed(text: str, name: str) -> str:
    """The example's module, class and plain name replaced by those of ``name``."""
    camel = "".join(word.capitalize() for word in name.split("-"))
    text = text.replace("ktforge_example", f"ktforge_{name.replace('-', '_')}")
    return text.replace("Example", camel).replace("example", name)
