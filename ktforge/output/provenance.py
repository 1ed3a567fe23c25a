"""Which code makes an output: versions of what is installed, and hashes of code that no version stands for."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import xxhash

from ktforge.contract.checks import with_delegates
from ktforge.contract.plan import Recipe
from ktforge.contract.stages import Stage

#: What of a package is code: its modules, and what they were compiled to.
_CODE = ("*.py", "*.so")


def versions(recipe: Recipe) -> dict[str, str]:
    """Distribution → version of ktforge and of every stage's code."""
    owners = _distributions()
    names = {"ktforge", *(name for module in _modules(recipe) for name in owners.get(_top(module), []))}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def unversioned(recipe: Recipe) -> dict[str, str]:
    """File or package → xxh3-128 of its code, in hex, for stages whose code may change under one version.

    That is a file given with ``--plugin``, a script, and a package that is not installed, or installed as editable. A
    package counts with all its modules, a single file for itself alone.
    """
    owners = _distributions()
    found: dict[str, set[Path]] = {}
    for module in _modules(recipe):
        names = owners.get(_top(module), [])
        if not names or any(_is_editable(name) for name in names):
            label, files = _code(module)
            found.setdefault(label, set()).update(files)
    return {label: _hash(files) for label, files in sorted(found.items()) if files}


def _modules(recipe: Recipe) -> set[str]:
    """The modules of all stages' classes, and of the classes that they build on."""
    return {
        cls.__module__ for stage in with_delegates(recipe.all_stages()) for cls in type(stage).__mro__
        if issubclass(cls, Stage)
    }  # fmt: skip


def _top(module: str) -> str:
    return module.partition(".")[0]


def _code(module: str) -> tuple[str, list[Path]]:
    """What to call the code of a module, and its files; none where it was typed into an interpreter."""
    package = sys.modules.get(_top(module))
    if hasattr(package, "__path__") and (file := getattr(package, "__file__", None)):
        return _top(module), [path for pattern in _CODE for path in Path(file).parent.rglob(pattern)]
    file = getattr(sys.modules.get(module), "__file__", None)
    return (Path(file).name, [Path(file)]) if file else (module, [])


def _hash(files: set[Path]) -> str:
    digest = xxhash.xxh3_128()
    for file in sorted(f for f in files if f.is_file()):  # no links to nothing, such as Emacs's locks
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@cache
def _is_editable(distribution: str) -> bool:
    """Whether pip installed a folder in place (PEP 610)."""
    origin = json.loads(importlib.metadata.distribution(distribution).read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Top-level module → the distributions that hold it; cached, for it takes 0.1 s to look through all."""
    return importlib.metadata.packages_distributions()
