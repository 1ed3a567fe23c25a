"""Every command under whatever it may be started with: no traceback, the right exit code, a sentence of some length."""

import os
import re
import shutil
import sys
import tempfile
import threading
import traceback

import checkpoints
import pytest

from ktforge.__main__ import main
from ktforge.cli import COMMANDS

#: Command → what it is given, with the names of files below.
ARGUMENTS = {
    "run": "pipeline.yaml",
    "plan": "pipeline.yaml",
    "convert": "-i model -o out",
    "moe-to-bf16": "-i model -o out",
    "dequantize": "-i packed -o out",
    "inspect": "model",
    "init": "model",
    "compare": "model packed",
    "verify": "packed",
    "generate": "-m missing -p hello",
    "eval": "--original missing --converted missing",
    "calibrate": "--original missing --text missing -o out",
    "plugins": "",
    "new-plugin": "mine --output out",
    "schema": "",
    "isa": "",
}
#: Those that refuse what they are given here.
REFUSE = {"generate", "eval", "calibrate"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminals")
    checkpoints.write(folder / "model", checkpoints.tensors(), checkpoints.config())
    here = os.getcwd()
    os.chdir(folder)
    code, said = started(["convert", "-i", "model", "-o", "packed"])
    os.chdir(here)
    assert code == 0, said
    (folder / "pipeline.yaml").write_text(
        "version: 1\nloader: {use: auto, path: model}\npreprocess: [{use: moe-to-bf16}]\nquantize: {use: int4}\n"
        "layout: {use: kt-amx}\nwriter: {use: safetensors, path: out}\n"
    )
    return folder


@pytest.fixture(autouse=True)
def within(request):
    here = os.getcwd()
    if "place" in request.fixturenames:
        os.chdir(request.getfixturevalue("place"))
    yield
    os.chdir(here)
    if "place" in request.fixturenames:
        shutil.rmtree(request.getfixturevalue("place") / "out", ignore_errors=True)


def started(arguments, *, stdout=None, stderr=None, encoding="utf-8", before=lambda: None):
    """The exit code of a command in a process of its own, and all that it said. Its streams are those of a new
    interpreter: None is a file, "closed" none at all, any other the path of a file."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                for number, name, to in ((1, "stdout", stdout), (2, "stderr", stderr)):
                    if to == "closed":
                        os.close(number)
                        setattr(sys, name, None)
                        continue
                    opened = said.fileno() if to is None else os.open(to, os.O_WRONLY)
                    os.dup2(opened, number)
                    errors = "strict" if number == 1 else "backslashreplace"
                    setattr(sys, name, os.fdopen(number, "w", encoding=encoding, errors=errors, closefd=False))
                before()
                sys.argv = ["ktforge", *arguments]
                code = 0
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                os.write(said.fileno(), traceback.format_exc().encode("utf-8", "replace"))
                code = 71
            finally:
                for stream in (sys.stdout, sys.stderr):  # as the interpreter does at its end
                    try:
                        stream and stream.flush()
                    except (OSError, ValueError):
                        code = 120
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read().decode("utf-8", "replace")


def no_threads():
    def start(thread):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start


#: Name → how a command is started, and the exit code of one that refuses nothing and writes to standard output.
STARTS = {
    "stdout closed": ({"stdout": "closed"}, 1),
    "stderr closed": ({"stderr": "closed"}, 0),
    "both closed": ({"stdout": "closed", "stderr": "closed"}, 1),
    "stdout full": ({"stdout": "/dev/full"}, 1),
    "stderr full": ({"stderr": "/dev/full"}, 0),
    "ASCII": ({"encoding": "ascii"}, 0),
    "latin-1": ({"encoding": "latin-1"}, 0),
}


def test_every_command_is_here():
    assert ARGUMENTS.keys() == {module.NAME for module in COMMANDS}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("command", ARGUMENTS)
def test_streams(place, command, start):
    options, wanted = STARTS[start]
    code, said = started([command, *ARGUMENTS[command].split()], **options)
    assert code == (1 if command in REFUSE else wanted), said
    assert "Traceback" not in said and "did not expect" not in said and (code == 0 or len(said) < 20_000)
    if start == "stdout full" and command not in REFUSE:
        assert "the output of this command: No space left on device" in said
    if command in ("run", "convert"):  # what failed came behind it
        assert (place / "out" / "ktforge_manifest.json").exists()


@pytest.mark.parametrize("command", ARGUMENTS)
def test_threads_that_cannot_be_started(place, command):
    code, said = started([command, *ARGUMENTS[command].split()], before=no_threads)
    works = {"run", "convert", "moe-to-bf16", "dequantize", "compare", "verify"}
    assert code == int(command in REFUSE | works), said
    assert "Traceback" not in said and "did not expect" not in said
    assert ("no thread can be started" in said) == (command in works)


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_deleted_working_directory(place, command, tmp_path):
    def gone():
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    code, said = started([command, *ARGUMENTS[command].split()], before=gone)
    assert "Traceback" not in said and "did not expect" not in said, said
    if ARGUMENTS[command]:
        assert code in (1, 2) and re.search(
            r"current directory is gone|does not exist|No such file|is missing|is no folder", said
        )
    else:
        assert code == 0, said


@pytest.mark.parametrize("given", ["\x1b[31mred\x07", "\udcff\udc80", "x" * 300, "y/" * 3000, "\n\nerror: not so"])
@pytest.mark.parametrize("command", [c for c in ARGUMENTS if ARGUMENTS[c]])
def test_paths_that_would_steer_a_terminal(place, command, given):
    *options, _ = ARGUMENTS[command].split()
    code, said = started([command, *options, given], encoding="ascii")
    for made in (place / given, place / "out"):
        shutil.rmtree(os.fsencode(made), ignore_errors=True)
    assert "Traceback" not in said and "did not expect" not in said, said
    assert not set("\x1b\x07\udcff") & set(said) and len(said) < 20_000
    assert not any(line.startswith("error: not so") for line in said.splitlines())
    assert code in (0, 1, 2)


@pytest.mark.parametrize("command", [c for c in ARGUMENTS if "-o out" in ARGUMENTS[c] or "--output" in ARGUMENTS[c]])
def test_the_root_as_output(place, command):
    code, said = started([command, *ARGUMENTS[command].replace(" out", " /").split()])
    assert code in (1, 2) and "Traceback" not in said and "did not expect" not in said, said
    assert re.search(r"(^|\s|')/'?\s(holds|is |overlap|and the)|output / and|/ is|exists already|missing", said), said


@pytest.mark.parametrize("where", ["loader.path", "writer.path"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_nul_in_a_path(place, command, where):
    code, said = started([command, "pipeline.yaml", "--set", f'{where}="a\\0b"'])
    assert code == 1 and "Traceback" not in said and "did not expect" not in said, said
    assert "NUL" in said


def test_refusals_that_a_stranger_writes_are_bounded(place):
    name = "z" * 100_000
    (place / "odd.yaml").write_text(f"version: 1\nloader: {{use: {name}}}\nwriter: {{use: {name}}}\n{name}: 1\n")
    code, said = started(["plan", "odd.yaml"])
    assert code == 1 and len(said) < 20_000
