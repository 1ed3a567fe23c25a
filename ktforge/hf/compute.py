"""The computation of routed experts that transformers calls, registered as ``experts_implementation="ktforge"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktforge.hf.engine import Engine
from ktforge.hf.experts import Expert, ExpertSource

NAME = "ktforge"

#: What looks on: layer, expert, the tokens' numbers, what goes into gate and up [n, hidden] and into down [n, size].
Watcher = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor], None]
#: The same for a layer: what computes, its module, what goes in [n, hidden], the experts [n, top_k] and their weights.
LayerWatcher = Callable[["Routed", nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass
class Routed:
    """What one module of experts computes with.

    The batch holds the same sequences once for each of ``variants``, one behind the other; a variant is where its
    experts come from. So several checkpoints run in step, and what is not an expert's is read once for all.
    """

    layer: int
    experts: int
    variants: Sequence[ExpertSource | Engine]
    watcher: Watcher | None = None
    layer_watcher: LayerWatcher | None = None

    def __call__(
        self, module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(hidden)
        each = len(hidden) // len(self.variants)
        for number, source in enumerate(self.variants):
            these = slice(number * each, (number + 1) * each)
            if self.layer_watcher is not None and number == 0:
                self.layer_watcher(self, module, hidden[these], index[these], weights[these])
            watcher = self.watcher if number == 0 else None
            out[these] = self.computed(module, source, hidden[these], index[these], weights[these], watcher)
        return out

    def computed(
        self,
        module: nn.Module,
        source: ExpertSource | Engine,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        watcher: Watcher | None = None,
    ) -> torch.Tensor:
        """What the experts of ``source`` make of tokens [n, hidden], each routed to experts ``index`` [n, top_k]."""
        if isinstance(source, Engine):
            return source.computed(self.layer, hidden, index, weights)
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        hit = [e for e in torch.unique(index).tolist() if e < self.experts]  # one more stands for a token of no expert
        with closing(source.these(self.layer, hit)) as experts:  # type: ignore[type-var]
            for number in hit:
                expert: Expert = next(experts)
                tokens, places = torch.where(index == number)
                x = hidden[tokens]
                middle = module._apply_gate(expert.gate_up(x))  # type: ignore[operator]
                if watcher is not None:
                    watcher(self.layer, number, tokens, x, middle)
                made = expert.down(middle)
                if module.has_post_expert_norm:
                    made = module.post_expert_norm(made)  # type: ignore[operator]
                out.index_add_(0, tokens, (made * weights[tokens, places, None]).float())
        return out.to(hidden.dtype)


def _forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    routed: Any = getattr(module, "ktforge", None)
    if routed is None:
        raise RuntimeError(
            f'experts_implementation="{NAME}" is what ktforge.hf.from_pretrained sets, which says where the experts are'
        )
    return routed(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
