"""ktforge turns Hugging Face checkpoints into the weight files that CPU inference engines read.

This module is the public API; whatever is not named here may change without notice. Names are imported when they are
asked for, since numpy and pydantic take half a second that ``ktforge --help`` need not wait for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktforge.checkpoint import CheckpointFolder
    from ktforge.errors import (
        CheckpointError,
        ConfigError,
        KtforgeError,
        OutputError,
        PlanError,
        PluginError,
        Unsupported,
    )
    from ktforge.folderloader import FolderLoader
    from ktforge.hookspecs import hookimpl
    from ktforge.output import open_folder
    from ktforge.pipeline import Pipeline, Runtime
    from ktforge.plan import Plan
    from ktforge.registry import Registry
    from ktforge.rules import Rule
    from ktforge.stages import Layout, Loader, Preprocessor, Quantizer, Sink, Writer
    from ktforge.tensors import (
        Demand,
        FileSpec,
        PackedSpec,
        PackedUnit,
        Part,
        QuantPart,
        QuantSpec,
        QuantUnit,
        SourceFile,
        TensorSpec,
        Unit,
        UnitSpec,
    )
    from ktforge.unitplan import Result

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointFolder": "checkpoint",
    "ConfigError": "errors",
    "Demand": "tensors",
    "FileSpec": "tensors",
    "FolderLoader": "folderloader",
    "KtforgeError": "errors",
    "Layout": "stages",
    "Loader": "stages",
    "OutputError": "errors",
    "PackedSpec": "tensors",
    "PackedUnit": "tensors",
    "Part": "tensors",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "PlanError": "errors",
    "PluginError": "errors",
    "Preprocessor": "stages",
    "QuantPart": "tensors",
    "QuantSpec": "tensors",
    "QuantUnit": "tensors",
    "Quantizer": "stages",
    "Registry": "registry",
    "Result": "unitplan",
    "Rule": "rules",
    "Runtime": "pipeline",
    "Sink": "stages",
    "SourceFile": "tensors",
    "TensorSpec": "tensors",
    "Unit": "tensors",
    "UnitSpec": "tensors",
    "Unsupported": "errors",
    "Writer": "stages",
    "hookimpl": "hookspecs",
    "open_folder": "output",
}

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "ConfigError",
    "Demand",
    "FileSpec",
    "FolderLoader",
    "KtforgeError",
    "Layout",
    "Loader",
    "OutputError",
    "PackedSpec",
    "PackedUnit",
    "Part",
    "Pipeline",
    "Plan",
    "PlanError",
    "PluginError",
    "Preprocessor",
    "QuantPart",
    "QuantSpec",
    "QuantUnit",
    "Quantizer",
    "Registry",
    "Result",
    "Rule",
    "Runtime",
    "Sink",
    "SourceFile",
    "TensorSpec",
    "Unit",
    "UnitSpec",
    "Unsupported",
    "Writer",
    "hookimpl",
    "open_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
