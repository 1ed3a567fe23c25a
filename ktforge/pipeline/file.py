"""pipeline.yaml → Pipeline. Errors name the file, the line and the key path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

from ktforge.contract.checks import is_blamed, one_line
from ktforge.contract.plan import KEEP, STAGES, Recipe, Runtime
from ktforge.contract.registry import Registry
from ktforge.contract.rules import Rule
from ktforge.contract.stages import Stage
from ktforge.disk.reading import open_regular
from ktforge.errors import CheckpointError, ConfigError, PluginError
from ktforge.pipeline.mistakes import Key, by_key, sentence
from ktforge.pipeline.pipeline import Pipeline
from ktforge.text import nearest

_STAGE_KEYS = tuple(cls.stage for cls in STAGES)
_KEYS = ("version", *_STAGE_KEYS, "mtp", "runtime")
_REQUIRED = ("loader", "writer")
#: A pipeline file larger (in bytes) or deeper than this is something else.
SIZE_LIMIT = 100_000
DEPTH_LIMIT = 20
#: With more mistakes than this, the first ones are told.
PROBLEM_LIMIT = 20


def load_pipeline(path: Path, registry: Registry, sets: Iterable[str] = ()) -> Pipeline:
    """Reads a pipeline file. ``sets`` are ``key.path=value`` changes; their values are read as YAML.

    Paths may begin with ``~`` for a home directory. Raises ConfigError with every mistake at once.
    """
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path} is a folder: `ktforge init {path} > pipeline.yaml` writes a file for a checkpoint"
            )
        with open_regular(path) as opened:
            content = opened.read(SIZE_LIMIT + 1)
        if len(content) > SIZE_LIMIT:
            raise ConfigError(f"{path} has over {SIZE_LIMIT:,} bytes: it is no pipeline file")
        data = _parse(content.decode("utf-8"), str(path))
    except CheckpointError as error:
        raise ConfigError(*error.problems) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    if not isinstance(data, CommentedMap):
        raise ConfigError(f"{path} does not hold keys such as loader: and writer:")
    for change in sets:
        _set(data, change)
    return _Builder(data, registry, str(path), home=True).build()


def build_pipeline(
    data: dict[str, Any], registry: Registry, source: str = "pipeline", sets: Iterable[str] = ()
) -> Pipeline:
    """Builds the stages that ``data`` (the content of a pipeline file) names, with the changes that ``sets`` are; they
    are made in ``data`` itself. Raises ConfigError."""
    for change in sets:
        _set(data, change)
    return _Builder(data, registry, source).build()


def dump_pipeline(pipeline: Recipe) -> str:
    """The pipeline file for a pipeline, one stage a line."""
    lines = [f"version: {pipeline.version}"]
    for key, text in stage_lines(pipeline):
        lines.append(f"  - {text}" if key == "preprocess" else f"{key}: {text}")
    if pipeline.preprocess:
        lines.insert(2, "preprocess:")
    return "\n".join(lines) + "\n"


def stage_lines(pipeline: Recipe) -> Iterator[tuple[str, str]]:
    """The keys of a pipeline file and what stands behind them, all options spelled out; ``preprocess`` as often as
    there are preprocessors."""
    for key, value in pipeline.to_dict().items():
        if key != "version":
            for item in value if key == "preprocess" else [value]:
                yield key, item if isinstance(item, str) else _flow(item)


def _parse(text: str, source: str) -> Any:
    yaml = YAML(typ="rt", pure=True)
    try:
        depth = 0
        for event in yaml.parse(text):  # looks before the parser builds anything, so that no bomb goes off
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if getattr(event, "anchor", None):
                raise ConfigError(f"{source}: anchors and aliases (& and *) are not used in pipeline files")
            if getattr(event, "tag", None):
                raise ConfigError(f"{source}: tags ({str(event.tag)[:80]}) are not used in pipeline files")
            if depth > DEPTH_LIMIT:
                raise ConfigError(f"{source}: nested more than {DEPTH_LIMIT} deep: it is no pipeline file")
        return yaml.load(text)
    except MarkedYAMLError as error:
        begun = error.context_mark if "while parsing a flow" in (error.context or "") else None
        mark = begun or error.problem_mark  # an open bracket is missed at the next key, on another line
        line = f":{mark.line + 1}" if mark else ""
        problem = (error.problem or "not YAML").splitlines()[0]
        if begun:
            problem = "a bracket { or [ that begins here is not closed, or a comma is missing in it"
        raise ConfigError(f"{source}{line}: {problem}") from error
    except (YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: not YAML: {str(error).splitlines()[0][:200]}") from error


def _flow(mapping: Mapping[str, Any]) -> str:
    from io import StringIO

    yaml = YAML(typ="rt", pure=True)
    yaml.default_flow_style = True
    yaml.width = 100_000
    out = StringIO()
    yaml.dump(dict(mapping), out)
    return out.getvalue().strip()


def _set(data: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {change}: write it as key.path=value, such as layout.threadpool_count=4")
    target: Any = data
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(target, list) and parent.isdigit() and int(parent) < len(target):
            target = target[int(parent)]
        elif isinstance(target, dict) and isinstance(target.get(parent), dict | list):
            target = target[parent]
        elif target is data and parent in _KEYS and parent not in data:
            target = data[parent] = CommentedSeq() if parent == "preprocess" else CommentedMap()
        else:
            raise ConfigError(f"--set {change}: {_no_such(parent, target, target is data)}")
    if not isinstance(target, dict):
        raise ConfigError(f"--set {change}: {'.'.join(parents)} is a list; name the entry by its number from 0")
    if target is data and last not in _KEYS:
        raise ConfigError(f"--set {change}: {_no_such(last, target, True)}")
    target[last] = _parse(text, f"--set {change}")


def _no_such(key: str, target: Any, at_the_top: bool) -> str:
    """That there is no ``key``, and what there is instead: keys, or numbers of a list's entries from 0."""
    if isinstance(target, list):
        there = f"the entries 0 to {len(target) - 1}" if target else "no entry"
        return f"the list has no entry {key!r} there; it has {there}"
    known = list(_KEYS) if at_the_top else [str(k) for k in target] if isinstance(target, dict) else []
    return f"the pipeline has no {key!r} there{nearest(key, known)}" + (f"; it has {', '.join(known)}" if known else "")


