"""Conversions that have a name, which plugins offer to the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: What ``ktforge convert`` can be told beside a preset, by the names of its options.
Option = Literal["group_size", "threadpool_count", "no_merge_safetensor"]


@dataclass(frozen=True)
class Preset:
    """What ``ktforge convert --quant-method NAME`` makes; ``ktforge inspect`` says whether it can be made of a
    checkpoint, and ``ktforge init`` writes a pipeline file for it.

    ``quantize`` and ``layout`` are the stages as a pipeline file has them: ``{"use": "int4", "group_size": 32}``.
    ``help`` says in a few words what it is. ``with_layout``: it has to be asked for with ``--layout`` too, since
    another preset of its name goes without. ``options`` of ``convert`` go with it, and every other is refused.

    ``init`` tries the layout with each of ``tries``, options the usual of which come first, and writes ``notes`` behind
    the lines of ``quantize`` and ``layout``. What has a lower ``order`` is offered first.
    """

    name: str
    quantize: Mapping[str, Any]
    layout: Mapping[str, Any]
    help: str
    with_layout: bool = False
    options: frozenset[Option] = frozenset()
    tries: tuple[Mapping[str, Any], ...] = ({},)
    notes: Mapping[Literal["quantize", "layout"], str] = field(default_factory=dict)
    order: int = 100

    @property
    def command(self) -> str:
        """The words of the command line."""
        layout = f" --layout {self.layout['use']}" if self.with_layout else ""
        return f"convert --quant-method {self.name}{layout}"
