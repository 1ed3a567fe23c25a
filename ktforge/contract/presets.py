"""Conversions that have a name, which plugins offer to the commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

#: What ``ktforge convert`` can be told beside a preset, by the names of its options.
Option = Literal["group_size", "threadpool_count", "no_merge_safetensor", "scales", "calibration"]
#: What writes the output of commands, if nothing else is said.
SAFETENSORS: Mapping[str, Any] = MappingProxyType({"use": "safetensors"})
_SETS = re.compile(r"(?:quantize|layout|writer)\.\w+(?:=.+)?")


@dataclass(frozen=True)
class Preset:
    """What ``ktforge convert --quant-method NAME`` makes; ``ktforge inspect`` says whether it can be made of a
    checkpoint, and ``ktforge init`` writes a pipeline file for it.

    ``quantize``, ``layout`` and ``writer`` are the stages as a pipeline file has them: ``{"use": "int4", "group_size":
    32}``; the writer gets its path. ``help`` says in a few words what it is. ``with_layout``: it has to be asked for
    with ``--layout`` too, since another preset of its name goes without. ``options`` of ``convert`` go with it, and
    every other is refused; they map to what they set: ``quantize.group_size`` is the value that was given, and
    ``writer.use=kt-folder``, for a flag, this one.

    ``init`` tries the layout with each of ``tries``, options the usual of which come first, and writes ``notes`` behind
    the lines of ``quantize`` and ``layout``. What has a lower ``order`` is offered first.
    """

    name: str
    quantize: Mapping[str, Any]
    layout: Mapping[str, Any]
    help: str
    with_layout: bool = False
    writer: Mapping[str, Any] = field(default_factory=lambda: SAFETENSORS)
    options: Mapping[Option, str] = field(default_factory=dict)
    tries: tuple[Mapping[str, Any], ...] = ({},)
    notes: Mapping[Literal["quantize", "layout"], str] = field(default_factory=dict)
    order: int = 100

    def wrong(self) -> str | None:
        """What a plugin's author has to correct, if anything."""
        if not all(isinstance(stage.get("use"), str) for stage in (self.quantize, self.layout, self.writer)):
            return "without `use` of a stage"
        wrong = [o for o, sets in self.options.items() if o not in get_args(Option) or not _SETS.fullmatch(sets)]
        if wrong:
            known = ", ".join(get_args(Option))
            return f"with options[{wrong[0]!r}]: they map {known} to quantize.KEY, layout.KEY or writer.KEY[=VALUE]"
        return None

    @property
    def command(self) -> str:
        """The words of the command line."""
        layout = f" --layout {self.layout['use']}" if self.with_layout else ""
        return f"convert --quant-method {self.name}{layout}"

    def stages(self, given: Mapping[Option, Any]) -> dict[str, dict[str, Any]]:
        """``quantize``, ``layout`` and ``writer`` with the options that were given, which are all among its own."""
        stages = {"quantize": dict(self.quantize), "layout": dict(self.layout), "writer": dict(self.writer)}
        for option, value in given.items():
            path, fixed, constant = self.options[option].partition("=")
            stage, _, key = path.partition(".")
            stages[stage][key] = constant if fixed else value
        return stages
