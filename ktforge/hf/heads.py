"""A forward pass in two halves: all layers for all tokens, then predictions for some tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from ktforge.errors import CheckpointError

#: Most bytes of predictions at once.
BLOCK = 256 << 20


def hidden_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the last layer gives, behind its norm: [sequences, tokens, hidden]. ``tokens``: [sequences, tokens]."""
    base = _base(model)
    return base(input_ids=tokens, use_cache=False).last_hidden_state


def predictions(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits [n, vocabulary] that ``model`` makes of [n, hidden], with whatever scaling it has."""
    base = _base(model)

    def given(*args: Any, **kwargs: Any) -> Any:
        return MoeModelOutputWithPast(last_hidden_state=hidden[None])

    own = base.forward
    base.forward = given
    try:
        # Tokens that nobody looks at, as many as there are states: some models look at their shape.
        tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return model(input_ids=tokens, use_cache=False).logits[0].float()
    finally:
        base.forward = own


def blocks(tokens: int, vocabulary: int, models: int) -> Iterator[slice]:
    """Slices of so many tokens that the predictions of so many models for them take :data:`BLOCK` bytes at most."""
    step = max(1, BLOCK // (4 * vocabulary * models))
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def _base(model: Any) -> Any:
    base = model.base_model
    if base is model:
        raise CheckpointError(f"{type(model).__name__} has no body that could be computed without its head")
    return base
