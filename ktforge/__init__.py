"""ktforge turns Hugging Face checkpoints into the weight files that CPU inference engines read.

This module is the public API; whatever is not named here may change without notice. Names are imported when they are
asked for, since numpy and pydantic take half a second that ``ktforge --help`` need not wait for.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktforge.checkpoint.folder import CheckpointFolder
    from ktforge.checkpoint.loader import FolderLoader
    from ktforge.comparison.compare import compare
    from ktforge.contract.hooks import hookimpl
    from ktforge.contract.plan import ModelConfig, Plan, Runtime, Sink, Summary, Writer
    from ktforge.contract.presets import Preset
    from ktforge.contract.registry import Registry
    from ktforge.contract.rules import Rule
    from ktforge.contract.stages import Layout, Loader, Preprocessor, Quantizer, Result, Stage
    from ktforge.contract.tensors import (
        Demand,
        FileSpec,
        FusedWeight,
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
    from ktforge.errors import (
        AlreadyDone,
        CheckpointError,
        ConfigError,
        KtforgeError,
        OutputError,
        PlanError,
        PluginError,
        Unsupported,
    )
    from ktforge.model.number_format import NumberFormat
    from ktforge.output.folder import open_folder
    from ktforge.pipeline.pipeline import Pipeline
    from ktforge.verification.verify import verify

_HOMES = {
    "AlreadyDone": "errors",
    "CheckpointError": "errors",
    "CheckpointFolder": "checkpoint.folder",
    "ConfigError": "errors",
    "Demand": "contract.tensors",
    "FileSpec": "contract.tensors",
    "FolderLoader": "checkpoint.loader",
    "FusedWeight": "contract.tensors",
    "KtforgeError": "errors",
    "Layout": "contract.stages",
    "Loader": "contract.stages",
    "ModelConfig": "contract.plan",
    "NumberFormat": "model.number_format",
    "OutputError": "errors",
    "PackedSpec": "contract.tensors",
    "PackedUnit": "contract.tensors",
    "Part": "contract.tensors",
    "Pipeline": "pipeline.pipeline",
    "Plan": "contract.plan",
    "PlanError": "errors",
    "PluginError": "errors",
    "Preprocessor": "contract.stages",
    "QuantPart": "contract.tensors",
    "QuantSpec": "contract.tensors",
    "QuantUnit": "contract.tensors",
    "Preset": "contract.presets",
    "Quantizer": "contract.stages",
    "Registry": "contract.registry",
    "Result": "contract.stages",
    "Rule": "contract.rules",
    "Runtime": "contract.plan",
    "Sink": "contract.plan",
    "SourceFile": "contract.tensors",
    "Stage": "contract.stages",
    "Summary": "contract.plan",
    "TensorSpec": "contract.tensors",
    "Unit": "contract.tensors",
    "UnitSpec": "contract.tensors",
    "Unsupported": "errors",
    "Writer": "contract.plan",
    "compare": "comparison.compare",
    "hookimpl": "contract.hooks",
    "open_folder": "output.folder",
    "verify": "verification.verify",
}

__all__ = [
    "AlreadyDone",
    "CheckpointError",
    "CheckpointFolder",
    "ConfigError",
    "Demand",
    "FileSpec",
    "FolderLoader",
    "FusedWeight",
    "KtforgeError",
    "Layout",
    "Loader",
    "ModelConfig",
    "NumberFormat",
    "OutputError",
    "PackedSpec",
    "PackedUnit",
    "Part",
    "Pipeline",
    "Plan",
    "PlanError",
    "PluginError",
    "Preprocessor",
    "Preset",
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
    "Stage",
    "Summary",
    "TensorSpec",
    "Unit",
    "UnitSpec",
    "Unsupported",
    "Writer",
    "__version__",
    "compare",
    "hookimpl",
    "open_folder",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ktforge")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
