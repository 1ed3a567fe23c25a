"""Options that every command has, JSON, and upstream's own words."""

import json
import os
import subprocess
import sys

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from ktforge import Registry
from ktforge.cli import app


def ktforge(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ktforge", *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip


def said(done):
    """What stands on stderr but for the progress."""
    return [line for line in done.stderr.splitlines() if line.startswith(("error:", "warning:", "debug:", "info:"))]


@pytest.fixture
def pipeline(source, out, tmp_path):
    done = ktforge("convert", "-i", source, "-o", out, "--print-pipeline")
    (tmp_path / "pipeline.yaml").write_text(done.stdout)
    return tmp_path / "pipeline.yaml"


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], *([name] for name in get_command(app).commands)])
def test_help_has_a_short_form(command, flag):
    done = ktforge(*command, flag)
    assert done.returncode == 0 and done.stdout.startswith("Usage: ")


def test_upstreams_own_command_line(source, out):
    done = ktforge(
        "convert", "-i", source, "--input-type", "BF16", "-o", out, "--cpuinfer-threads", "60",
        "--threadpool-count", "2", "--gpu", "--resume-layer", "3", "--fp8-expert-batch", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.partition(" is not needed: ")[0] for line in said(done)] == [
        "warning: --resume-layer", "warning: --gpu", "warning: --fp8-expert-batch",
    ]  # fmt: skip
    manifest = json.loads((out / "ktforge_manifest.json").read_text())
    assert manifest["formats"] == ["kt-amx-int4/1"], "upstream's default"
    serve = done.stdout.splitlines()[-1]
    assert serve.startswith("serve it with: ") and serve.endswith(
        f"--model {source} --kt-weight-path {out} --kt-method AMXINT4 --kt-cpuinfer 60 --kt-threadpool-count 2"
    )


@pytest.mark.parametrize(
    ("method", "instead"), [("awq", "say --quant-method int4"), ("MOE_INT4", "say int4"), ("moe_int8", "say int8")]
)
def test_methods_of_upstreams_alone(source, out, method, instead):
    done = ktforge("convert", "-i", source, "-o", out, "--quant-method", method)
    assert done.returncode == 2 and f"ktforge has no --quant-method {method}: " in done.stderr
    assert instead in done.stderr and not out.exists()


def test_a_plugin_may_offer_a_method_of_upstreams(source, out, tmp_path):
    (tmp_path / "offers.py").write_text(
        "from ktforge import Preset, hookimpl\n\n\n@hookimpl\ndef ktforge_presets():\n"
        "    return [Preset('awq', {'use': 'int8'}, {'use': 'kt-amx'}, 'another AWQ')]\n"
    )
    more = ["--quant-method", "awq", "--plugin", tmp_path / "offers.py", "--print-pipeline"]
    done = ktforge("convert", "-i", source, "-o", out, *more)
    assert done.returncode == 0 and "use: int8" in done.stdout, done.stderr


def test_values_of_the_pipeline_can_be_set_on_convert(source, out):
    command = ["convert", "-i", source, "-o", out, "--print-pipeline"]
    done = ktforge(*command, "--set", "layout.non_experts=omit", "--set", "mtp=keep")
    printed = YAML(typ="safe").load(done.stdout)
    assert (
        json.loads(ktforge(*command, "--json", "--set", "layout.non_experts=omit", "--set", "mtp=keep").stdout)
        == printed
    )
    assert printed["layout"]["non_experts"] == "omit" and printed["mtp"] == "keep"
    done = ktforge(*command, "--set", "layuot.non_experts=omit")
    assert done.returncode == 1 and "(did you mean layout?)" in done.stderr


def test_dry_runs_write_nothing(source, out, pipeline):
    commands = [["convert", "-i", source, "-o", out], ["moe-to-bf16", "-i", source, "-o", out], ["run", pipeline]]
    for command in commands:
        done = ktforge(*command, "--dry-run")
        assert done.returncode == 0 and f"writes to    {out}" in done.stdout, done.stderr
        plan = json.loads(ktforge(*command, "--dry-run", "--json", "--workers", "3").stdout)
        assert plan["folder"] == str(out) and plan["workers"] == 3 and not out.exists()


