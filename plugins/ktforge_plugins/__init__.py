"""ktforge's own plugins. Each module is one plugin and comes in through its entry point, as anybody's would.

For pipelines in Python, the stage classes are attributes of this package, imported when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktforge_plugins.layouts.compressed_tensors import CompressedTensors
    from ktforge_plugins.layouts.kt_amx import KtAmx
    from ktforge_plugins.loaders.auto import AutoLoader
    from ktforge_plugins.loaders.bin import BinLoader
    from ktforge_plugins.loaders.safetensors import SafetensorsLoader
    from ktforge_plugins.preprocess.awq import Awq
    from ktforge_plugins.preprocess.compressed_tensors import CompressedTensorsFormat
    from ktforge_plugins.preprocess.fp4 import Fp4
    from ktforge_plugins.preprocess.fp8 import Fp8
    from ktforge_plugins.preprocess.gptq import Gptq
    from ktforge_plugins.preprocess.moe_to_bf16 import MoeToBf16
    from ktforge_plugins.preprocess.split_experts import SplitExperts
    from ktforge_plugins.quantize.int4 import Int4
    from ktforge_plugins.quantize.int8 import Int8
    from ktforge_plugins.writers.kt_folder import KtFolderWriter
    from ktforge_plugins.writers.safetensors import SafetensorsWriter

_MODULES = {
    "AutoLoader": "loaders.auto",
    "Awq": "preprocess.awq",
    "BinLoader": "loaders.bin",
    "CompressedTensors": "layouts.compressed_tensors",
    "CompressedTensorsFormat": "preprocess.compressed_tensors",
    "Fp4": "preprocess.fp4",
    "Fp8": "preprocess.fp8",
    "Gptq": "preprocess.gptq",
    "Int4": "quantize.int4",
    "Int8": "quantize.int8",
    "KtAmx": "layouts.kt_amx",
    "KtFolderWriter": "writers.kt_folder",
    "MoeToBf16": "preprocess.moe_to_bf16",
    "SafetensorsLoader": "loaders.safetensors",
    "SafetensorsWriter": "writers.safetensors",
    "SplitExperts": "preprocess.split_experts",
}

__all__ = [
    "AutoLoader",
    "Awq",
    "BinLoader",
    "CompressedTensors",
    "CompressedTensorsFormat",
    "Fp4",
    "Fp8",
    "Gptq",
    "Int4",
    "Int8",
    "KtAmx",
    "KtFolderWriter",
    "MoeToBf16",
    "SafetensorsLoader",
    "SafetensorsWriter",
    "SplitExperts",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
