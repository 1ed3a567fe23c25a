"""What flows into the experts on a text: the statistics that quantizers ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from ktforge.calibration import LayerStatistics, write_calibration
from ktforge.contract.registry import Registry
from ktforge.errors import ConfigError
from ktforge.hf.compute import Routed
from ktforge.hf.experts import ExpertSource
from ktforge.hf.loading import attach, read_config
from ktforge.hf.sides import experts_of, open_side
from ktforge.hf.streamed import Streamed, at_once
from ktforge.hf.text import CONTEXT, read_texts, sequences, tokenizer_of
from ktforge.native.cores import worker_count

#: An expert that fewer tokens than this were routed to was seldom asked.
SELDOM = 32


@dataclass(frozen=True)
class Calibrated:
    """``routed``: layer → how many tokens each of its experts got [experts]."""

    path: Path
    tokens: int
    routed: dict[int, np.ndarray]

    @property
    def never(self) -> int:
        """Experts that no token was routed to."""
        return sum(int((counts == 0).sum()) for counts in self.routed.values())

    @property
    def seldom(self) -> int:
        """Experts that fewer than :data:`SELDOM` tokens were routed to, but some."""
        return sum(int(((counts > 0) & (counts < SELDOM)).sum()) for counts in self.routed.values())


def calibrate(
    original: Path | str,
    texts: Sequence[Path | str],
    output: Path | str,
    *,
    tokens: int | None = 100_000,
    context: int = CONTEXT,
    samples: int = 0,
    memory_limit: int = 8 << 30,
    workers: int | None = None,
    registry: Registry | None = None,
    follow_links: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Calibrated:
    """Writes to ``output`` what flows into each expert of ``original`` on ``texts``; see :mod:`ktforge.calibration`.

    Of the texts, files in UTF-8, the first ``tokens`` count (None: all), in sequences of ``context`` tokens. For each
    layer and expert: how many tokens were routed to it, and the mean square of each channel of what goes into gate and
    up, and into down. ``samples``: keeps the inputs of a layer themselves for so many tokens, in BF16, of which second
    moments are made. ``progress`` is called with the number of layers that are done and of all. ``kwargs`` go to
    transformers.

    Raises what :func:`ktforge.hf.evaluate` raises, and OutputError if the file cannot be written.
    """
    if not texts:
        raise ConfigError("name at least one text to calibrate with")
    side = open_side(original, registry, follow_links=follow_links)
    ids = sequences(tokenizer_of(side, **kwargs), read_texts(texts), tokens, context)
    if not 0 <= samples <= ids.numel():
        raise ConfigError(f"of {ids.numel():,} tokens, between 0 and as many can be kept, not {samples:,}")
    streamed = Streamed(side, side, read_config(side, **kwargs), torch.float32, **kwargs)
    source = ExpertSource(side, dtype=torch.float32, device=torch.device("cpu"), cache=0, workers=worker_count(workers))
    watch = _Watch(ids.numel(), samples)
    routed = {
        layer: Routed(layer, experts, [source], watcher=watch.expert, layer_watcher=watch.layer)
        for layer, experts in experts_of(side).items()
    }
    attach(streamed.model, routed)
    step = at_once(memory_limit, ids.shape[1], 1, side.plan.model.hidden)
    steps, done = -(-len(ids) // step) * streamed.blocks, 0

    def left(_: torch.Tensor) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    streamed.left = left
    with torch.inference_mode():
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            streamed.model.base_model(input_ids=part, use_cache=False)
            watch.tokens_before += part.numel()
    found = {layer: watch.statistics(layer) for layer in sorted(watch.sums)}
    config = streamed.model.config.get_text_config()
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"
    metadata = {"activation": str(activation), "tokens": str(ids.numel()), "model": str(config.model_type)}
    write_calibration(output, found, metadata)
    return Calibrated(Path(output), ids.numel(), {layer: s.tokens for layer, s in found.items()})


@dataclass
class _Sums:
    """Of one layer, for each expert."""

    tokens: np.ndarray
    gate_up: torch.Tensor
    down: torch.Tensor


class _Watch:
    def __init__(self, tokens: int, samples: int) -> None:
        self.sums: dict[int, _Sums] = {}
        self._sampled = torch.linspace(0, tokens - 1, samples).long()
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        #: Tokens of the passes before this one.
        self.tokens_before = 0

    def layer(
        self, routed: Routed, module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        if routed.layer not in self.sums:
            size = routed.variants[0].side.places[routed.layer, 0, "down.weight"].tensor.shape[1]
            empty = torch.zeros(routed.experts, hidden.shape[1], dtype=torch.float64)
            down = torch.zeros(routed.experts, size, dtype=torch.float64)
            self.sums[routed.layer] = _Sums(np.zeros(routed.experts, np.int64), empty, down)
        here = self._sampled - self.tokens_before
        here = here[(here >= 0) & (here < len(hidden))]
        if len(here):
            kept = hidden[here].to(torch.bfloat16), index[here].to(torch.int32)
            self._kept.setdefault(routed.layer, []).append(kept)

    def expert(self, layer: int, expert: int, _: torch.Tensor, x: torch.Tensor, middle: torch.Tensor) -> None:
        sums = self.sums[layer]
        sums.tokens[expert] += len(x)
        sums.gate_up[expert] += x.double().square().sum(dim=0)
        sums.down[expert] += middle.double().square().sum(dim=0)

    def statistics(self, layer: int) -> LayerStatistics:
        sums = self.sums.pop(layer)
        counts = torch.from_numpy(np.maximum(sums.tokens, 1))[:, None]
        gate_up, down = ((s / counts).float().numpy() for s in (sums.gate_up, sums.down))
        kept = self._kept.pop(layer, [])
        if not kept:
            return LayerStatistics(sums.tokens, gate_up, down)
        inputs = torch.cat([x for x, _ in kept]).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return LayerStatistics(sums.tokens, gate_up, down, inputs, torch.cat([i for _, i in kept]).numpy())
