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


def all_canonical(names: list[str]) -> list[str]:
    """:func:`canonical` of each; most checkpoints have no wrapper, and 100,000 names."""
    text = "\n".join(names)
    return list(map(canonical, names)) if any(wrapper in text for wrapper in WRAPPERS) else names
