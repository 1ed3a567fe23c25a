"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ktforge.registry import Registry

PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file, such as layout.threadpool_count=4."),
]
InputPath = Annotated[Path, typer.Option("--input-path", metavar="DIR", help="The checkpoint's folder.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's folder.")]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder to write.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an unfinished output instead of going on with it.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare the hashes of what an unfinished output holds.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the weights in an output folder that has some.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Threads that convert.  [default: the cores this process may use]"),
]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory to work on at once, such as 2GB.")
]

Block = Annotated[
    list[str] | None,
    typer.Option(
        "--block", metavar="NAME", help="Turn a plugin off (its name in ktforge plugins); also KTFORGE_BLOCK=NAME,NAME."
    ),
]
PluginFiles = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE.PY", help="Add a plugin that is not installed.")
]


def installed(block: list[str] | None, plugins: list[Path] | None) -> Registry:
    """The registry that ``--block`` and ``--plugin`` ask for. Raises PluginError, ConfigError."""
    from ktforge.registry import Registry, load_file

    registry = Registry.installed(blocked=block or ())
    for path in plugins or ():
        registry.add(load_file(path), name=str(path))
    return registry
