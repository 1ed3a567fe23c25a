"""The reference pages that are made from the code: a mkdocs hook (see mkdocs.yml), and a script that prints them.

``on_files`` adds them to the site; they are in no folder. tests/test_docs.py holds the hand-written pages to them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, Union, get_args, get_type_hints

import ktforge_plugins
from in_words import in_words, limits
from pydantic.fields import FieldInfo
from typer.main import get_command

import ktforge
from ktforge import Pipeline, Registry, testing
from ktforge.cli import app
from ktforge.contract import hooks
from ktforge.contract.plan import STAGES, Runtime
from ktforge.contract.registry import Entry
from ktforge.contract.stages import Stage

#: What plugins may import of ktforge, beside ``ktforge`` itself and the kit.
PACKAGES = ("calibration", "contract", "native", "checkpoint", "model", "disk", "text")
#: How the docstring of a module says that it is there for the others.
NO_PLUGIN = "Not a plugin itself"


def commands() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "What `ktforge COMMAND --help` says, on one page.", ""]
    for name, command in get_command(app).commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        shown = [p for p in command.params if "--help" not in p.opts]
        usage = ["ktforge", name, *(p.metavar for p in shown if p.param_type_name == "argument"), "[OPTIONS]"]
        lines += [f"## ktforge {name}", "", command.help, "", "```sh", " ".join(usage), "```", ""]
        rows = [_option(parameter, context) for parameter in shown]
        lines += _table(("option", "what it does"), rows)
    return "\n".join(lines)


def pipeline_options() -> str:
    """Every built-in stage with its options, and the keys that are no stage."""
    lines = [
        "# Pipeline options",
        "",
        "The stages that come with ktforge. `ktforge plugins` lists those that are installed, and `ktforge schema` "
        "prints the JSON schema of all of them for editors.",
        "",
    ]
    entries = [e for e in Registry.installed().entries() if e.distribution == "ktforge"]
    for stage in STAGES:
        lines += [f"## {stage.stage}", "", prose(inspect.getdoc(stage) or ""), ""]
        for entry in (e for e in entries if e.cls.stage == stage.stage):
            lines += _stage(entry)
    lines += ["## runtime", "", prose(inspect.getdoc(Runtime) or ""), "", *_options(Runtime.model_fields)]
    stages = {stage.stage for stage in STAGES}
    others = {n: f for n, f in Pipeline.model_fields.items() if n not in stages | {"runtime"}}
    lines += ["## Other keys", "", *_options(others)]
    return "\n".join(lines)


def contract() -> str:
    """Every hook, the methods of every stage, and what travels between them."""
    lines = ["# The contract", "", prose(inspect.getdoc(hooks) or ""), "", "## Hooks", ""]
    for name, hook in vars(hooks).items():
        if name.startswith("ktforge_"):
            lines += _function(name, hook, "###")
    lines += ["## Stages", "", prose(inspect.getdoc(Stage) or ""), "", *_methods(Stage, "###")]
    for stage in STAGES:
        lines += [f"### {stage.__name__}", "", prose(inspect.getdoc(stage) or ""), "", *_methods(stage, "####")]
    lines += ["## What travels between them", ""]
    for name in ktforge.__all__:
        cls = getattr(ktforge, name)
        if getattr(cls, "__module__", "") == "ktforge.contract.tensors" and inspect.isclass(cls):
            lines += [f"### {name}", "", prose(inspect.getdoc(cls) or ""), ""]
            kinds = get_type_hints(cls, include_extras=True)
            fields = [(f"`{field}`", in_words(kinds[field])) for field in cls.__annotations__]
            lines += _table(("field", "what it is"), fields) if fields else []
    lines += ["## The test kit", "", prose(inspect.getdoc(testing) or ""), ""]
    for name, thing in vars(testing).items():
        if name in testing.__all__:
            if inspect.isclass(thing):
                lines += [f"### {name}", "", prose(inspect.getdoc(thing) or ""), ""]
            else:
                lines += _function(name, thing, "###")
    lines += [
        "## What else a plugin may import", "",
        "Beside the names of `ktforge` and `ktforge.testing`. What is not on this page may change without notice.", "",
    ]  # fmt: skip
    for module in importable():
        names = {name: says for name, says in names_of(module).items() if name not in ktforge.__all__}
        rows = [(f"`{name}`", _cell(says)) for name, says in names.items() if not hasattr(hooks, name)]
        if rows:
            lines += [f"### {module}", "", prose(_sentence(ast.get_docstring(_tree(module)))), ""]
            lines += _table(("name", "what it is"), rows)
    return "\n".join(lines)


def importable() -> list[str]:
    """The modules of the packages that plugins may import, and those of ktforge_plugins that are no plugins. A package
    that hands on names stands for its modules."""
    modules = []
    for package in PACKAGES:
        spec = find_spec(f"ktforge.{package}")
        folders = spec.submodule_search_locations if spec else None
        modules += [f"ktforge.{package}", *(m.name for m in walk_packages(folders or (), f"ktforge.{package}."))]
    packages = [module for module in modules if names_of(module) and _is_package(module)]
    helpers = [m.name for m in walk_packages(ktforge_plugins.__path__, "ktforge_plugins.")]
    return [
        *(module for module in modules if module.rpartition(".")[0] not in packages),
        *(name for name in helpers if NO_PLUGIN in (ast.get_docstring(_tree(name)) or "")),
    ]


def names_of(module: str) -> dict[str, str]:
    """The public names that a module defines, and what each is, in a sentence; a package's are those it hands on."""
    tree, found = _tree(module), {}
    lines = _source(module).splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = _sentence(ast.get_docstring(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and node.value is not None and not _is_private(node.value):
                found[target.id] = _comment(lines, node.lineno) or _code(ast.unparse(node.value)[:80])
        elif isinstance(node, ast.ImportFrom) and _is_package(module) and f"{node.module}".startswith(f"{module}."):
            handed_on = names_of(node.module)
            found |= {alias.name: handed_on[alias.name] for alias in node.names}
    return {name: says for name, says in found.items() if not name.startswith("_")}


def _is_private(value: ast.expr) -> bool:
    """Of a module's constants, those that are of use within it alone."""
    return ast.unparse(value).startswith(("TypeVar(", "logging.getLogger("))


def _is_package(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.submodule_search_locations is not None


def _comment(lines: list[str], number: int) -> str:
    """The sentence of the ``#:`` lines above a line of a module."""
    above = list(takewhile(lambda line: line.startswith("#:"), reversed(lines[: number - 1])))
    return _sentence(" ".join(line.removeprefix("#:").strip() for line in reversed(above)))


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text("utf-8")


def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


def _sentence(text: str | None) -> str:
    """The first sentence of a docstring."""
    whole = " ".join((text or "").split())
    return re.split(r"(?<=[^.]\.) (?=[A-Z`])", whole, maxsplit=1)[0]


PAGES = {
    "reference/commands.md": commands,
    "reference/pipeline.md": pipeline_options,
    "reference/contract.md": contract,
}


def _option(parameter: Any, context: Any) -> tuple[str, str]:
    """How a parameter is typed, and what it does: the line of ``--help`` without the notation of its parser."""
    option, text = parameter.get_help_record(context)
    if parameter.param_type_name == "argument":
        option = parameter.metavar
    option, choices = re.sub(r" <[\w ]+>$", " N", option), re.search(r" <(.*)>$", option)
    if choices and "|" in choices[1]:
        option = option.replace(choices[0], " WORD")
        text = f"{text}  [one of {', '.join(map(_code, choices[1].split('|')))}]"
    text = re.sub(r"\[x>=(\d+)\]", r"[at least \1]", text)
    return _code(option), _cell(re.sub(r" {2}\[(\w)([^\]]*)\]", lambda note: f" {note[1].upper()}{note[2]}.", text))


def _stage(entry: Entry) -> list[str]:
    lines = [f"### {entry.cls.name}", "", prose(inspect.getdoc(entry.cls) or ""), ""]
    return [*lines, *_options(entry.cls.model_fields)]


def _options(fields: dict[str, FieldInfo]) -> list[str]:
    if not fields:
        return ["No options.", ""]
    rows = []
    for name, field in fields.items():
        required = "required" if field.is_required() else _default(field.default)
        rows.append((f"`{name}`", _kind(field), required, _cell(field.description or "see above")))
    return _table(("option", "value", "default", "what it does"), rows)


def _kind(field: FieldInfo) -> str:
    """What an option may be, in words; one that may be left out need not say so, since it has a default."""
    kinds = get_args(field.annotation) if type(None) in get_args(field.annotation) else (field.annotation,)
    kind = in_words(Union[tuple(kind for kind in kinds if kind is not type(None))])  # noqa: UP007
    return "".join([kind, *limits(field.metadata)])


def _default(value: Any) -> str:
    """As a pipeline file would spell it."""
    if value is None or value == ():
        return "–"
    return _code(str(value).lower() if isinstance(value, bool) else value)


def _methods(cls: type, heading: str) -> list[str]:
    lines = []
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            lines += _function(name, member, heading)
    return lines


def _function(name: str, function: Any, heading: str) -> list[str]:
    signature, kinds = inspect.signature(function), get_type_hints(function, include_extras=True)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    takes = [f"`{p.name}`: {in_words(kinds[p.name])}" for p in bare]
    gives = [f"Gives {in_words(kinds['return'])}"] if kinds["return"] is not type(None) else []
    abstract = " *Must be written.*" if getattr(function, "__isabstractmethod__", False) else ""
    call = signature.replace(parameters=bare, return_annotation=signature.empty)
    return [
        f"{heading} {name}", "", "```python", f"{name}{call}", "```", "",
        f"{prose(inspect.getdoc(function) or '')}{abstract}", "",
        *(f"{'. '.join([*takes, *gives])}.", "") * bool(takes or gives),
    ]  # fmt: skip


def prose(docstring: str) -> str:
    """Sphinx's roles and double backticks as Markdown's single ones, and no emphasis from _ and *."""
    text = re.sub(r":\w+:`~?(?:ktforge\.)?([^`]+)`", r"`\1`", docstring).replace("``", "`")
    return "`".join(re.sub(r"([_*])", r"\\\1", s) if i % 2 == 0 else s for i, s in enumerate(text.split("`")))


def _code(text: object) -> str:
    return f"`{text}`"  # a | between backticks does not end a cell


def _cell(text: str) -> str:
    return prose(text).replace("|", "\\|").replace("\n", " ")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


if __name__ == "__main__":
    print("\n\n".join(page() for page in PAGES.values()))
