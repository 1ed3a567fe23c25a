"""The documentation against the code: nothing is undocumented, no page is unreachable, no command in it is made up."""

import ast
import inspect
import os
import re
import shlex
from pathlib import Path

import generate
import pytest
from ruamel.yaml import YAML
from typer.main import get_command

import ktforge
from ktforge import Pipeline, Registry, Stage, testing
from ktforge.cli import app
from ktforge.contract import hooks
from ktforge.contract.plan import STAGES, Runtime
from ktforge.skeleton import FILES, KINDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
COMMANDS = get_command(app).commands


GENERATED = {path: page() for path, page in generate.PAGES.items()}
BUILTIN = [e for e in Registry.installed().entries() if e.distribution == "ktforge"]


def section(page, heading):
    """The text below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def test_every_command_and_option_is_in_the_reference():
    page = GENERATED["reference/commands.md"]
    for name, command in COMMANDS.items():
        text = section(page, f"## ktforge {name}")
        assert command.help in text
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)
            for option in parameter.opts:
                assert re.search(rf"`(-\w, )?{option}", text) or not option.startswith("--") or option == "--help", (
                    name,
                    option,
                )


@pytest.mark.parametrize("entry", BUILTIN, ids=lambda e: e.plugin)
def test_every_stage_and_option_is_explained(entry):
    text = section(section(GENERATED["reference/pipeline.md"], f"## {entry.cls.stage}"), f"### {entry.cls.name}")
    assert entry.cls.__doc__ and generate.prose(inspect.getdoc(entry.cls)) in text
    for option, field in entry.cls.model_fields.items():
        assert f"| `{option}` |" in text
        assert field.description or f"``{option}``" in entry.cls.__doc__, f"{option} of {entry.cls.name} says nothing"


def test_every_other_key_is_explained():
    page = GENERATED["reference/pipeline.md"]
    stages = {stage.stage for stage in STAGES}
    for key, field in {**Pipeline.model_fields, **Runtime.model_fields}.items():
        if key in stages | {"runtime"}:
            assert f"\n## {key}\n" in page
        else:
            assert f"| `{key}` |" in page and field.description, f"{key} says nothing"


def test_every_hook_and_method_is_in_the_reference():
    page = GENERATED["reference/contract.md"]
    for hook in (name for name in vars(hooks) if name.startswith("ktforge_")):
        assert getattr(hooks, hook).__doc__ and f"### {hook}\n" in page
    for stage in STAGES:
        text = section(page, f"### {stage.__name__}")
        for name, member in vars(stage).items():
            if callable(member) and not name.startswith("_"):
                assert member.__doc__ and f"#### {name}\n" in text, (stage, name)


def imported_by_plugins():
    """Module and name of everything that a built-in plugin imports from the packages that are open to plugins."""
    open_to_plugins = generate.importable()
    packages = tuple(f"ktforge.{package}" for package in generate.PACKAGES)
    for path in sorted((ROOT / "plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (
                node.module in open_to_plugins or node.module.startswith(packages)
            ):
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    yield (module, "") if module in open_to_plugins else (node.module, alias.name)


def test_every_name_that_a_plugin_imports_is_in_the_reference():
    page = section(GENERATED["reference/contract.md"], "## What else a plugin may import")
    found = set(imported_by_plugins())
    assert {("ktforge.contract.tensors", "BF16"), ("ktforge_plugins.quantize.integer", "IntegerQuantizer")} <= found
    for module, name in found:
        text = section(page, f"### {module}")
        says = re.search(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
        assert not name or (says and says[1]) or name in ktforge.__all__, f"{module}.{name} says nothing"


def test_the_packages_that_are_open_to_plugins_are_those_of_the_house():
    text = (DOCS / "architecture.md").read_text()
    (said,) = re.findall(r"They import (.*?), and nothing from planning upward", text)
    assert set(re.findall(r"`(\w+)`", said)) == {"ktforge", "testing", *generate.PACKAGES}


def test_every_builtin_stage_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [e.cls.name for e in BUILTIN if f"`{e.cls.name}`" not in readme] == []


def pages(nav):
    for item in nav:
        (value,) = item.values()
        yield from pages(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation():
    config = YAML().load(ROOT / "mkdocs.yml")  # not the safe loader: one value is a Python name
    listed = list(pages(config["nav"]))
    assert sorted(listed) == sorted([*WRITTEN, *GENERATED])


FOLDERS = ("benchmarks", "docs", "ktforge", "native", "plugins", "requirements", "tests")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    """In the repository as on the site, where a page's links stay among the pages."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?![^)]*://)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        there = Path(os.path.normpath(path.parent / target)) if target else path
        made = GENERATED.get(there.relative_to(DOCS).as_posix()) if there.is_relative_to(DOCS) else None
        assert there.exists() or made, target
        assert there.is_relative_to(DOCS) or not path.is_relative_to(DOCS), f"{target} is not on the site"
        if anchor:
            assert anchor in anchors(made or there.read_text()), f"{target}#{anchor}"


