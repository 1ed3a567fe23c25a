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
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder to write.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an unfinished output instead of going on with it.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare the hashes of what an unfinished output holds.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the weights in an output folder that has some.")]
