"""What an unfinished output was begun with: every part of its fingerprint is there, and a difference in any is told.

A checkout of ktforge is installed as editable, where the hash of its code stands for its version. Most users have
wheels, so here versions alone count.
"""

import errno
import importlib.metadata
import json
import shutil
from pathlib import Path

import checkpoints
import environments
import pytest
from conversions import convert, model, pipeline
from environments import call
from faults import Disk, fails
from ktforge_plugins import SafetensorsWriter

from ktforge import OutputError
from ktforge.disk.marks import JOURNAL, PARTIAL, UNFINISHED
from ktforge.output import provenance
from ktforge.output.folder import is_unfinished
from ktforge.output.resume import check_unchanged, fingerprint

EXAMPLE = Path(__file__).parents[1] / "example_plugin"


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return model(tmp_path / "model", 1, 2, 128, 128)


@pytest.fixture
def installed(monkeypatch):
    """As if ktforge had come in a wheel; versions by distribution, for a test to change."""
    versions: dict[str, str] = {}
    version = importlib.metadata.version
    monkeypatch.setattr(provenance, "_is_editable", lambda distribution: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or version(name))
    return versions


def unfinished(copy, out):
    """An output that lacks its last step alone."""
    with pytest.raises(OutputError, match="cannot be written"):
        convert(copy, out, Disk(lambda c: fails(errno.EIO)(c) if c.path.name == UNFINISHED else c.really()))
    assert is_unfinished(out)


def test_another_version_of_ktforge_is_refused(copy, out, installed):
    unfinished(copy, out)
    now = importlib.metadata.version("ktforge")
    installed["ktforge"] = "99.1"
    with pytest.raises(OutputError, match=rf"^the version of ktforge was {now} and is 99.1\nso the unfinished .*"):
        convert(copy, out, Disk())
    assert is_unfinished(out)
    del installed["ktforge"]
    convert(copy, out, Disk())
    assert not is_unfinished(out)


def test_no_code_is_hashed_that_a_version_stands_for(copy, out, installed):
    found = fingerprint(pipeline(copy, SafetensorsWriter(path=out)).plan())
    assert found["code"] == {}
    assert found["versions"] == {"ktforge": importlib.metadata.version("ktforge")}


def test_every_part_is_there_and_tells(copy, out):
    """Spelled out: what is taken out of the fingerprint is also taken out of a test that only walks through it."""
    found = fingerprint(pipeline(copy, SafetensorsWriter(path=out)).plan())
    assert found.keys() >= {
        "pipeline", "versions", "code", "formats", "methods", "config.json", "inputs", "source", "output files",
    }  # fmt: skip
    assert found["source"].keys() == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert all(of.keys() >= {"bytes", "mtime_ns", "header"} for of in found["source"].values())
    assert found["formats"] == ["kt-amx-int4/1"] and found["methods"] == ["absmax-int4/2"]
    assert "path" not in found["pipeline"]["loader"] and "path" not in found["pipeline"]["writer"]
    check_unchanged(out, found, json.loads(json.dumps(found)), "--restart")
    changed = list(with_one_change(found))
    assert len(changed) > 20
    for where, other in changed:
        for before, now in ((found, other), (other, found)):
            with pytest.raises(OutputError) as caught:
                check_unchanged(out, before, now, "--restart")
            first, last = caught.value.problems[0], caught.value.problems[-1]
            assert len(caught.value.problems) >= 2 and last.endswith("or start over with --restart"), where
            assert "changed" in first or " was " in first or " is " in first, where


def with_one_change(value, where=""):
    """Each thing in nested data made another, or taken out: where, and all of the data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(inner, dict) or not inner:
                yield (
                    f"{where}/{key} gone",
                    {k: v for k, v in value.items() if k != key} if inner else {**value, key: 1},
                )
            for place, changed in with_one_change(inner, f"{where}/{key}"):
                yield place, {**value, key: changed}
    elif isinstance(value, list):
        yield f"{where} longer", [*value, "more"]
        for i, inner in enumerate(value):
            for place, changed in with_one_change(inner, f"{where}/{i}"):
                yield place, [*value[:i], changed, *value[i + 1 :]]
    else:
        yield where, (not value) if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else 4711


@pytest.mark.parametrize("begun", ["formats", "methods", "versions", "code", "config.json", "output files"])
def test_a_journal_that_says_something_else_is_refused(copy, out, begun):
    unfinished(copy, out)
    path = out / PARTIAL / JOURNAL
    first, *rest = path.read_bytes().splitlines(keepends=True)
    record = json.loads(first)
    record["fingerprint"][begun] = "another"
    path.write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))
    with pytest.raises(OutputError, match=r"so the unfinished output in .* cannot go on"):
        convert(copy, out, Disk())


def test_a_plugin_in_a_wheel_is_known_by_its_version(tmp_path, copy, out):
    """Installed, upgraded and put back by pip, in an environment of its own."""
    environment = environments.create(tmp_path / "environment")
    source = shutil.copytree(EXAMPLE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    project = (source / "pyproject.toml").read_text()
    assert project.count('version = "0.1.0"') == 1
    environments.install(environment, source)
    name = checkpoints.expert_name(0, 1, "down")  # a damaged weight, at which every run stops
    data = checkpoints.load_output(copy)
    data[name] = data[name].copy()
    data[name][0, 0] = float("nan")
    checkpoints.write(copy, data, json.loads((copy / "config.json").read_text()), 2)
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"loader: {{use: auto, path: {copy}}}\nquantize: {{use: example, bits: 8}}\nlayout: {{use: example}}\n"
        f"writer: {{use: safetensors, path: {out}}}\n"
    )

    def said():
        done = call(environment, "-m", "ktforge", "run", file, check=False)
        assert done.returncode == 1
        return done.stderr

    assert f"{name} is NaN" in said() and is_unfinished(out)
    assert f"{name} is NaN" in said(), "which goes on"
    (source / "pyproject.toml").write_text(project.replace('version = "0.1.0"', 'version = "0.2.0"'))
    environments.install(environment, source)
    assert "error: the version of ktforge-example was 0.1.0 and is 0.2.0\n" in said()
    (source / "pyproject.toml").write_text(project)
    environments.install(environment, source)
    assert f"{name} is NaN" in said()
