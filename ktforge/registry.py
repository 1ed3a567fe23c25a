"""Finds plugins, says whose they are, and builds stages by name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass

import pluggy

from ktforge import hookspecs
from ktforge.errors import ConfigError, KtforgeError, PluginError
from ktforge.stages import STAGES, Layout, Loader, Preprocessor, Quantizer, Stage, Writer

GROUP = "ktforge"
_HOOKS: dict[str, type[Stage]] = {
    "ktforge_loaders": Loader,
    "ktforge_preprocessors": Preprocessor,
    "ktforge_quantizers": Quantizer,
    "ktforge_layouts": Layout,
    "ktforge_writers": Writer,
}


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
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._blocked = frozenset(blocked)
        self._owners: dict[str, tuple[str, str]] = {}
        self._entries: dict[tuple[str, str], Entry] = {}
        for plugin in plugins:
            self.add(plugin)

    @classmethod
    def installed(cls, *plugins: object, blocked: Collection[str] = ()) -> Registry:
        """Every plugin with an entry point in the group ``ktforge``, then ``plugins``."""
        registry = cls(blocked=blocked)
        # Not pluggy's load_setuptools_entrypoints: it drops the second of two plugins with one entry-point name in
        # silence, and lets an ImportError out without the plugin's name.
        for dist in importlib.metadata.distributions():
            for point in dist.entry_points:
                if point.group == GROUP and point.name not in registry._blocked:
                    registry._load(point, dist.name, dist.version)
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
                f"{owner} has the same entry-point name as the one of {other_dist} {other_version}: uninstall one"
            )
        try:
            plugin = point.load()
        except Exception as error:
            raise PluginError(
                f"{owner} cannot be imported ({type(error).__name__}: {error}): mend or uninstall it"
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
        unknown = [h for h in dir(plugin) if h.startswith("ktforge_") and _is_hookimpl(plugin, h) and not _is_spec(h)]
        if unknown:
            raise PluginError(f"{owner} is written for the hook {unknown[0]}, which this ktforge does not have")
        try:
            self._manager.register(plugin, name=label if self._manager.get_plugin(label) is None else None)
            found = [
                (base, cls) for hook, base in _HOOKS.items() if _is_hookimpl(plugin, hook)
                for cls in getattr(plugin, hook)()
            ]  # fmt: skip
        except Exception as error:
            raise PluginError(f"{owner} failed while it was registered ({type(error).__name__}: {error})") from error
        for base, stage_cls in found:
            self._add_stage(base, Entry(stage_cls, label, dist, version))

    def _add_stage(self, base: type[Stage], entry: Entry) -> None:
        if not (isinstance(entry.cls, type) and issubclass(entry.cls, base)):
            raise PluginError(f"{entry} offers {entry.cls!r}, which is not a {base.__name__} class")
        if not isinstance(getattr(entry.cls, "name", None), str):
            raise PluginError(f"{entry} offers {entry.cls.__name__} without a `name`")
        key = (base.stage, entry.cls.name)
        if key in self._entries:
            raise PluginError(
                f"two plugins offer the {base.stage} {entry.cls.name!r}: {self._entries[key]} and {entry}: block one"
            )
        self._entries[key] = entry

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
            known = ", ".join(e.cls.name for e in self.entries() if e.cls.stage == stage) or "none"
            raise ConfigError(f"there is no {stage} called {name!r}; installed: {known}")
        return self._entries[stage, name]


def _is_hookimpl(plugin: object, name: str) -> bool:
    return hasattr(getattr(plugin, name, None), f"{GROUP}_impl")


def _is_spec(name: str) -> bool:
    return hasattr(getattr(hookspecs, name, None), f"{GROUP}_spec")


def owner(stage: Stage) -> str:
    """Whose code a stage is: name, kind, and the distribution that ships its module."""
    module = type(stage).__module__
    top = module.partition(".")[0]
    dists = importlib.metadata.packages_distributions().get(top, [])
    where = f"{dists[0]} {importlib.metadata.version(dists[0])}" if dists else module
    return f"plugin {type(stage).name} ({where}, {stage.stage})"


class blame:
    """Turns an unexpected exception from a stage's code into a PluginError that names stage and subject.

    A class, since a plan enters it a hundred thousand times and a generator takes three times as long.
    """

    __slots__ = ("_stage", "_subject")

    def __init__(self, stage: Stage, subject: str) -> None:
        self._stage, self._subject = stage, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, KtforgeError):
            message = f"{owner(self._stage)} failed on {self._subject}: {type(error).__name__}: {error}"
            raise PluginError(message) from error
