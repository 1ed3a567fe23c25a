"""LoRA adapters that lie beside the weights they are for, under the names that PEFT gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ktforge.contract.tensors import TensorSpec
from ktforge.text import counted

#: https://github.com/huggingface/peft, src/peft/tuners/lora/layer.py: the parameters of an adapter, and what the weight
#: is called that it is for.
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|base_layer)(?:\.|$)")
_ROUTED = re.compile(r"(?<!shared_)experts?[._]")


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to a LoRA adapter."""
    return "lora_" in name and _ADAPTER.search(name) is not None


def unmerged(specs: Sequence[TensorSpec]) -> str | None:
    """What to say of a checkpoint whose experts have adapters beside their weights; None if none has."""
    found = [s for s in specs if ("lora_" in s.name or "base_layer" in s.name) and _ADAPTER.search(s.name)]
    experts = [s for s in found if _ROUTED.search(s.name)]
    if not experts:
        return None
    first = experts[0]
    return (
        f"{first.file or 'the checkpoint'}: {first.name} is part of a LoRA adapter for an expert "
        f"({counted(len(experts), 'such tensor')}), which would be lost: merge the adapter first, with PEFT's "
        "merge_and_unload() and save_pretrained()"
    )
