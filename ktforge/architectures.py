"""What model families call their experts: the files of data/architectures, as patterns for tensor names."""

from __future__ import annotations

import re
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

#: A layer or an expert as every writer spells it: what reads as the same number must be the same name.
NUMBER = "(?:0|[1-9][0-9]{0,5})"
#: What fused tensors end with, where it is not the role's parameter itself.
_FUSED_PARAMETERS = {None: "weight", "scale": "weight_scale", "scale_inv": "weight_scale_inv"}


class Fused(BaseModel):
    """All experts of a layer in one tensor per projection, the first axis counting them.

    ``gate_up`` says how gate and up share a tensor: as ``halves``, or ``interleaved``, gate first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    experts: str
    projections: dict[str, str]
    gate_up: Literal["halves", "interleaved"] = "halves"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Groups layer, projection and parameter; a name that ends with the projection has no parameter."""
        return _compile(self.experts + "{parameter}", self.projections, r"(?:[._](?P<parameter>\w+))?")


class Architecture(BaseModel):
    """One file of data/architectures: names of an expert's own tensors, of fused ones, or of both."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model_types: tuple[str, ...]
    experts: str | None = None
    projections: dict[str, str] = {}
    fused: Fused | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """Groups layer, expert, projection and parameter, in this order; None where experts are always fused."""
        return _compile(self.experts, self.projections, r"(?P<parameter>\w+)") if self.experts else None

    @property
    def example(self) -> str:
        """A name to show to somebody whose names do not match."""
        assert self.experts or self.fused
        return self.experts or (self.fused.experts if self.fused else "")

    def place(self, name: str) -> tuple[int, int | None, str] | None:
        """Layer, expert and role of an expert's tensor, the expert None for a fused one; None for any other tensor.

        ``name`` comes without ``language_model.``
        """
        match = self.pattern.fullmatch(name) if self.pattern else None
        if match is not None:
            layer, expert, projection, parameter = match.groups()
            return int(layer), int(expert), f"{self._ours[projection]}.{parameter}"
        match = self.fused.pattern.fullmatch(name) if self.fused else None
        if match is not None:
            layer, projection, parameter = match.groups()
            return int(layer), None, f"{self._ours_fused[projection]}.{_FUSED_PARAMETERS.get(parameter, parameter)}"
        return None

    @cached_property
    def _ours(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self.projections.items()}

    @cached_property
    def _ours_fused(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self.fused.projections.items()} if self.fused else {}

    def knows(self, name: str) -> bool:
        """Whether ``name``, without ``language_model.``, is that of a routed expert's tensor."""
        return self.place(name) is not None


def _compile(template: str, projections: dict[str, str], parameter: str) -> re.Pattern[str]:
    names = "|".join(re.escape(n) for n in projections.values())
    regex = re.escape(template)
    for key, group in {
        "layer": f"(?P<layer>{NUMBER})",
        "expert": f"(?P<expert>{NUMBER})",
        "projection": f"(?P<projection>{names})",
        "parameter": parameter,
    }.items():
        regex = regex.replace(re.escape("{" + key + "}"), group)
    # Some exports leave the leading `model.` out.
    return re.compile(re.sub(r"^model\\\.", r"(?:model\\.)?", regex))


@cache
def architectures() -> tuple[Architecture, ...]:
    """All known naming schemes, in order of file name."""
    folder = files("ktforge") / "data" / "architectures"
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return tuple(Architecture.model_validate(YAML(typ="safe").load(p.read_text("utf-8"))) for p in paths)


def gate_up_of(model_type: str) -> Literal["halves", "interleaved"] | None:
    """How the family of ``model_type`` fuses gate and up; None for a ``model_type`` of no architecture file."""
    for architecture in architectures():
        if model_type in architecture.model_types and architecture.fused:
            return architecture.fused.gate_up
    return None
