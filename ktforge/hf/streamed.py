"""A model whose layers come into memory one at a time: each is read before it computes, and let go of behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from ktforge.comparison.side import Side
from ktforge.errors import CheckpointError
from ktforge.hf.arrays import LazyTensor
from ktforge.hf.loading import class_of, experts_modules, lazy_weights, model_without_experts, without_experts

#: Bytes of activations for each token and checkpoint, in float32 numbers of the hidden size: the residual stream, what
#: attention makes of it, the routed experts' input and output.
ACTIVATIONS = 24


def at_once(memory_limit: int, context: int, models: int, hidden: int) -> int:
    """How many sequences of ``context`` tokens can go through the layers of so many ``models`` at once."""
    return max(1, memory_limit // (context * models * ACTIVATIONS * 4 * hidden))


class Streamed:
    """A model on the CPU, all weights of ``original`` but those of its experts, a layer's in memory while it computes.

    ``left`` is called with what comes out of a layer, [n, hidden], each time that one is done.
    Raises what :func:`~ktforge.hf.loading.model_without_experts` raises.
    """

    def __init__(self, original: Side, converted: Side, config: Any, dtype: torch.dtype, **kwargs: Any) -> None:
        self.left: Callable[[torch.Tensor], None] = lambda hidden: None
        weights = lazy_weights(original)
        cls = without_experts(class_of(config, original))
        with torch.device("meta"):
            whole = cls(config)
        self._of_block = _by_block(whole, weights)
        left = {name for names in self._of_block.values() for name in names}
        self._weights, self._folder = weights, original.folder
        self.model = model_without_experts(
            original, converted, config, dtype=dtype, left_out=left, layers=tuple(self._of_block), **kwargs
        )
        self._loading = LoadStateDictConfig(
            dtype=dtype, dtype_plan=self.model._get_dtype_plan(dtype),
            weight_mapping=list[Any](get_model_conversion_mapping(self.model, None, None)), device_map={"": "cpu"},
        )  # fmt: skip
        modules = dict(self.model.named_modules())
        for name in self._of_block:
            block = modules[name]
            block.register_forward_pre_hook(partial(self._load, name))
            block.register_forward_hook(self._drop)

    @property
    def blocks(self) -> int:
        """How many layers there are."""
        return len(self._of_block)

    def _load(self, name: str, block: nn.Module, _: Any) -> None:
        for module in block.modules():
            for parameter, empty in module.ktforge_left.items():  # type: ignore[union-attr, operator]
                module._parameters[parameter] = nn.Parameter(empty, requires_grad=False)
        convert_and_load_state_dict_in_model(
            self.model, {name: self._weights[name] for name in self._of_block[name]}, self._loading
        )
        if missing := [n for n, p in block.named_parameters() if p.is_meta]:
            raise CheckpointError(f"{self._folder} lacks what transformers needs: {name}.{missing[0]}")

    def _drop(self, block: nn.Module, _: Any, output: Any) -> None:
        for part in block.modules():
            part._parameters.update(dict.fromkeys(part.ktforge_left))  # type: ignore[arg-type]
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        self.left(hidden.reshape(-1, hidden.shape[-1]))


def _by_block(model: Any, weights: Mapping[str, LazyTensor]) -> dict[str, list[str]]:
    """Name of a layer's module, in order → the checkpoint's names of its weights, as transformers would load them."""
    lists = {name.rsplit(".", 1)[0] for name in map(_block_of, (n for n, _ in experts_modules(model)))}
    blocks: dict[str, list[str]] = {name: [] for name, _ in model.named_modules() if name.rpartition(".")[0] in lists}
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}
    mapping = get_model_conversion_mapping(model, None, None)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    for weight in weights:
        name, _ = rename_source_key(weight, renamings, converters, model.base_model_prefix, state)
        if name not in parameters and weight in parameters:
            name = weight
        block = next((b for b in (_block_of(name),) if b in blocks), None)
        if block is not None and name in parameters:
            blocks[block].append(weight)
    return blocks


def _block_of(name: str) -> str:
    """The part of a name up to its first number: ``model.layers.3`` of ``model.layers.3.mlp.experts``."""
    parts = name.split(".")
    for number, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: number + 1])
    return ""


logging.disable_progress_bar()
