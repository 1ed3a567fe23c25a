"""What loaders of a checkpoint folder have in common: where it is, its config.json and what else lies in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ktforge.checkpoint.folder import CheckpointFolder
from ktforge.contract.stages import Loader


class FolderLoader(Loader):
    """A loader of a folder; a subclass says which files hold the weights and how they are read."""

    path: Path = Field(description="The checkpoint's folder.")
    follow_links: bool | None = Field(
        default=None, description="Follow symbolic links of any file, not of weights alone, wherever they lead."
    )

    def folder(self) -> Path:
        return self.path

    def config(self) -> Mapping[str, Any]:
        return self.contents().config()

    def side_files(self) -> Sequence[Path]:
        return self.contents().side_files()

    def contents(self) -> CheckpointFolder:
        """The folder as ktforge reads it."""
        return CheckpointFolder(self.path, bool(self.follow_links))
