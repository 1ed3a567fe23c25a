"""What each layer's experts add to the residual stream that the original's would not have added."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from ktforge.hf.compute import Routed
from ktforge.hf.engine import Engine
from ktforge.hf.experts import ExpertSource
from ktforge.hf.scores import Figure, mean_of

#: Tokens of a layer that are looked at. Each is computed once more for every checkpoint.
MOST = 4096


class Damages:
    """The error of a layer's output over the residual stream: ‖Δ experts' output‖² / ‖what leaves the layer‖².

    Both for what goes into the layer in the original, token by token, so that no layer answers for those before it.
    """

    def __init__(self, sources: Sequence[ExpertSource | Engine], layers: Collection[int]) -> None:
        self._sources = sources
        self._found: dict[int, list[list[torch.Tensor]]] = {layer: [[] for _ in sources] for layer in layers}
        #: Of the layer that is computed: its number, the tokens that are looked at, and their errors for each source.
        self._open: tuple[int, torch.Tensor, list[torch.Tensor]] | None = None

    def measure(
        self, routed: Routed, module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        left = MOST - sum(map(len, self._found[routed.layer][0]))
        if left <= 0:
            return
        these = torch.linspace(0, len(hidden) - 1, min(left, len(hidden))).long()
        given = hidden[these], index[these], weights[these]
        right = routed.computed(module, routed.variants[0], *given).float()
        errors = [
            (routed.computed(module, source, *given).float() - right).square().sum(dim=1) for source in self._sources
        ]
        self._open = routed.layer, these, errors

    def relate(self, stream: torch.Tensor) -> None:
        """Takes what leaves the layer, [n, hidden], the original's tokens first."""
        if self._open is None:
            return
        layer, these, errors = self._open
        whole = stream[these].float().square().sum(dim=1).clamp_min(1e-30)
        for found, error in zip(self._found[layer], errors, strict=True):
            found.append(error / whole)
        self._open = None

    def figures(self) -> dict[int, list[Figure]]:
        """Layer → a figure for each checkpoint."""
        return {
            layer: [mean_of(torch.cat(f).double()) for f in found] for layer, found in self._found.items() if found[0]
        }
