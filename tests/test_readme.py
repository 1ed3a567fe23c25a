"""The README's Python example is run; docs name every stage, option, command and hook."""

import re
from pathlib import Path

import checkpoints
import pytest
from typer.main import get_command

from ktforge import Registry
from ktforge.cli import app

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def test_the_python_example_runs(source, tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Qwen3-30B-A3B").symlink_to(source)
    exec(compile(example, "README.md", "exec"), {})
    assert "blk.1.ffn_down_exps.3.numa.1.scale" in checkpoints.load_output(tmp_path / "Qwen3-30B-A3B-int4")


def test_the_yaml_example_is_what_print_pipeline_prints(capsys):
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"```sh\nktforge (convert .*?)\n```", text)
    (expected,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    app([*command.split(), "--print-pipeline"], standalone_mode=False)
    assert capsys.readouterr().out == expected


def test_every_stage_and_option_is_in_the_reference():
    for entry in Registry.installed().entries():
        if entry.distribution == "ktforge":
            assert f"`{entry.cls.name}`" in REFERENCE, entry.cls.name
            for option in entry.cls.model_fields:
                assert f"`{option}`" in REFERENCE, (entry.cls.name, option)


def test_every_command_and_option_is_in_the_reference():
    for name, command in get_command(app).commands.items():
        assert f"ktforge {name}" in REFERENCE
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert option in REFERENCE, (name, option)


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
