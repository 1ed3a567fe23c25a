"""Finds plugins, says whose they are, and builds stages by name."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from ktforge.contract import hooks as specs
from ktforge.contract.checks import is_blamed, one_line
from ktforge.contract.plan import STAGES, Writer, wrong_pattern
from ktforge.contract.presets import Preset
from ktforge.contract.stages import Layout, Loader, Preprocessor, Quantizer, Stage
from ktforge.errors import ConfigError, KtforgeError, PluginError
from ktforge.text import nearest

logger = logging.getLogger(__name__)

#: The group of entry points, and the name of the project to pluggy.
ENTRY_POINTS = "ktforge"
#: Plugin names, separated by commas, that :meth:`Registry.installed` leaves out.
BLOCK_VARIABLE = "KTFORGE_BLOCK"
_HOOKS: dict[str, type[Stage]] = {
    "ktforge_loaders": Loader,
    "ktforge_preprocessors": Preprocessor,
    "ktforge_quantizers": Quantizer,
    "ktforge_layouts": Layout,
    "ktforge_writers": Writer,
}
_PRESETS = "ktforge_presets"


@dataclass(frozen=True)
class Entry:
    """A stage class and its owner: the plugin's name, its distribution and version ("" if it has none)."""

    cls: type[Stage]
    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        where = f" of {self.distribution} {self.version}" if self.distribution else ""
        return f"plugin {self.plugin}{where}"


