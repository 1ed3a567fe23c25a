"""The kit for tests of plugins: a checkpoint and an output in memory, and checks that a stage keeps its contract.

A check raises AssertionError with the sentence that a user would see, or with what the contract says.
"""

from ktforge.testing.layouts import check_layout
from ktforge.testing.loaders import check_loader
from ktforge.testing.memory import MemoryLoader, MemoryWriter, tiny_model
from ktforge.testing.preprocessors import check_preprocessor
from ktforge.testing.quantizers import check_quantizer, dequantised
from ktforge.testing.units import expert, fused_experts, weight_unit
from ktforge.testing.writers import check_writer

__all__ = [
    "MemoryLoader",
    "MemoryWriter",
    "check_layout",
    "check_loader",
    "check_preprocessor",
    "check_quantizer",
    "check_writer",
    "dequantised",
    "expert",
    "fused_experts",
    "tiny_model",
    "weight_unit",
]