def test_json_is_all_of_stdout(source, out, pipeline):
    first, second = (ktforge("run", pipeline, "--json") for _ in range(2))
    assert first.returncode == second.returncode == 0
    made, found = json.loads(first.stdout), json.loads(second.stdout)
    assert made["folder"] == found["folder"] == str(out)
    assert (made["already_done"], found["already_done"]) == (False, True)
    assert made["expert_units"] == 8 and made["formats"] == ["kt-amx-int4/1"] and "--kt-method" in made["serve"]
    listed = json.loads(ktforge("plugins", "--json").stdout)
    assert [(e["name"], e["stage"]) for e in listed] == [
        (e.cls.name, e.cls.stage) for e in Registry.installed().entries()
    ]
    refused = ktforge("run", pipeline, "--json", "--set", "quantize.use=int8")
    assert refused.returncode == 1 and refused.stdout == "" and said(refused) == refused.stderr.splitlines()[-1:]


def test_quiet_is_quiet(out, pipeline):
    done = ktforge("run", pipeline, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(ktforge("run", pipeline, "-q", "--json", "--overwrite").stdout)["folder"] == str(out)
    done = ktforge("run", pipeline, "-q", "--set", "layout.threadpool_count=3")
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert ktforge("run", pipeline, "-q", "-v").returncode == 2


def test_a_log_file_has_all_with_times(source, out, tmp_path):
    log = tmp_path / "ktforge.log"
    command = ["convert", "-i", source, "-o", out, "--log-file", log]
    assert said(ktforge(*command, "--gpu")) != [], "stderr has what it has without"
    wrong = ktforge(*command, "--overwrite", "--threadpool-count", "3")
    lines = log.read_text().splitlines()
    assert all(line[:2] == "20" for line in lines), "a line each, with its time"
    for needed in ("ktforge convert -i", "WARNING ktforge: --gpu", "INFO ktforge.output", "ERROR ktforge: "):
        assert [line for line in lines if needed in line], needed
    assert lines[-1].endswith(wrong.stderr.splitlines()[-1].removeprefix("error: "))
    done = ktforge("isa", "--log-file", tmp_path / "no" / "such" / "folder")
    assert done.returncode == 1 and "cannot be written: No such file or directory" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_log_file_that_cannot_be_written_is_one_warning(source, out):
    done = ktforge("convert", "-i", source, "-o", out, "--log-file", "/dev/full")
    assert done.returncode == 0 and (out / "config.json").is_file()
    assert said(done) == ["warning: the log file /dev/full ends here, as it cannot be written: No space left on device"]
    assert "Traceback" not in done.stderr


def test_init_writes_a_file_that_can_be_planned(source, tmp_path):
    printed = ktforge("init", source).stdout
    file = tmp_path / "p.yaml"
    done = ktforge("init", source, "-o", file)
    assert done.returncode == 0 and file.read_text() == printed and str(file) in done.stdout
    assert ktforge("plan", file).returncode == 0
    done = ktforge("init", source, "--output", file)
    assert done.returncode == 1 and f"{file} exists already" in done.stderr and file.read_text() == printed
    done = ktforge("init", source, "--output", tmp_path / "no" / "p.yaml")
    assert done.returncode == 1 and "cannot be written: No such file or directory" in done.stderr


def test_the_shell_completes_commands_and_options():
    def complete(words, count):
        environment = {"_KTFORGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        script = "import sys; sys.argv[0] = 'ktforge'; from ktforge.__main__ import main; main()"
        called = [sys.executable, "-c", script]
        done = subprocess.run(called, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        return done.stdout.split()

    assert complete("ktforge con", 1) == ["convert"]
    assert complete("ktforge convert --threadp", 2) == ["--threadpool-count"]
    assert complete("ktforge convert --input-type fp", 3) == ["fp16", "fp8"]
