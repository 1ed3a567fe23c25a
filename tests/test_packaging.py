"""What `python -m build` makes: a source distribution that is whole, and a wheel from it that runs on its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What is made, and would stand in for what a source distribution lacks.
MADE = shutil.ignore_patterns(
    ".*", "build", "dist", "site", "*.egg-info", "*.so", "__pycache__", "out", "npm", "assets"
)
BUILD = [sys.executable, "-m", "build", "--no-isolation"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packaging") / "ktforge"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=MADE)
    return folder


@pytest.fixture(scope="module")
def built(project):
    """The folder of the source distribution, and of the wheel that was built from it."""
    done = subprocess.run([*BUILD, "--outdir", project / "dist", project], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return project / "dist"


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """A fresh environment with the wheel alone, which sees the packages that this one has."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", *built.glob("*.whl")], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose own .pth files count for nothing
    return folder


def names(folder):
    """Every file below a folder, links followed, but for what Python made of it, and what is for developers alone."""
    found = {os.path.relpath(os.path.join(d, f), folder) for d, _, fs in os.walk(folder, followlinks=True) for f in fs}
    found = {name for name in found if name.startswith("data/") or not name.endswith(".md")}
    return {name for name in found if "__pycache__" not in name and not name.endswith(".so")}


def test_the_source_distribution_has_all_that_is_compiled_and_read(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    for part in ("native", "ktforge", "plugins/ktforge_plugins"):
        assert {f"{part}/{name}" for name in names(ROOT / part)} <= inside
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"} <= inside


def test_the_wheel_is_for_every_later_python_and_holds_what_is_needed(built):
    (wheel,) = built.glob("*.whl")
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("cp311", "abi3") and platform != "any"
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        (metadata,) = (n for n in inside if n.endswith("/METADATA"))
        said = Parser().parsestr(opened.read(metadata).decode())
        (license,) = (n for n in inside if n.endswith("/LICENSE"))
        assert opened.read(license) == (ROOT / "LICENSE").read_bytes()
    assert "ktforge/_native.abi3.so" in inside
    assert {f"ktforge/{name}" for name in names(ROOT / "ktforge")} <= inside
    assert {f"ktforge_plugins/{name}" for name in names(ROOT / "plugins" / "ktforge_plugins")} <= inside
    assert {"ktforge/py.typed", "ktforge_plugins/py.typed"} <= inside
    assert not {name for name in inside if name.startswith(("tests/", "native/", "benchmarks/", "demo/"))}
    assert said["License-Expression"] == "Apache-2.0" and "Typing :: Typed" in said.get_all("Classifier")


def test_the_demo_runs_from_the_wheel(environment, tmp_path):
    (tmp_path / "demo").mkdir()
    shutil.copy(ROOT / "demo" / "demo.py", tmp_path / "demo")
    python = environment / "bin" / "python"

    def run(*command):
        alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run([*command], capture_output=True, text=True, cwd=tmp_path, env=alone, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = (
        "import ktforge, ktforge_plugins, ktforge._native as n; print(ktforge.__file__, ktforge_plugins.__file__, n)"
    )
    assert run(python, "-c", where).count(str(environment)) == 3
    assert "All 16 experts are there, whole and in place." in run(python, tmp_path / "demo" / "demo.py")
    assert "in use" in run(environment / "bin" / "ktforge", "isa")
    run(environment / "bin" / "ktforge", "new-plugin", "mine", "--kind", "loader")
    assert (tmp_path / "ktforge-mine" / "pyproject.toml").is_file()


@pytest.mark.parametrize("command", ["pip", "build"])
def test_without_a_compiler_one_sentence_says_so(project, tmp_path, command):
    commands = {
        "pip": [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", tmp_path],
        "build": [*BUILD, "--wheel", "--outdir", tmp_path],
    }
    environment = {**os.environ, "CC": "no-such-compiler"}
    done = subprocess.run([*commands[command], project], capture_output=True, text=True, env=environment, check=False)
    said = (
        "error: ktforge is compiled with GCC or Clang, and no-such-compiler cannot be run (No such file or directory)"
    )
    assert done.returncode != 0 and said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
