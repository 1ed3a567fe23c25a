"""A transformers model without its experts' weights, and everything else of it from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ktforge.comparison.side import Side
from ktforge.errors import CheckpointError
from ktforge.hf import compute
from ktforge.hf.arrays import LazyTensor
from ktforge.hf.sides import ROLES, experts_of


def model_without_experts(
    original: Side, converted: Side, config: PreTrainedConfig, *, layers: Collection[str] | None = None,
    left_out: Collection[str] = (), **kwargs: Any,
) -> Any:  # fmt: skip
    """The model that ``config`` describes, with all weights of ``original`` but those of its experts.

    Modules that ``layers`` names stay without parameters, and weights that ``left_out`` names are not read.
    ``kwargs`` go to transformers' ``from_pretrained``. Raises CheckpointError for an architecture whose experts
    transformers does not compute by its ExpertsInterface, or that are not gate, up and down alone, and if weights are
    missing.
    """
    weights = {name: weight for name, weight in lazy_weights(original).items() if name not in left_out}
    cls = without_experts(class_of(config, original), layers or ())
    model, info = cls.from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True, experts_implementation=compute.NAME,
        **kwargs,
    )  # fmt: skip
    check_experts(model, original, converted)
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{original.folder} lacks what transformers needs: {', '.join(missing[:3])}{more}")
    return model


def read_config(side: Side, **kwargs: Any) -> PreTrainedConfig:
    """config.json as transformers reads it, of the weights as they will be: in BF16, not quantised."""
    try:
        config = AutoConfig.from_pretrained(side.folder, **kwargs)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{side.folder / 'config.json'}: transformers cannot read it: {error}") from error
    for part in (config, *(getattr(config, name) for name in config.sub_configs if hasattr(config, name))):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def class_of(config: PreTrainedConfig, side: Side) -> Any:
    """The class of model: what config.json names, else what transformers takes for the type."""
    for name in getattr(config, "architectures", None) or ():
        if (cls := getattr(transformers, name, None)) is not None:
            return cls
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise CheckpointError(
        f"{side.folder / 'config.json'}: transformers {transformers.__version__} has no model of type "
        f"{config.model_type!r} that continues a text"
    )


def without_experts(cls: Any, layers: Collection[str] = ()) -> Any:
    """A class like ``cls`` whose objects let go of their experts' parameters once they are made, before anything is
    allocated for them, and of all parameters of the modules that ``layers`` names."""

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        modules = dict(self.named_modules())
        tied = {*self.all_tied_weights_keys, *self.all_tied_weights_keys.values()}
        for place, module in list(experts_modules(self)):
            module.ktforge_shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
            for name in module.ktforge_shapes:
                if f"{place}.{name}" in tied:
                    raise CheckpointError(
                        f"{cls.__name__} ties the experts of {place} to others, which cannot be replaced"
                    )
                delattr(module, name)
            # Nothing is left of it to make up, for itself or for what it is part of.
            module._is_hf_initialized = modules[place.rpartition(".")[0]]._is_hf_initialized = True
        for layer in layers:
            for module in self.get_submodule(layer).modules():
                empty(module)

    # transformers looks into the source of a class's module for what it can do.
    made = type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__, "__doc__": cls.__doc__})
    return made


def empty(module: Any) -> None:
    """Takes a module's own parameters away, which ``ktforge_left`` remembers without their data."""
    module.ktforge_left = {n: p.detach().to("meta") for n, p in module.named_parameters(recurse=False)}
    module._parameters.update(dict.fromkeys(module.ktforge_left))
    if module.ktforge_left:
        module._is_hf_initialized = True


def experts_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules whose computation goes through transformers' ExpertsInterface, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            yield name, module


def layer_of(name: str) -> int:
    """The number of a module's layer, the last one in its name."""
    return int(re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)[-1])


def check_experts(model: Any, original: Side, converted: Side) -> None:
    """Raises CheckpointError unless the modules of experts are those of the checkpoint, one for each layer."""
    counts = experts_of(converted)
    found: dict[int, str] = {}
    where = f"{original.folder}: {type(model).__name__}"
    for name, module in experts_modules(model):
        layer = layer_of(name)
        if module.has_bias or any("bias" in parameter for parameter in module.ktforge_shapes):
            raise CheckpointError(f"{where} adds biases in its experts, which no layout of ktforge has a place for")
        if not module.has_gate or not module.is_concatenated:
            raise CheckpointError(f"{where} has experts that are not gate, up and down alone: they cannot be computed")
        if layer in found:
            raise CheckpointError(f"{where} has two groups of experts in layer {layer}: {found[layer]} and {name}")
        if layer not in counts:
            raise CheckpointError(
                f"{converted.folder} has no experts of layer {layer}, which {type(model).__name__} has"
            )
        found[layer] = name
        gate = converted.places[layer, 0, ROLES[0]].tensor.shape
        shape = module.ktforge_shapes.get("gate_up_proj", (0, 0, 0))
        mine = (shape[0], *sorted(shape[1:])), (counts[layer], *sorted((2 * gate[0], gate[1])))
        if mine[0] != mine[1]:
            raise CheckpointError(
                f"{where} has {shape[0]} experts of {list(shape[1:])} in {name}, and {converted.folder} "
                f"{counts[layer]} of {[2 * gate[0], gate[1]]}"
            )
    beyond = {
        layer for layer in counts if layer >= _layers(model)
    }  # multi-token prediction, which transformers has not
    if left := sorted(counts.keys() - found.keys() - beyond):
        raise CheckpointError(
            f"{where} computes the experts of layer {left[0]} by itself and not through transformers' "
            "ExpertsInterface, so that no others can take their place"
        )


def _layers(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "num_hidden_layers", None) or 1 << 30)


def lazy_weights(side: Side) -> dict[str, LazyTensor]:
    """Name → weight of everything that is not an expert's, which is read when it is asked for."""

    def read(key: str) -> np.ndarray:
        weight = np.array(side.weight(key)[0])  # a copy of its own, which may outlive the mapped file
        side.release(key)
        return weight

    return {
        place.tensor.name: LazyTensor(place.tensor.dtype, place.tensor.shape, partial(read, key))
        for key, place in side.places.items()
        if isinstance(key, str)
    }


def attach(model: Any, routed: Mapping[int, compute.Routed]) -> None:
    """Tells the modules of experts what they compute with, by layer."""
    for name, module in experts_modules(model):
        module.ktforge = routed[layer_of(name)]


def compute_device(device_map: Any) -> torch.device:
    """Where the experts are computed: the one device that ``device_map`` names, else the CPU."""
    if isinstance(device_map, str | int | torch.device) and device_map != "auto":
        return torch.device(device_map)
    if device_map == "auto" and torch.cuda.is_available():
        return torch.device("cuda:0")
    return torch.device("cpu")