class Registry:
    """The stages that can be named. ``Registry(*plugins)`` holds those given; :meth:`installed` all installed ones.

    ``blocked`` holds plugin names (an installed plugin's is its entry point's) to leave out, import and all.
    Raises PluginError for a plugin that cannot be imported or breaks the contract, naming it.
    """

    def __init__(self, *plugins: object, blocked: Collection[str] = ()) -> None:
        self._manager = pluggy.PluginManager(ENTRY_POINTS)
        self._manager.add_hookspecs(specs)
        self._blocked = frozenset(blocked)
        self._owners: dict[str, tuple[str, str]] = {}
        self._entries: dict[tuple[str, str], Entry] = {}
        self._presets: dict[str, tuple[Preset, str]] = {}
        for plugin in plugins:
            self.add(plugin)

    @classmethod
    def installed(cls, *plugins: object, blocked: Collection[str] = ()) -> Registry:
        """Every plugin with an entry point in the group ``ktforge``, then ``plugins``.

        ``blocked`` and the environment's KTFORGE_BLOCK name entry points to leave out. Raises ConfigError for a name
        that no entry point has.
        """
        points = []
        for dist in importlib.metadata.distributions():
            if f"[{ENTRY_POINTS}]" in (dist.read_text("entry_points.txt") or ""):  # to take all apart takes 0.1 s
                named = dist.name, dist.version  # the metadata is read and taken apart each time that one is asked for
                points += [(point, *named) for point in dist.entry_points if point.group == ENTRY_POINTS]
        registry = cls(blocked=_blocked(blocked, {point.name for point, *_ in points}))
        # Not pluggy's load_setuptools_entrypoints: it drops the second of two plugins with one entry-point name in
        # silence, and lets an ImportError out without the plugin's name.
        for point, name, version in points:
            if point.name not in registry._blocked:
                registry._load(point, name, version)
        for plugin in plugins:
            registry.add(plugin)
        return registry

    def _load(self, point: importlib.metadata.EntryPoint, dist: str, version: str) -> None:
        owner = f"plugin {point.name} of {dist} {version}"
        if point.name in self._owners:
            if self._owners[point.name] == (dist, version):
                return  # one distribution seen twice on sys.path
            other_dist, other_version = self._owners[point.name]
            raise PluginError(
                f"{owner} has the same entry-point name as the one of {other_dist} {other_version}: "
                f"uninstall one, or turn both off with --block {point.name}"
            )
        try:
            plugin = point.load()
        except BaseException as error:
            if not is_blamed(error):  # such as a KTFORGE_ISA that this CPU does not have
                raise
            raise PluginError(
                f"{owner} cannot be imported ({one_line(error)}): correct or uninstall it, or {_off(point.name)}"
            ) from error
        self._owners[point.name] = (dist, version)
        self.add(plugin, name=point.name)

    def add(self, plugin: object, name: str | None = None) -> None:
        """Registers a plugin (a module or an object with hook implementations) that was already imported."""
        label = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        if label in self._blocked:
            return
        dist, version = self._owners.get(label, ("", ""))
        owner = f"plugin {label} of {dist} {version}" if dist else f"plugin {label}"
        off = f", or {_off(label)}" if dist else ""
        hooks = _hooks(plugin)
        unknown = [h for h in hooks if not _is_spec(h)]
        if unknown:
            raise PluginError(
                f"{owner} is written for the hook {unknown[0]}, which this ktforge does not have: "
                f"update the one that is older{off}"
            )
        if not hooks:
            raise PluginError(f"{owner} implements no hook: mark its functions with @ktforge.hookimpl{off}")
        finding = [*_HOOKS, _PRESETS]
        observed = {h: _reported(getattr(plugin, h), f"{owner} failed in {h}", off) for h in hooks if h not in finding}
        try:
            if observed:
                self._manager.register(_Observers(observed))
            found = [(base, cls) for hook, base in _HOOKS.items() if hook in hooks for cls in getattr(plugin, hook)()]
            presets = list(getattr(plugin, _PRESETS)()) if _PRESETS in hooks else []
        except BaseException as error:
            if not is_blamed(error):
                raise
            raise PluginError(f"{owner} failed while it was registered ({one_line(error)}): correct it{off}") from error
        logger.debug("%s offers %s", owner, ", ".join(f"{base.stage} {cls!r}" for base, cls in found) or "observers")
        for base, stage_cls in found:
            self._add_stage(base, Entry(stage_cls, label, dist, version))
        for preset in presets:
            self._add_preset(preset, owner, off)

    def _add_stage(self, base: type[Stage], entry: Entry) -> None:
        cls = entry.cls
        off = f", or {_off(entry.plugin)}" if entry.distribution else ""
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise PluginError(f"{entry} offers {cls!r}, which is not a {base.__name__} class: correct it{off}")
        if not isinstance(getattr(cls, "name", None), str):
            raise PluginError(f"{entry} offers {cls.__name__} without a `name`: correct it{off}")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise PluginError(f"{entry} offers the {base.stage} {cls.name!r}, which lacks {missing}: correct it{off}")
        if issubclass(cls, Writer) and (wrong := wrong_pattern(cls)) is not None:
            raise PluginError(f"{entry} offers the writer {cls.name!r}, whose `weights` have {wrong}: correct it{off}")
        key = (base.stage, cls.name)
        if key in self._entries:
            both = sorted([self._entries[key], entry], key=lambda e: e.plugin)
            names = " or ".join(f"--block {e.plugin}" for e in both if e.distribution)
            mend = f"turn one off with {names}" if names else "rename one"
            raise PluginError(f"two plugins offer the {base.stage} {cls.name!r}: {both[0]} and {both[1]}: {mend}")
        self._entries[key] = entry

    def _add_preset(self, preset: object, owner: str, off: str) -> None:
        if not isinstance(preset, Preset):
            raise PluginError(f"{owner} offers {preset!r}, which is not a Preset: correct it{off}")
        if wrong := preset.wrong():
            raise PluginError(f"{owner} offers the preset {preset.name!r} {wrong}: correct it{off}")
        if preset.command in self._presets:
            other = self._presets[preset.command][1]
            raise PluginError(f"two plugins offer `ktforge {preset.command}`: {other} and {owner}: rename one{off}")
        self._presets[preset.command] = preset, owner

    def presets(self) -> list[Preset]:
        """What ``ktforge convert`` can make, in the order in which it is offered."""
        return sorted((preset for preset, _ in self._presets.values()), key=lambda p: (p.order, p.command))

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's relay, for the observers' hooks."""
        return self._manager.hook

    def entries(self) -> list[Entry]:
        """All stages, in the order of the pipeline, then by name."""
        order = {base.stage: i for i, base in enumerate(STAGES)}
        return sorted(self._entries.values(), key=lambda e: (order[e.cls.stage], e.cls.name))

    def find(self, stage: str, name: str) -> Entry:
        """The stage of that name. Raises ConfigError with the names there are."""
        if (stage, name) not in self._entries:
            known = [e.cls.name for e in self.entries() if e.cls.stage == stage]
            others = [e.cls.stage for e in self.entries() if e.cls.name == name]
            hint = f" (it goes under {' or '.join(others)})" if others else nearest(name, known)
            blocked = f"; blocked: {', '.join(sorted(self._blocked))}" if self._blocked else ""
            raise ConfigError(
                f"there is no {stage} called {name!r}{hint}; installed: {', '.join(known) or 'none'}{blocked}"
            )
        return self._entries[stage, name]

    def classes(self) -> list[type[Stage]]:
        """The stage classes, in the order of :meth:`entries`."""
        return [entry.cls for entry in self.entries()]

    def build(self, stage: str, name: str, options: Mapping[str, Any]) -> Any:
        """The stage of that name with these options, told which others there are."""
        return self.find(stage, name).cls(**options).equip(self.classes())


def load_file(path: Path) -> object:
    """The plugin in one file that is not installed. Raises PluginError if it is not there or cannot be imported."""
    # The path as the module's name keeps it apart from every other module, and names the file in errors.
    name = str(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise PluginError(f"plugin {path} is not a Python file (.py)")
    if not path.is_file():
        raise PluginError(f"plugin {path} {'is no file that has an end' if path.exists() else 'does not exist'}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up a class's annotations there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not is_blamed(error):
            raise
        raise PluginError(f"plugin {path} cannot be imported ({one_line(error)})") from error
    return module


def _blocked(names: Collection[str], known: Collection[str]) -> set[str]:
    wanted = {*names, *(name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(","))} - {""}
    unknown = sorted(wanted - set(known))
    if unknown:
        named = ", ".join(f"{name}{nearest(name, known)}" for name in unknown)
        raise ConfigError(f"there is no plugin {named} to block; installed: {', '.join(sorted(known))}")
    return wanted


def _off(name: str) -> str:
    return f"turn it off with --block {name} or {BLOCK_VARIABLE}={name}"


class _Observers:
    """A plugin's observers as pluggy sees them: it would let their errors out without the plugin's name."""

    def __init__(self, observed: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(observed)


def _reported(function: Callable[..., Any], what: str, off: str) -> Callable[..., Any]:
    """An observer, which cannot stop a conversion: what it raises is logged, of each type once."""
    said: set[type[BaseException]] = set()

    @functools.wraps(function)
    def observed(*args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            if not is_blamed(error) and not isinstance(error, KtforgeError):
                raise
            if type(error) not in said:
                said.add(type(error))
                logger.warning("%s (%s), and the conversion goes on: correct it%s", what, one_line(error), off)

    return observed


def _hooks(plugin: object) -> list[str]:
    """The names of its hook implementations, found without running code of the plugin's."""
    if inspect.ismodule(plugin):  # whose attributes are no descriptors; to look at them as at others' takes 20 ms
        return sorted(name for name, value in vars(plugin).items() if _is_hookimpl(value))
    return [n for n in dir(plugin) if _is_hookimpl(inspect.getattr_static(plugin, n, None))]


def _is_hookimpl(value: object) -> bool:
    return hasattr(value, f"{ENTRY_POINTS}_impl")


def _is_spec(name: str) -> bool:
    return hasattr(getattr(specs, name, None), f"{ENTRY_POINTS}_spec")
