"""The reference pages that are made from the code: a mkdocs hook (see mkdocs.yml), and a script that prints them.

``on_files`` adds them to the site; they are in no folder. tests/test_docs.py holds the hand-written pages to them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

import ktforge
from ktforge import Pipeline, Registry, testing
from ktforge.cli import app
from ktforge.contract import hooks
from ktforge.contract.plan import STAGES, Runtime
from ktforge.contract.registry import Entry
from ktforge.contract.stages import Stage

MERMAID = "assets/mermaid.min.js"


def commands() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "What `ktforge COMMAND --help` says, on one page.", ""]
    for name, command in get_command(app).commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        shown = [p for p in command.params if "--help" not in p.opts]
        usage = ["ktforge", name, *(p.metavar for p in shown if p.param_type_name == "argument"), "[OPTIONS]"]
        lines += [f"## ktforge {name}", "", command.help, "", "```sh", " ".join(usage), "```", ""]
        rows = []
        for parameter in shown:
            option, text = parameter.get_help_record(context)
            if parameter.param_type_name == "argument":
                option = parameter.metavar
            rows.append((_code(option), _cell(text)))
        lines += _table(("", "what it does"), rows) if rows else []
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
            fields = [f"{field}: {kind}" for field, kind in cls.__annotations__.items()]
            lines += [f"### {name}", "", "```python", *fields, "```", "", prose(inspect.getdoc(cls) or ""), ""]
    lines += ["## The test kit", "", prose(inspect.getdoc(testing) or ""), ""]
    for name, thing in vars(testing).items():
        if name in testing.__all__:
            if inspect.isclass(thing):
                lines += [f"### {name}", "", prose(inspect.getdoc(thing) or ""), ""]
            else:
                lines += _function(name, thing, "###")
    return "\n".join(lines)


PAGES = {
    "reference/commands.md": commands,
    "reference/pipeline.md": pipeline_options,
    "reference/contract.md": contract,
}


def _stage(entry: Entry) -> list[str]:
    lines = [f"### {entry.cls.name}", "", prose(inspect.getdoc(entry.cls) or ""), ""]
    return [*lines, *_options(entry.cls.model_fields)]


def _options(fields: dict[str, FieldInfo]) -> list[str]:
    if not fields:
        return ["No options.", ""]
    rows = []
    for name, field in fields.items():
        default = "" if field.default is PydanticUndefined else _code(field.default)
        required = "required" if field.is_required() else default
        rows.append((f"`{name}`", _type(field.annotation), required, _cell(field.description or "see above")))
    return _table(("option", "type", "default", "what it does"), rows)


def _type(annotation: Any) -> str:
    if getattr(annotation, "__args__", None) and "Literal" in str(annotation):
        return ", ".join(map(_code, annotation.__args__))
    return _code(annotation.__name__ if inspect.isclass(annotation) else annotation)


def _methods(cls: type, heading: str) -> list[str]:
    lines = []
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            lines += _function(name, member, heading)
    return lines


def _function(name: str, function: Any, heading: str) -> list[str]:
    signature = re.sub(r"'([^']*)'", r"\1", str(inspect.signature(function)))
    abstract = " *Must be written.*" if getattr(function, "__isabstractmethod__", False) else ""
    return [
        f"{heading} {name}", "", "```python", f"{name}{signature}", "```", "",
        f"{prose(inspect.getdoc(function) or '')}{abstract}", "",
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


def on_config(config: Any) -> Any:
    """Without this file of mermaid's, mkdocs-material takes it from the network when a page is looked at."""
    if (Path(config.docs_dir) / MERMAID).exists():
        config.extra_javascript.append(MERMAID)
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


if __name__ == "__main__":
    print("\n\n".join(page() for page in PAGES.values()))
