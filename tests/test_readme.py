"""The README's examples are run."""

import re
from pathlib import Path

import checkpoints

from ktforge.cli import app

ROOT = Path(__file__).parents[1]


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
