"""Ctrl-C, pressed in a terminal, once and twice, in each phase of a run: exit 130, and the next run goes on."""

import os
import pty
import signal
import subprocess
import sys
import time
import traceback

import pytest
from conversions import model, tree

from ktforge.__main__ import main
from ktforge.disk import writing
from ktforge.output.folder import is_unfinished
from ktforge.planning import plan
from ktforge.running import execute

#: What is slow in each phase: module, function, and how often it is called before the key is pressed.
PHASES = {
    "planning": (plan, "read_source", 0),
    "running": (execute, "_run_unit", 3),
    "publishing": (writing, "rename", 1),
}
ASKED = b"stopping when the units in flight are written; Ctrl-C again to stop at once"
STOPPED = b"stopped: the same command goes on behind what this one has saved"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("interrupt") / "model", 1, 6, 128, 128)


@pytest.fixture(scope="module")
def wanted(source):
    return finished(source, source.parent / "wanted")


def in_terminal(work):
    """Runs ``work`` in a process with a terminal of its own; returns its number and the other end."""
    child, terminal = pty.fork()
    if child == 0:
        status = 99
        try:
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)  # not pytest's
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child, terminal


def wait_for(terminal, text=None):
    """What the process shows until ``text``, or until it ends."""
    shown = b""
    while text is None or text not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux says EIO when nobody has the other end any more
            break
    return shown


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c(source, wanted, out, phase, twice):
    module, name, calls = PHASES[phase]
    really, count = getattr(module, name), iter(range(calls))

    def interrupted():
        def slow(*arguments):
            if next(count, None) is None:
                try:
                    print("slow", flush=True)
                    time.sleep(1 if phase == "running" and not twice else 60)
                except KeyboardInterrupt:
                    if not twice:
                        raise
                    time.sleep(60)  # such as a disk that takes its time
            return really(*arguments)

        setattr(module, name, slow)
        command(source, out)

    child, terminal = in_terminal(interrupted)
    try:
        shown = wait_for(terminal, b"slow")
        assert b"slow" in shown
        os.write(terminal, b"\x03")
        if twice:
            shown += wait_for(terminal, ASKED)
            os.write(terminal, b"\x03")
        shown += wait_for(terminal)
    finally:
        os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 130 and ASKED in shown and b"Traceback" not in shown, shown
    assert (STOPPED in shown) == twice
    began = phase != "planning"
    assert is_unfinished(out) == began
    assert (b"is unfinished: the same command goes on" in shown) == (began and not twice)
    assert shown.count(b"\x1b[?25l") <= shown.count(b"\x1b[?25h"), "the cursor is shown again"
    assert finished(source, out) == wanted


def test_ctrl_c_while_the_command_line_is_imported():
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from ktforge.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def finished(source, out):
    """The weights after an undisturbed run."""
    child, terminal = in_terminal(lambda: command(source, out))
    shown = wait_for(terminal)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0, shown
    return {n: h for n, h in tree(out).items() if n.endswith(".safetensors")}


def command(source, out):
    options = ["--input-path", source, "--output", out, "--quant-method", "int4", "--threadpool-count", "1"]
    sys.argv = ["ktforge", "convert", *map(str, options), "--workers", "1"]
    main()
