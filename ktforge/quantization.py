"""What config.json says about how a checkpoint's weights are quantised, wherever it says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktforge.modelconfig import NESTED

#: Names in use: the second is what compressed-tensors used to write.
KEYS = ("quantization_config", "compression_config")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config (or compression_config), at the top or in text_config; empty if there is none."""
    for level in (config, *(config.get(key) for key in NESTED)):
        if isinstance(level, Mapping):
            for key in KEYS:
                if isinstance(level.get(key), Mapping):
                    return level[key]
    return {}


def without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json for a checkpoint whose weights are all plain."""
    gone = (*KEYS, "expert_dtype")
    edited = {k: v for k, v in config.items() if k not in gone}
    for key in NESTED:
        if isinstance(edited.get(key), Mapping):
            edited[key] = {k: v for k, v in edited[key].items() if k not in gone}
    return edited
