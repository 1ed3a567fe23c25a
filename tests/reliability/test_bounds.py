"""The command on files from strangers, in a process that may take 20 s and 700 MB: one sentence, and exit 1."""

import json
import os
import resource
import sys
import traceback

import pytest
from conversions import model
from hostile import CONFIGS, HEADERS, header

from ktforge.__main__ import main
from ktforge.disk.marks import CONFIG

pytestmark = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="its addresses are without bound")

SECONDS, BYTES = 20, 700_000_000


def bounded(tmp_path, *words):
    """Exit code of the command and what it says on stderr."""
    said = tmp_path / "said"
    child = os.fork()
    if child == 0:
        status = 99
        try:
            sys.stderr = said.open("w")
            os.dup2(sys.stderr.fileno(), 2)
            with open("/proc/self/statm") as opened:
                most = int(opened.read().split()[0]) * resource.getpagesize() + BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            sys.argv = ["ktforge", *map(str, words)]
            main()
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()


GOOD = "loader: {use: safetensors, path: absent}\nwriter: {use: safetensors, path: out}\n"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
PIPELINES = {
    "billion laughs": (LAUGHS, "anchors and aliases (& and *) are not used"),
    "merged laughs": ("a: &a {x: 1}\nb: {<<: [*a, *a]}\n", "anchors and aliases"),
    "100 MB": ("#" * 100_000_000, "has over 100,000 bytes"),
    "tag that calls": ("loader: !!python/object/apply:os.system [touch called]\n", "tags (tag:yaml.org,2002:python/o"),
    "tag on a mapping": (GOOD.replace("{", "!!python/object:os.system {", 1), "tags (tag:yaml.org,2002:python/obj"),
    "deep lists": ("[" * 10_000, "nested more than 20 deep"),
    "deep mappings": ("{a: " * 10_000, "nested more than 20 deep"),
    "deep blocks": ("- " * 10_000, "nested more than 20 deep"),
    "deep keys": ("? " * 10_000, "nested more than 20 deep"),
    "long list": ("[" + "a, " * 5_000 + "]", "does not hold keys"),
    "unknown key": (GOOD + "bogus: 1\n", "pipeline.yaml:3: bogus: no such key"),
    "unknown option": (GOOD.replace("absent", "absent, io2: x"), "pipeline.yaml:1: loader.io2: no such option"),
    "many unknown keys": (GOOD + "".join(f"k{i}: 1\n" for i in range(500)), "and 480 more mistakes"),
    "key twice": (GOOD + "loader: 1\n", "pipeline.yaml:3: found duplicate key"),
    "key of 90 kB": (GOOD + f"? {'k' * 90_000}\n: 1\n", "pipeline.yaml:3: kkk"),
    "key that steers a terminal": (GOOD + '"\\e[2J\\n": 1\n', "pipeline.yaml:3: \\x1b[2J\\n: no such key"),
    "number of 90,000 digits": (GOOD + f"version: {'9' * 90_000}\n", "Exceeds the limit"),
    "size of 400 digits": (GOOD.replace("out", f"out, max_shard_size: {'9' * 400}GB"), "is not a size such as 5GB"),
    "path of 90 kB": (GOOD.replace("absent", f"[{'x' * 90_000}]"), "loader.path: must be a path, not"),
    "NUL": ("\0" * 100, "special characters are not allowed"),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_pipeline_files(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, message = PIPELINES[kind]
    (tmp_path / "pipeline.yaml").write_text(text)
    status, said = bounded(tmp_path, "run", "pipeline.yaml")
    assert status == 1, said[:300]
    lines = said.splitlines()
    assert message in said and all(line.startswith("error: ") and len(line) < 400 for line in lines), said[:300]
    assert len(lines) == (21 if kind == "many unknown keys" else 1)
    assert not (tmp_path / "called").exists()


def test_a_pipeline_without_an_end(tmp_path):
    status, said = bounded(tmp_path, "plan", "/dev/zero")
    assert status == 1 and "is not a file that has an end" in said


BROKEN = {
    "config of 100 MB": (CONFIG, CONFIGS["100 MB"]),
    "config of many lists": (CONFIG, b'{"num_experts": "x", "a": [%s[]]}' % (b"[]," * 3_300_000)),
    "config 10,000 deep": (CONFIG, CONFIGS["deep"]),
    "header of huge length": ("model-2.safetensors", HEADERS["huge length"]),
    "header 100,000 deep": ("model-2.safetensors", HEADERS["deep"]),
    "name of 10 MB": ("model-2.safetensors", HEADERS["name of 10 MB"]),
    "index of 90 MB": ("model.safetensors.index.json", b'{"weight_map": {"a": "%s"}}' % (b"x" * 90_000_000)),
    "index of many files": (
        "model.safetensors.index.json",
        b'{"weight_map": {%s"": ""}}' % b"".join(b'"%d":"%d",' % (i, i) for i in range(1_000_000)),
    ),
    "index of many tensors": (
        "model.safetensors.index.json",
        b'{"weight_map": {%s"": "model.safetensors"}}'
        % b"".join(b'"%d":"model.safetensors",' % i for i in range(500_000)),
    ),
}
FUSED = "model.layers.0.mlp.experts."
#: Tensors of no bytes, which may claim any shape.
EMPTY = {
    "a scale of 10^15 columns": {
        "gate_up_proj": [0, 256, 128], "gate_up_proj_scale": [0, 256, 10**15], "down_proj": [0, 128, 128]
    },
    "10^8 experts": {"gate_up_proj_blocks": [10**8, 256, 0], "down_proj_blocks": [10**8, 128, 0]},
    "10^8 experts in one tensor": {"gate_up_proj_blocks": [10**8, 256, 0], "down_proj_blocks": [1, 128, 0]},
}  # fmt: skip


@pytest.mark.parametrize("kind", EMPTY)
def test_fused_tensors_of_no_bytes(tmp_path, kind):
    folder = model(tmp_path / "model", 1, 1, 128, 128, shards=1)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "model_type": "gpt_oss"}))
    names = {f"{FUSED}{n}": shape for n, shape in EMPTY[kind].items()}
    entries = {
        n: {"dtype": "U8" if n.endswith("blocks") else "BF16", "shape": shape, "data_offsets": [0, 0]}
        for n, shape in names.items()
    }
    (folder / "model.safetensors").write_bytes(header(entries, 0))
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(
        f"loader: {{use: safetensors, path: {folder}}}\npreprocess: [{{use: split-experts}}]\n"
        f"writer: {{use: safetensors, path: {tmp_path / 'out'}}}\n"
    )
    status, said = bounded(tmp_path, "plan", pipeline)
    assert status == 1 and "config.json announces" in said and "plugin" not in said, said[:900]
    assert all(line.startswith("error: ") and len(line) < 600 for line in said.splitlines()), said[:900]


COMMANDS = [("convert", kind) for kind in BROKEN] + [
    (command, kind)
    for command in ("moe-to-bf16", "dequantize", "inspect")
    for kind in ("config 10,000 deep", "header of huge length")
]


@pytest.mark.parametrize(("command", "kind"), COMMANDS)
def test_checkpoints(tmp_path, kind, command):
    folder = model(tmp_path / "model", 1, 1, 128, 128, shards=1)
    name, content = BROKEN[kind]
    (folder / name).write_bytes(content)
    words = [folder] if command == "inspect" else ["--input-path", folder, "--output", tmp_path / "out"]
    status, said = bounded(tmp_path, command, *words, *(["--quant-method", "int4"] if command == "convert" else []))
    lines = said.splitlines()
    assert status == 1 and name.partition(".")[0] in said and not (tmp_path / "out").exists(), said[:300]
    assert len(lines) <= 21 and all(line.startswith("error: ") and len(line) < 600 for line in lines), said[:300]
