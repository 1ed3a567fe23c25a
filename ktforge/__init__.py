"""ktforge turns Hugging Face checkpoints into the weight files that CPU inference engines read.

This module is the public API; whatever is not named here may change without notice.
"""

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
from ktforge.hookspecs import hookimpl
from ktforge.output import open_folder
from ktforge.pipeline import Pipeline, Runtime
from ktforge.plan import Plan
from ktforge.registry import Registry
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

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "ConfigError",
    "Demand",
    "FileSpec",
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
