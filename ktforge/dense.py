"""Models without experts: stages that are about experts alone have nothing to do there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktforge.errors import CheckpointError
from ktforge.modelconfig import ModelConfig

if TYPE_CHECKING:
    from ktforge.pipeline import Pipeline


def check_dense(pipeline: Pipeline, model: ModelConfig) -> None:
    """Raises CheckpointError if ``model`` is dense and the pipeline is about experts.

    It is if its layout holds nothing else. Without a layout, its preprocessors are all that it does; with one that
    holds dense models, they are what its input goes through, and may find no expert there.
    """
    if model.experts:
        return
    asked = [pipeline.layout] if pipeline.layout else pipeline.preprocess
    stage = next((s for s in asked if s.experts_only), None)
    if stage is None:
        return
    kind = f"model_type {model.model_type}" if model.model_type else "no model_type"
    mend = (
        f"the layout {stage.name} holds nothing else; the layout compressed-tensors does"
        if pipeline.layout
        else f"{stage.name} is for nothing else; preprocessors of one number format, such as fp8, take any model"
    )
    raise CheckpointError(
        f"this is a dense model ({kind}; config.json names no experts): there are no MoE experts to convert, and {mend}"
    )
