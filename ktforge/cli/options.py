"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file, such as layout.threadpool_count=4."),
]
InputPath = Annotated[Path, typer.Option("--input-path", metavar="DIR", help="The checkpoint's folder.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's folder.")]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the weights in an output folder that has some.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Threads that convert.  [default: the cores this process may use]"),
]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory to work on at once, such as 2GB.")
]
