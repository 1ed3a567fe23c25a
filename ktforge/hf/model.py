"""``from_pretrained``: an ordinary transformers model whose experts are those of a converted checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ktforge.comparison.side import Side
from ktforge.contract.registry import Registry
from ktforge.errors import ConfigError
from ktforge.hf.compute import Routed
from ktforge.hf.engine import Engine, check_kernels
from ktforge.hf.experts import ExpertSource
from ktforge.hf.loading import attach, compute_device, model_without_experts, read_config
from ktforge.hf.sides import experts_of, open_original, open_side
from ktforge.native.cores import worker_count
from ktforge.text import parse_size

#: How the products with weights are computed.
ACTIVATIONS = ("exact", "int8")


def from_pretrained(
    converted: Path | str,
    original: Path | str | None = None,
    *,
    activations: Literal["exact", "int8"] = "exact",
    kernels: Literal["kt-kernel"] | None = None,
    cache: int | str = "4GB",
    workers: int | None = None,
    registry: Registry | None = None,
    follow_links: bool = False,
    **kwargs: Any,
) -> Any:
    """An ordinary transformers model (``PreTrainedModel``) that computes with the experts of ``converted``.

    ``converted`` is any checkpoint folder that ktforge reads, packed or not. All other weights come from ``original``,
    by default the same folder if it has them, else the folder that its manifest names. Experts are read when tokens are
    routed to them; ``cache`` bounds the bytes of those that are kept, ``workers`` (default: one a core) read ahead.

    ``activations``: ``"exact"`` multiplies with the weights as they are read back; ``"int8"`` computes as the engine
    does, with activations rounded to int8 for each token, for weights that are stored as integer codes.
    ``kernels="kt-kernel"`` has KTransformers' own kernels compute a kt-amx output, where they are installed and the CPU
    has AVX-512 or AMX; the experts then stay in memory as they are packed. ``kwargs`` go
    to transformers' ``from_pretrained``, such as ``dtype`` or ``device_map``.

    Raises CheckpointError for a folder that cannot be read, an architecture whose experts transformers does not
    compute by its ExpertsInterface, or an ``original`` of another model; ConfigError for options that make no sense.
    """
    if activations not in ACTIVATIONS:
        raise ConfigError(f"activations are {' or '.join(map(repr, ACTIVATIONS))}, not {activations!r}")
    check_kernels(kernels, activations)
    side = open_side(converted, registry, follow_links=follow_links)
    rest = open_original(side, original, registry, follow_links=follow_links)
    limit = parse_size(cache) if isinstance(cache, str) else cache
    return model_of(
        side, rest, integers=activations == "int8", engine=kernels is not None, cache=limit, workers=workers, **kwargs
    )


def model_of(
    side: Side, rest: Side, *, integers: bool, cache: int, workers: int | None, engine: bool = False, **kwargs: Any
) -> Any:
    """The same of checkpoints that are open: the experts of ``side``, everything else of ``rest``."""
    remote = {name: kwargs[name] for name in ("trust_remote_code",) if name in kwargs}
    config = kwargs.pop("config", None) or read_config(rest, **remote)
    kwargs.setdefault("dtype", "auto")
    model = model_without_experts(rest, side, config, **kwargs)
    workers = worker_count(workers)
    source = Engine(side, workers=workers) if engine else ExpertSource(
        side, dtype=model.dtype, device=compute_device(kwargs.get("device_map")), workers=workers, cache=cache,
        integers=integers,
    )  # fmt: skip
    attach(model, {layer: Routed(layer, experts, [source]) for layer, experts in experts_of(side).items()})
    _take_generation_config(model, rest.folder)
    return model


def _take_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = type(model.generation_config).from_pretrained(folder)
