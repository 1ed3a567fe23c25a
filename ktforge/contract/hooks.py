"""The contract with plugins: one hook per stage finds classes, one finds presets, and observers watch a run.

What an observer raises is logged with its plugin's name, and the conversion goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pluggy

from ktforge.contract.plan import Plan, Summary, Writer
from ktforge.contract.presets import Preset
from ktforge.contract.stages import Layout, Loader, Preprocessor, Quantizer
from ktforge.contract.tensors import UnitSpec

hookspec = pluggy.HookspecMarker("ktforge")
hookimpl = pluggy.HookimplMarker("ktforge")


@hookspec
def ktforge_loaders() -> Iterable[type[Loader]]:  # type: ignore[empty-body]
    """Loader classes this plugin offers."""


@hookspec
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:  # type: ignore[empty-body]
    """Preprocessor classes this plugin offers."""


@hookspec
def ktforge_quantizers() -> Iterable[type[Quantizer]]:  # type: ignore[empty-body]
    """Quantizer classes this plugin offers."""


@hookspec
def ktforge_layouts() -> Iterable[type[Layout]]:  # type: ignore[empty-body]
    """Layout classes this plugin offers."""


@hookspec
def ktforge_writers() -> Iterable[type[Writer]]:  # type: ignore[empty-body]
    """Writer classes this plugin offers."""


@hookspec
def ktforge_presets() -> Iterable[Preset]:  # type: ignore[empty-body]
    """Conversions that ``convert``, ``inspect`` and ``init`` offer by name."""


@hookspec
def ktforge_planned(plan: Plan) -> None:
    """A run is about to start. ``plan``: what it will do, without refusals."""


@hookspec
def ktforge_resumed(specs: Sequence[UnitSpec]) -> None:
    """An unfinished output goes on. ``specs``: the units of the source that it holds already, of which no other hook
    will speak."""


@hookspec
def ktforge_unit_written(spec: UnitSpec, seconds: float) -> None:
    """A unit of the source is done; called from the worker's thread.

    ``spec``: the unit as the loader found it. ``seconds``: wall time from reading to the last write.
    """


@hookspec
def ktforge_finished(plan: Plan, summary: Summary) -> None:
    """A run has ended well, and its output is published. ``summary``: what it did, and in which time."""


@hookspec
def ktforge_failed(plan: Plan, error: BaseException) -> None:
    """A run has ended without its output, which the next one may go on with. ``error``: why, KeyboardInterrupt for
    Ctrl-C, and AlreadyDone where the output was there before."""