class _Builder:
    def __init__(self, data: Mapping[str, Any], registry: Registry, source: str, *, home: bool = False) -> None:
        self.data, self.registry, self.source, self.home = data, registry, source, home
        self.problems: list[str] = []

    def build(self) -> Pipeline:
        for key in self.data:
            if key not in _KEYS:
                self._problem((key,), f"no such key{nearest(str(key), _KEYS)}; a pipeline has {', '.join(_KEYS)}")
        for key in _REQUIRED:
            if self.data.get(key) is None:
                self._problem((), f"there is no {key}")
        fields: dict[str, Any] = {}
        for key in _STAGE_KEYS:
            value = self.data.get(key)
            if value is None:
                continue
            if key == "quantize" and isinstance(value, dict) and "rules" in value:
                fields["rules"] = self._rules(value["rules"])
                value = {k: v for k, v in value.items() if k != "rules"}
            if key != "preprocess":
                fields[key] = self._stage(key, value, (key,))
            elif isinstance(value, list):
                fields[key] = [self._stage(key, item, (key, i)) for i, item in enumerate(value)]
            else:
                self._problem((key,), "must be a list of stages, each on a line that begins with a dash")
        if self.data.get("runtime") is not None:
            fields["runtime"] = self._model(Runtime, self.data["runtime"], ("runtime",))
        if self.data.get("mtp") is not None:
            fields["mtp"] = self.data["mtp"]
        if self.data.get("version", 1) != 1:
            self._problem(("version",), f"is {self.data['version']!r}; this ktforge knows version 1")
        self._raise()
        try:
            return Pipeline(**fields).equipped(self.registry.classes())
        except ValidationError as error:
            self._refuse(error, fields, (), "")
        self._raise()
        raise AssertionError("a failed pipeline without a problem")

    def _rules(self, rules: Any) -> list[Rule | None]:
        path: tuple[Key, ...] = ("quantize", "rules")
        if not isinstance(rules, list):
            self._problem(path, "must be a list of {match: PATTERN, use: QUANTIZER or keep, …}")
            return []
        return [self._rule(rule, (*path, i)) for i, rule in enumerate(rules)]

    def _rule(self, rule: Any, path: tuple[Key, ...]) -> Rule | None:
        if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
            self._problem(path, "must say what it is for, such as {match: '*.down_proj.weight', use: int8}")
            return None
        rest = {k: v for k, v in rule.items() if k != "match"}
        quantizer = None if rest == {"use": KEEP} else self._stage("quantize", rest, path)
        try:
            return Rule(match=rule["match"], quantizer=quantizer)  # type: ignore[arg-type]
        except ValidationError as error:
            self._refuse(error, rule, path, "")
            return None

    def _stage(self, key: str, value: Any, path: tuple[Key, ...]) -> Stage | None:
        if not isinstance(value, dict) or not isinstance(value.get("use"), str):
            word = value if isinstance(value, str) else "NAME"
            self._problem(path, f"must say which plugin to use, as in {{use: {word}, …}}")
            return None
        try:
            entry = self.registry.find(key, value["use"])
        except ConfigError as error:
            self._problem((*path, "use"), str(error))
            return None
        options = {k: v for k, v in value.items() if k != "use"}
        return self._model(entry.cls, options, path, f"{key} {value['use']}")

    def _model(self, cls: type[BaseModel], options: Any, path: tuple[Key, ...], label: str = "") -> Any:
        data = _plain(options)
        if self.home and isinstance(data, dict):
            data = {k: self._expanded(cls, k, v, path) for k, v in data.items()}
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            known = ", ".join(cls.model_fields) or "none"
            self._refuse(
                error, data, path, f"; the options of {label or path[0]} are: {known}", tuple(cls.model_fields)
            )
            return None
        except BaseException as error:
            if not is_blamed(error):
                raise
            raise PluginError(f"{label or path[0]} failed on its options: {one_line(error)}") from error

    def _expanded(self, cls: type[BaseModel], option: str, value: Any, path: tuple[Key, ...]) -> Any:
        """A path with its ``~``; anything else as it is."""
        field = cls.model_fields.get(option)
        is_path = field is not None and Path in (field.annotation, *get_args(field.annotation))
        if not is_path or not isinstance(value, str) or not value.startswith("~"):
            return value
        try:
            return Path(value).expanduser()
        except RuntimeError:
            self._problem((*path, option), f"{value} names a home directory that is not known: write the path in full")
            return value

    def _refuse(
        self, error: ValidationError, data: Any, path: tuple[Key, ...], options: str, known: tuple[str, ...] = ()
    ) -> None:
        """One problem for each key that ``error`` is about. ``options`` says which there are."""
        for where, problems in by_key(error, data):
            if problems[0]["type"] == "extra_forbidden":
                message = f"no such option{nearest(str(where[-1]), known)}{options}"
            else:
                message = sentence(problems)
            self._problem((*path, *where), message)

    def _problem(self, path: tuple[Key, ...], message: str) -> None:
        line = self._line(path)
        dotted = ".".join(map(str, path))[:200]
        self.problems.append(f"{self.source}{f':{line}' if line else ''}: {f'{dotted}: ' if dotted else ''}{message}")

    def _line(self, path: tuple[Key, ...]) -> int | None:
        """The line of the deepest part of ``path`` that is in the file; None for data that came from no file."""
        node: Any = self.data
        line = None
        for key in path:
            try:
                if isinstance(node, CommentedMap):
                    line = node.lc.key(key)[0] + 1
                elif isinstance(node, CommentedSeq):
                    line = node.lc.item(key)[0] + 1
                node = node[key]
            except (KeyError, IndexError, TypeError):
                break
        return line

    def _raise(self) -> None:
        if self.problems:
            left_out = len(self.problems) - PROBLEM_LIMIT
            more = [f"{self.source}: and {left_out:,} more mistakes"] if left_out > 0 else []
            raise ConfigError(*self.problems[:PROBLEM_LIMIT], *more)


def _plain(value: Any) -> Any:
    """ruamel's containers as Python's own, which is what pydantic expects of data."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value