def anchors(page):
    """Those of a page's headings that are the same on the site and on GitHub, which keeps one - for each blank."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {slug.replace(" ", "-") for slug in slugs} & {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", [page for page in WRITTEN if "```sh" in (DOCS / page).read_text()])
def test_commands_on_the_pages_exist(page):
    for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for words in ([*shlex.split(part, comments=True)] for part in line.split("|")):
                if "ktforge" in words:
                    check(words[words.index("ktforge") + 1 :])


def check(words):
    name, *rest = words
    options = {o for p in COMMANDS[name].params for o in p.opts}
    assert [w for w in rest if w.startswith("--") and w.split("=")[0] not in options] == [], words


@pytest.mark.parametrize(
    "folder", ["ktforge", "native", *(f"plugins/ktforge_plugins/{s}" for s in
               ("loaders", "preprocess", "quantize", "layouts", "writers"))],
)  # fmt: skip
def test_a_readme_says_how_to_add_one_more(folder):
    text = (ROOT / folder / "README.md").read_text()
    assert "To add" in text or "## A kernel" in text
    for file in re.findall(r"`([\w/]+\.(?:py|c|h|md|toml))`", text):
        if not file.split("/")[-1].startswith("name."):
            bases = (ROOT, ROOT / "plugins", ROOT / folder)
            assert any((base / file).exists() for base in bases) or [*(ROOT / folder).rglob(file)], file


def test_the_plugin_page_includes_the_examples_themselves():
    page = (DOCS / "write-a-plugin.md").read_text()
    included = re.findall(r'^ *--8<-- "(.*)"$', page, re.MULTILINE)
    whole = [f"tests/example_plugin/{f}" for f in FILES if f != "README.md"]
    modules = [f"tests/example_plugins/{kind}/ktforge_example.py" for kind in KINDS]
    assert sorted(included) == sorted([*whole, *modules])
    assert all((ROOT / path).is_file() for path in included)
    assert [f"`{kind}`" in page and f"`--kind {kind}`" in page for kind in KINDS] == [True] * len(KINDS)


def test_the_plugin_page_names_every_check_and_every_method_of_all_stages():
    page = (DOCS / "write-a-plugin.md").read_text()
    assert [name for name in testing.__all__ if name != "dequantised" and f"`{name}" not in page] == []
    assert [n for n, m in vars(Stage).items() if inspect.isfunction(m) and n[0] != "_" and f"`{n}(" not in page] == []


TESTS = Path(__file__).parent


def test_the_tests_that_reliability_names_are_there():
    page = (TESTS.parent / "docs/reliability.md").read_text()
    named = re.findall(r"`((?:\w+/)?test_\w+\.py)(?:::…?(\w+))?", page)
    assert len(named) > 30
    for file, function in named:
        path = TESTS / (file if "/" in file else f"reliability/{file}")
        assert path.is_file(), file
        assert f"{function}" in path.read_text(), f"{file}::{function}"
