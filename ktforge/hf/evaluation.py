"""What a conversion did to the predictions of a model: the original and what was made of it, in step, on a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ktforge.comparison.side import Side
from ktforge.contract.registry import Registry
from ktforge.errors import ConfigError
from ktforge.hf.compute import Routed
from ktforge.hf.damage import Damages
from ktforge.hf.engine import Engine, check_kernels
from ktforge.hf.experts import ExpertSource
from ktforge.hf.heads import blocks, hidden_states, predictions
from ktforge.hf.loading import attach, read_config
from ktforge.hf.result import Damage, Evaluation, Gain, Score
from ktforge.hf.scores import Tally
from ktforge.hf.sides import check_same_model, experts_of, open_side
from ktforge.hf.streamed import Streamed, at_once
from ktforge.hf.text import CONTEXT, read_texts, sample_text, sequences, tokenizer_of
from ktforge.native.cores import worker_count

#: What is told of the way: how many layers are computed, of how many.
Progress = Callable[[int, int], None]


def evaluate(
    original: Path | str,
    converted: Sequence[Path | str],
    *,
    texts: Sequence[Path | str] = (),
    tokens: int | None = 20_000,
    context: int = CONTEXT,
    layers: Collection[int] | None = None,
    keep: int = 0,
    activations: Literal["exact", "int8"] = "exact",
    kernels: Literal["kt-kernel"] | None = None,
    memory_limit: int = 8 << 30,
    workers: int | None = None,
    registry: Registry | None = None,
    follow_links: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Evaluation:
    """Perplexity of ``original`` and of each of ``converted`` on ``texts``, how far the predictions of these are from
    those of the original, and which layers hurt most.

    ``texts`` are files in UTF-8, of which the first ``tokens`` count (None: all), in sequences of ``context`` tokens;
    without any, a sample that comes with ktforge is read. All checkpoints compute in step, so that each weight is read
    once for as many tokens as ``memory_limit`` bytes of activations allow. ``layers``: the experts of these layers
    alone are taken from ``converted``, those of all others stay the original's. ``keep``: measures, in a second pass,
    what it gains to leave the experts of so many layers, those that hurt most, as they were. ``activations`` and
    ``kernels``: as in :func:`ktforge.hf.from_pretrained`, for the converted ones. ``progress`` is called with the
    number of layers that are done and of all, the head counted as one. ``kwargs`` go to transformers, such as
    ``trust_remote_code``.

    Raises CheckpointError for a folder that cannot be read, another model's output or an architecture that transformers
    does not compute by its ExpertsInterface, ConfigError for a text that is too short or an option that makes no sense.
    """
    if not converted:
        raise ConfigError("name at least one converted checkpoint")
    one = open_side(original, registry, follow_links=follow_links)
    others = [open_side(folder, registry, follow_links=follow_links) for folder in converted]
    for other in others:
        check_same_model(one, other)
    chosen = _layers(one, layers)
    if not 0 <= keep < len(chosen):
        raise ConfigError(
            f"of {len(chosen)} layers with experts, between 0 and {len(chosen) - 1} can be kept, not {keep}"
        )
    tokenizer = tokenizer_of(one, *others, **kwargs)
    text = read_texts(texts) if texts else sample_text()
    ids = sequences(tokenizer, text, tokens, context)
    check_kernels(kernels, activations)
    how = kernels or activations
    run = _Run(one, others, chosen, how, worker_count(workers), memory_limit, kwargs)
    steps = (2 if keep else 1) * run.steps(ids)
    done = _Counted(progress, steps)
    tallies, damages = run.over(ids, [dict.fromkeys(chosen, n) for n in range(len(others))], done)
    scores = tuple(_score(other, tally) for other, tally in zip(others, tallies, strict=True))
    found = tuple(Damage(layer, tuple(d)) for layer, d in sorted(damages.items()))
    gains: tuple[Gain, ...] = ()
    if keep:
        worst = [[d.layer for d in sorted(found, key=lambda d: -d.figures[n].value)[:keep]] for n in range(len(others))]
        kept = [{layer: n for layer in chosen if layer not in worst[n]} for n in range(len(others))]
        tallies, _ = run.over(ids, kept, done)
        gains = tuple(
            Gain(tuple(sorted(layers)), _score(other, tally))
            for layers, other, tally in zip(worst, others, tallies, strict=True)
        )
    return Evaluation(
        str(original), tuple(map(str, texts)), ids.numel(), how, tallies[0].original, scores, found, gains
    )


def _layers(side: Side, layers: Collection[int] | None) -> list[int]:
    there = sorted(experts_of(side))
    if layers is None:
        return there
    if strange := sorted(set(layers) - set(there)):
        raise ConfigError(f"layer {strange[0]} has no experts; those that have: {_ranges(there)}")
    if not layers:
        raise ConfigError("name at least one layer")
    return sorted(layers)


def _ranges(numbers: Sequence[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in found)


def _score(side: Side, tally: Tally) -> Score:
    return Score(str(side.folder), tally.perplexity, tally.divergence, tally.divergence_99, tally.agreement)


class _Counted:
    def __init__(self, progress: Progress | None, steps: int) -> None:
        self._progress, self._steps, self._done = progress, steps, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._steps)


class _Run:
    """Everything that stays the same from one pass to the next."""

    def __init__(
        self,
        one: Side,
        others: Sequence[Side],
        layers: Collection[int],
        activations: str,
        workers: int,
        memory_limit: int,
        kwargs: Mapping[str, Any],
    ) -> None:
        config = read_config(one, **kwargs)
        self._streamed = Streamed(one, others[0], config, torch.float32, **kwargs)
        shared: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "cache": 0, "workers": workers}
        self._original = ExpertSource(one, **shared)
        self._converted = [
            Engine(other, workers=workers)
            if activations == "kt-kernel"
            else ExpertSource(other, **shared, integers=activations == "int8")
            for other in others
        ]
        self._experts, self._layers, self._memory = experts_of(one), layers, memory_limit
        self._hidden = one.plan.model.hidden

    def _at_once(self, context: int) -> int:
        """How many sequences of ``context`` tokens go through the layers at once."""
        return at_once(self._memory, context, 1 + len(self._converted), self._hidden)

    def steps(self, ids: torch.Tensor) -> int:
        return -(-len(ids) // self._at_once(ids.shape[1])) * (self._streamed.blocks + 1)

    def over(
        self, ids: torch.Tensor, taken: Sequence[Mapping[int, int]], done: Callable[[], None]
    ) -> tuple[list[Tally], dict[int, list[Any]]]:
        """``taken``: for each variant, layer → number of the converted checkpoint whose experts it has there."""
        model, damages = self._streamed.model, Damages(self._converted, self._layers)
        routed = {}
        for layer, experts in self._experts.items():
            sources = [self._converted[v[layer]] if layer in v else self._original for v in taken]
            watcher = damages.measure if layer in self._layers else None
            routed[layer] = Routed(layer, experts, [self._original, *sources], layer_watcher=watcher)
        attach(model, routed)
        tallies = [Tally() for _ in taken]

        def left(stream: torch.Tensor) -> None:
            damages.relate(stream)
            done()

        self._streamed.left = left
        step = self._at_once(ids.shape[1])
        with torch.inference_mode():
            for start in range(0, len(ids), step):
                part = ids[start : start + step]
                hidden = hidden_states(model, part.repeat(1 + len(taken), 1))
                self._judge(model, part, hidden.unflatten(0, (1 + len(taken), len(part))), tallies)
                done()
        return tallies, damages.figures()

    @staticmethod
    def _judge(model: Any, ids: torch.Tensor, hidden: torch.Tensor, tallies: Sequence[Tally]) -> None:
        """``hidden`` [variants, sequences, tokens, hidden], the original's first."""
        states, targets = hidden[:, :, :-1].flatten(1, 2), ids[:, 1:].flatten()
        vocabulary = model.config.get_text_config().vocab_size
        for part in blocks(len(targets), vocabulary, 3):
            original = torch.log_softmax(predictions(model, states[0, part]), dim=-1)
            for tally, state in zip(tallies, states[1:], strict=True):
                tally.add(original, torch.log_softmax(predictions(model, state[part]), dim=-1), targets[part])
