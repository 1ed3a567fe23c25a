"""What model families call their experts: the files of data/architectures, as patterns for tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

#: A layer or an expert as every writer spells it: what reads as the same number must be the same name.
NUMBER = "(?:0|[1-9][0-9]{0,5})"
#: Layer, expert (None for fused ones) and role of an expert's tensor.
Place = tuple[int, int | None, str]
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

    def places(self, names: Iterable[str]) -> Iterator[Place | None]:
        """The :data:`Place` of each of ``names``, which come without ``language_model.``; None for any other tensor."""
        alone = self.pattern.fullmatch if self.pattern else None
        fused = self.fused.pattern.fullmatch if self.fused else None
        # A layer's experts mostly come one behind the other. What stands before the number of one, the number, and what
        # is behind it were matched before, if in other names; to match all of them would take most of the time.
        stem, layer, numbers, roles = "\0", 0, dict[str, int](), dict[str, str]()
        for name in names:
            if name.startswith(stem):
                number, _, rest = name[len(stem) :].partition(".")
                if number in numbers and rest in roles:
                    yield layer, numbers[number], roles[rest]
                    continue
            if alone is not None and (match := alone(name)) is not None:
                place = int(match[1]), int(match[2]), f"{self._ours[match[3]]}.{match[4]}"
                number, dot, rest = name[match.start(2) :].partition(".")
                if dot and number == match[2]:
                    stem, layer = name[: match.start(2)], place[0]
                    _, numbers[number], roles[rest] = place
                yield place
            elif fused is not None and (match := fused(name)) is not None:
                projection, parameter = match[2], match[3]
                role = f"{self._ours_fused[projection]}.{_FUSED_PARAMETERS.get(parameter, parameter)}"
                yield int(match[1]), None, role
            else:
                yield None

    @cached_property
    def _ours(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self.projections.items()}

    @cached_property
    def _ours_fused(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self.fused.projections.items()} if self.fused else {}

    def knows(self, names: Iterable[str]) -> bool:
        """Whether any of ``names``, without ``language_model.``, is that of a routed expert's tensor."""
        return any(place is not None for place in self.places(names))


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


def architectures() -> tuple[Architecture, ...]:
    """All known naming schemes, in order of file name."""
    return tuple(map(_read, _files()))


def architectures_of(model_type: str) -> list[Architecture]:
    """Those that list a ``model_type``. Other files are not read."""
    likely = (_read(name) for name, text in _files().items() if model_type in text)
    return [architecture for architecture in likely if model_type in architecture.model_types]


def likely_architectures(model_type: str) -> Iterator[Architecture]:
    """All, those of a ``model_type`` first. A file is read when it is asked for."""
    first = architectures_of(model_type)
    yield from first
    yield from (architecture for architecture in map(_read, _files()) if architecture not in first)


def chosen_architecture(model_type: str, names: Sequence[str]) -> Architecture | None:
    """The one whose patterns match any of ``names``, which come without a wrapper; those of the ``model_type`` first,
    and where none does, one made of the names; None if they name no experts that it could be made of."""
    for architecture in likely_architectures(model_type):
        if architecture.knows(names):
            return architecture
    return next((made for name in names if "expert" in name and (made := _made_of(name)) is not None), None)


#: An expert's tensor, or a fused one, of a family that no file knows.
_ALONE = re.compile(
    rf"(?P<before>[\w.]*?\blayers\.){NUMBER}(?P<within>\.(?:\w+\.)*?(?:local_|routed_)?experts\.){NUMBER}\."
    r"(?P<projection>\w+)\.\w+"
)
_FUSED = re.compile(
    rf"(?P<before>[\w.]*?\blayers\.){NUMBER}(?P<within>\.(?:\w+\.)*?(?:local_|routed_)?experts\.)"
    r"(?P<projection>(?:gate_up|gate|up|down)_proj)(?:[._]\w+)?"
)
#: What projections are called; where all three have a name of one letter and a number, the third goes up.
_WORDS = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
    {"gate": "gate", "up": "up", "down": "down"},
)


def _made_of(name: str) -> Architecture | None:
    """An architecture for names such as ``name``, as far as its words leave no doubt."""
    if match := _ALONE.fullmatch(name):
        words = next((w for w in _WORDS if match["projection"] in w.values()), None)
        template = f"{match['before']}{{layer}}{match['within']}{{expert}}.{{projection}}.{{parameter}}"
        return Architecture(model_types=(), experts=_with_model(template), projections=words) if words else None
    if match := _FUSED.fullmatch(name):
        together = {"gate_up": "gate_up_proj", **_WORDS[0]}
        template = f"{match['before']}{{layer}}{match['within']}{{projection}}"
        return Architecture(model_types=(), fused=Fused(experts=_with_model(template), projections=together))
    return None


def _with_model(template: str) -> str:
    return f"model.{template}" if template.startswith("layers.") else template


@cache
def _files() -> dict[str, str]:
    folder = files("ktforge") / "data" / "architectures"
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return {p.name: p.read_text("utf-8") for p in paths}


@cache
def _read(name: str) -> Architecture:
    return Architecture.model_validate(YAML(typ="safe").load(_files()[name]))


def gate_up_of(model_type: str, name: str) -> Literal["halves", "interleaved"] | None:
    """How the family of ``model_type`` fuses gate and up in a tensor of that canonical ``name``: as the file says that
    has the name, or as all files of the family do; None for a ``model_type`` of no architecture file."""
    fused = [a.fused for a in architectures_of(model_type) if a.fused]
    named = [f for f in fused if f.pattern.fullmatch(name)]
    said = {f.gate_up for f in named or fused}
    return said.pop() if len(said) == 1 else None
