"""Tensor names as all writers have them, whatever wraps the language model."""

from __future__ import annotations

import re

from ktforge.model.architectures import NUMBER

#: What multimodal models put before the language model's tensors: most of them; Qwen's Omni models; Inkling.
WRAPPERS = ("language_model.", "thinker.", "llm.")
LAYER = re.compile(rf"^(?:model\.)?layers\.({NUMBER})\.")


def canonical(name: str) -> str:
    """The name without a multimodal wrapper's ``language_model.``, which stands before the layers."""
    before, layers, behind = name.partition("layers.")
    for wrapper in WRAPPERS:
        if wrapper in before:
            before = before.replace(wrapper, "", 1)
    return before + layers + behind


#: Where multi-token-prediction layers count from 0 again: Qwen's, MiMo's.
_MTP_LAYERS = re.compile(r"^(?:model\.)?(?:mtp\.layers|mtp_layers)\.")


def of_mtp(name: str) -> str | None:
    """The canonical name that a multi-token-prediction layer's tensor would have in a layer of the model's own; None
    for any other tensor."""
    return f"model.layers.{name[match.end() :]}" if "mtp" in name and (match := _MTP_LAYERS.match(name)) else None


def layer_of(name: str, own: int) -> int | None:
    """The layer of a canonical ``name``; multi-token-prediction layers come behind the model's ``own`` ones."""
    inside = of_mtp(name)
    match = LAYER.match(inside or name)
    return int(match[1]) + (own if inside else 0) if match else None


def all_canonical(names: list[str]) -> list[str]:
    """:func:`canonical` of each; most checkpoints have no wrapper, and 100,000 names."""
    text = "\n".join(names)
    return list(map(canonical, names)) if any(wrapper in text for wrapper in WRAPPERS) else names
