"""What a loader finds, read in one go: everything that is wrong with a checkpoint comes out together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ktforge.checkpoint.folder import CheckpointFolder
from ktforge.contract.checks import blame, check_specs, owner
from ktforge.contract.identity import Identity
from ktforge.contract.plan import ModelConfig
from ktforge.contract.stages import Loader
from ktforge.contract.tensors import SourceFile, TensorSpec
from ktforge.errors import CheckpointError, PluginError
from ktforge.model.adapters import unmerged
from ktforge.model.config import read_model_config
from ktforge.model.guess import tensor_problems
from ktforge.model.settle import settled, speaks_of_experts, unannounced_experts

Read = TypeVar("Read")


@dataclass(frozen=True)
class Source:
    """A checkpoint as headers and config.json describe it.

    ``settled`` are fields that config.json lacks and the tensors tell; ``documents`` and ``identities`` those of
    :class:`~ktforge.contract.plan.Plan`.
    """

    config: Mapping[str, Any]
    settled: Mapping[str, Any]
    model: ModelConfig
    tensors: tuple[TensorSpec, ...]
    side_files: tuple[Path, ...]
    files: tuple[SourceFile, ...]
    documents: Mapping[str, str]
    identities: Mapping[Path, Identity]

    @property
    def known(self) -> Mapping[str, Any]:
        """What stages are told: config.json, and what it lacks."""
        return {**self.config, **self.settled}


def _config(loader: Loader) -> Mapping[str, Any]:
    config = loader.config()
    if not isinstance(config, Mapping):
        raise PluginError(f"{owner(loader)} gave {type(config).__name__} for the config; a mapping was expected")
    return config


def read_source(loader: Loader) -> Source:
    """Reads headers and config.json. Raises CheckpointError with everything that keeps them from being read."""
    problems: list[str] = []

    def attempt(read: Callable[[], Read]) -> Read | None:
        try:
            return read()
        except CheckpointError as error:
            problems.extend(p for p in error.problems if p not in problems)
            return None
        except OSError as error:  # of the disk or the user's rights, whoever's code met it
            problems.append(f"{str(error.filename or loader.folder())[:200]} cannot be read: {error.strerror}")
            return None

    folder = loader.folder()
    documents = attempt(lambda: _documents(folder)) or {}
    with blame(loader, "its checkpoint"):
        config = attempt(lambda: _config(loader))
        tensors = attempt(lambda: _scanned(loader))
        # Where there is neither, it is some folder, and may be a whole disk to walk through.
        side_files = attempt(lambda: tuple(loader.side_files())) if tensors is not None or config is not None else None
        files = attempt(lambda: tuple(loader.sources())) if tensors is not None else None
    identities = attempt(lambda: {f.path: f.identity or Identity.of(os.stat(f.path)) for f in files or ()}) or {}
    if tensors is not None and (adapter := unmerged(tensors)):
        raise CheckpointError(*problems, adapter)
    model: ModelConfig | None = None
    more: Mapping[str, Any] = {}
    if config is not None:
        more = settled(config, tensors or ())
        before, problems[:] = list(problems), []
        model = attempt(lambda: read_model_config({**config, **more}))
        named = speaks_of_experts(tensors) if tensors is not None and model is not None and not model.experts else None
        if named is not None:
            problems.append(unannounced_experts(named))
            model = None
        problems += before
        if model is None and tensors is not None:
            problems += tensor_problems(config, tensors)
    if config is None or model is None or tensors is None or side_files is None or files is None:
        raise CheckpointError(*problems)
    if problems:
        raise CheckpointError(*problems)
    if attempt(lambda: _documents(folder)) != documents:
        raise CheckpointError(f"{folder} changed while it was looked at: start again when it is complete")
    weights = {file.path for file in files}
    if folder is not None:  # weights under a suffix that nobody else knows are in the folder, too
        side_files = tuple(p for p in side_files if folder / p not in weights)
    return Source(config, more, model, tensors, side_files, files, documents, identities)


def _documents(folder: Path | None) -> Mapping[str, str]:
    return CheckpointFolder(folder).documents() if folder is not None else {}


def _scanned(loader: Loader) -> tuple[TensorSpec, ...]:
    specs = tuple(loader.scan())
    check_specs(specs)
    return specs
