"""tests/example_plugin as a third party would use it: installed beside ktforge in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import checkpoints
import environments
import numpy as np
import pytest
from environments import call

from ktforge import ConfigError, OutputError
from ktforge.skeleton import FILES, write_skeleton

EXAMPLE = Path(__file__).parent / "example_plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that sees this one's packages, ktforge among them, and has the example installed."""
    folder = environments.create(tmp_path_factory.mktemp("environment"))
    source = shutil.copytree(EXAMPLE, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    environments.install(folder, source)
    assert next(folder.glob("lib/python*/site-packages/ktforge_example.py")).is_file()
    return folder


@pytest.fixture
def module(environment):
    """The installed module's file; put back when the test is over."""
    path = next(environment.glob("lib/python*/site-packages/ktforge_example.py"))
    text = path.read_text()
    yield path
    path.write_text(text)


@pytest.fixture
def pipeline(source, tmp_path):
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"loader: {{use: auto, path: {source}}}\nquantize: {{use: example, bits: 8}}\nlayout: {{use: example}}\n"
        f"writer: {{use: safetensors, path: {tmp_path}/out}}\n"
    )
    return path


def test_a_pipeline_runs_with_it(environment, pipeline, out):
    call(environment, "-m", "ktforge", "run", pipeline)
    made = checkpoints.load_output(out)
    for name, weight in checkpoints.tensors().items():
        if ".experts." in name:
            restored = made[f"{name}_codes"] * np.repeat(made[f"{name}_scales"], 32, axis=1)
            assert np.abs(restored - weight.astype(np.float32)).max() < 0.3 / 127
        else:
            assert made[name].tobytes() == weight.tobytes()


def test_its_own_tests_pass_there(environment):
    done = call(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "src/tests")
    assert re.search(r"\d+ passed", done.stdout)


def test_it_is_listed_and_can_be_turned_off(environment, pipeline):
    row = ["example", "layout", "ktforge-example", "0.1.0", "example"]
    assert row in [line.split() for line in call(environment, "-m", "ktforge", "plugins").stdout.splitlines()]
    listed = call(environment, "-m", "ktforge", "plugins", KTFORGE_BLOCK="loader-bin, example").stdout
    assert "kt-amx" in listed and "example" not in listed and "loader-bin" not in listed
    done = call(environment, "-m", "ktforge", "plan", pipeline, "--block", "example", check=False)
    assert "there is no layout called 'example'; installed: " in done.stderr and "blocked: example" in done.stderr
    done = call(environment, "-m", "ktforge", "plan", pipeline, "--block", "exmaple", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: there is no plugin exmaple (did you mean example?) to block; installed: example, layout-"
    )


OFF = "turn it off with --block example or KTFORGE_BLOCK=example"
OWNER = "plugin example of ktforge-example 0.1.0"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("import numpy", "import nunpy",
         f"{OWNER} cannot be imported (ModuleNotFoundError: No module named 'nunpy'): correct or uninstall it, "
         f"or {OFF}"),
        ("def ktforge_layouts", "def ktforge_exporters",
         f"{OWNER} is written for the hook ktforge_exporters, which this ktforge does not have: "
         f"update the one that is older, or {OFF}"),
        ('name: ClassVar[str] = "example"\n\n', 'name: ClassVar[str] = "kt-amx"\n\n',
         f"two plugins offer the layout 'kt-amx': {OWNER} and plugin layout-kt-amx of ktforge {version('ktforge')}: "
         "turn one off with --block example or --block layout-kt-amx"),
        ("        highest = ", "        raise KeyError(part.role)\n        highest = ",
         "plugin example (ktforge-example 0.1.0, quantize) failed on model.layers.N.mlp.experts.N: "
         "KeyError: 'gate.weight' (ktforge_example.py, line N)"),
        ("codes.reshape(rows, columns)", "codes",
         "plugin example (ktforge-example 0.1.0, quantize) delivered the codes of model.layers.N.mlp.experts.N gate 0 "
         "as int8 [512, 8, 32]; I8 [512, 256] was planned"),
        ("np.dtype(np.int8), part.shape)", "np.dtype(np.int8), (part.shape[0],))",
         "plugin example (ktforge-example 0.1.0, layout) failed on model.layers.N.mlp.experts.N: "
         "ValueError: could not broadcast input array from shape (512,256) into shape (512,) "
         "(ktforge_example.py, line N)"),
    ],
    ids=["import", "unknown hook", "collision", "raises", "wrong shape", "wrong size planned"],
)  # fmt: skip
def test_a_broken_one_is_named(environment, module, pipeline, out, old, new, line):
    text = module.read_text()
    assert old in text
    module.write_text(text.replace(old, new, 1))
    done = call(environment, "-m", "ktforge", "run", pipeline, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    # Two workers race for the first expert.
    assert re.sub(r"(line |layers\.|experts\.)\d+", r"\1N", done.stderr.splitlines()[-1]) == f"error: {line}"
    assert not (out / "model.safetensors").exists()


def test_help_needs_no_plugin(environment, module):
    module.write_text("raise RuntimeError\n")
    assert "new-plugin" in call(environment, "-m", "ktforge", "--help").stdout


def test_one_file_can_be_tried_without_installing_it(source, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text((EXAMPLE / "ktforge_example.py").read_text().replace('"example"', '"mine"'))
    shown = subprocess.run(
        [sys.executable, "-m", "ktforge", "plugins", "--plugin", file], capture_output=True, text=True
    )
    assert ["mine", "layout", "-", "-", str(file)] in [line.split() for line in shown.stdout.splitlines()], shown.stderr


def test_the_skeleton_is_the_example(tmp_path):
    shipped = {p.relative_to(EXAMPLE).as_posix() for p in EXAMPLE.rglob("*.*") if p.is_file() and p.suffix != ".pyc"}
    assert set(FILES) == shipped
    folder = write_skeleton("example", tmp_path / "same")
    assert {f: (folder / f).read_bytes() for f in FILES} == {f: (EXAMPLE / f).read_bytes() for f in FILES}


def test_a_new_plugin_passes_its_own_tests(tmp_path):
    subprocess.run([sys.executable, "-m", "ktforge", "new-plugin", "my-int3"], check=True, cwd=tmp_path)
    folder = tmp_path / "ktforge-my-int3"
    assert not [p for p in folder.rglob("*") if "xample" in p.name + (p.read_text() if p.is_file() else "")]
    points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["ktforge"]
    assert points == {"my-int3": "ktforge_my_int3"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["", "Int3", "my_int3", "-a", "a--b", "../x", "3a"])
def test_a_name_that_is_none(name, tmp_path):
    with pytest.raises(ConfigError, match="is no plugin name"):
        write_skeleton(name, tmp_path / "new")


def test_a_skeleton_replaces_nothing(tmp_path):
    write_skeleton("one", tmp_path / "new")
    with pytest.raises(OutputError, match="new exists already: choose another folder with --output"):
        write_skeleton("two", tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        write_skeleton("two", tmp_path / "file" / "new")
