"""Every damage to an output is found by looking at it alone, in every layout; a right one never complains."""

import json
import shutil

import checkpoints
import judged
import numpy as np
import pytest
from checkpoints import EXPERTS, LAYERS
from judged import DAMAGES, LAYOUTS, can_befall, verify
from typer.testing import CliRunner

import ktforge
from ktforge.cli import app

CASES = [(damage, name) for damage in DAMAGES for name in LAYOUTS if can_befall(damage, name)]


@pytest.fixture(scope="module")
def outputs(source, tmp_path_factory):
    """Layout → an output in it, made once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = judged.convert(source, tmp_path_factory.mktemp("made") / "out", name)
        return made[name]

    return of


@pytest.fixture
def copied(outputs, source, tmp_path):
    def of(name):
        (tmp_path / "layout").write_text(name)
        (tmp_path / "source").symlink_to(source)
        return shutil.copytree(outputs(name), tmp_path / "out")

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_one_never_complains(outputs, name):
    found = verify(outputs(name))
    assert (found.problems, found.notes) == ((), ())
    checks = {check.name: check.looked_at for check in found.checks}
    assert f"{LAYERS * EXPERTS} experts in {LAYERS} layers" in checks["structure"]
    files = [p for p in outputs(name).rglob("*") if p.is_file()]
    assert checks["hashes"] == checks["files"] == f"{len(files) - 1:,} files"  # all but the manifest
    assert ("codes" in checks) == (name != "bf16")


@pytest.mark.parametrize(("damage", "name"), CASES)
def test_a_damage_is_found(copied, damage, name):
    out = copied(name)
    befall, finder = DAMAGES[damage]
    befall(out)
    found = verify(out)
    assert {check.name for check in found.checks if check.problems} & set(finder.split(" or ")), found.problems
    assert all(": " in problem for problem in found.problems), found.problems  # with a mend


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_is_looked_at(copied, name):
    """A bit of any published file, wherever it is."""
    out = copied(name)
    random = np.random.default_rng(0)
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != "ktforge_manifest.json"]
    for path in [paths[int(i)] for i in random.integers(0, len(paths), 6)] + [*out.glob("*.safetensors")]:
        content = path.read_bytes()
        path.write_bytes(judged.with_bit_flipped(content, int(random.integers(len(content)))))
        problems = verify(out).problems
        assert any(str(path) in p for p in problems), (path, problems)
        path.write_bytes(content)
    assert verify(out).ok


@pytest.mark.parametrize(
    ("value", "said"),
    [(np.nan, "that are NaN or infinite"), (-np.inf, "that are NaN or infinite"), (-0.01, "below zero"),
     (0.0, "of zero for codes that are not")],
)  # fmt: skip
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "bf16"])
def test_wrong_scales(copied, name, value, said):
    """Found in the scale itself, where no hash is to tell."""
    out = copied(name)
    scale = judged.first(out, judged.is_scale)
    dtype = checkpoints.BF16 if name in ("rawint4", "zero points", "int-quantized") else np.dtype(np.float32)
    judged.overwrite(scale, lambda content: np.array(value, dtype).tobytes() + content[dtype.itemsize :])
    judged.forget_hashes(out)
    found = verify(out)
    (check,) = [c for c in found.checks if c.problems]
    assert check.name == "scales" and f"has scales {said}: convert the original again" in check.problems[0]
    assert any("has no hashes" in note for note in found.notes)


@pytest.mark.parametrize(("name", "code"), [("kt-amx int4", -8), ("kt folder", -8), ("kt-amx int8", -128)])
def test_codes_that_the_engine_computes_wrongly(copied, name, code):
    out = copied(name)
    worst = 0x88 if code == -8 else 0x80
    judged.overwrite(judged.first(out, judged.is_code), lambda content: content[:-1] + bytes([worst]))
    judged.forget_hashes(out)
    found = verify(out)
    (check,) = [c for c in found.checks if c.problems]
    assert check.name == "codes"
    said = f"has codes of {code}, which kt-kernel up to 0.7.0 computes wrongly on AVX-512"
    assert said in check.problems[0]
    shown = CliRunner().invoke(app, ["inspect", str(out)])
    assert said in shown.stdout and "24 of 24 weights looked at" in shown.stdout, shown.output


def test_lowest_codes_where_only_some_readers_mind(source, tmp_path):
    from ktforge_plugins import CompressedTensors, Int4, SafetensorsLoader, SafetensorsWriter

    out = tmp_path / "out"
    ktforge.Pipeline(
        loader=SafetensorsLoader(path=source), quantize=Int4(group_size=32), layout=CompressedTensors(),
        writer=SafetensorsWriter(path=out),
    ).run()  # fmt: skip
    found = verify(out)
    said = "which RAWINT4 of kt-kernel up to 0.7.0 computes wrongly on AVX-512: serve it"
    assert found.ok and said in found.notes[0]
    (out / "ktforge_manifest.json").unlink()  # as of another program
    assert verify(out).ok and any(said in note for note in verify(out).notes)
    assert said in CliRunner().invoke(app, ["inspect", str(out)]).stdout


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_a_manifest(copied, name):
    out = copied(name)
    (out / "ktforge_manifest.json").unlink()
    found = verify(out)
    assert found.ok and "there is no ktforge_manifest.json" in found.notes[0]
    assert "hashes" not in {check.name for check in found.checks}


def test_what_lies_there_beside(copied):
    out = copied("rawint4")
    (out / "notes.txt").write_text("mine")
    assert verify(out).ok and "notes.txt" in verify(out).notes[0]
    (out / "old").mkdir()
    shutil.copy(next(out.glob("*.safetensors")), out / "old/model.safetensors")
    assert any("old/model.safetensors is not in the manifest" in p for p in verify(out).problems)


def test_an_unfinished_output(copied):
    out = copied("kt-amx int4")
    (out / "UNFINISHED.safetensors").write_text("This")
    assert any("holds an unfinished output: run the same command again" in p for p in verify(out).problems)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("files", "none", "lists files in a form that makes no sense"),
        ("files", [{"file": "../x", "bytes": 1, "xxh3_128": "00" * 16}], "lists files in a form that makes no sense"),
        ("files", [{"file": "x", "bytes": -1, "xxh3_128": "00" * 16}], "lists files in a form that makes no sense"),
        ("formats", ["kt-amx-int8/1"], "the tensors are kt-amx-int4/1, but it says kt-amx-int8/1"),
        ("numa_nodes", 4, "the tensors are for 1 NUMA nodes, but it says 4"),
        ("format", "ktforge-manifest/9", "its form is 'ktforge-manifest/9'"),
        ("experts", {"0": {}}, "config.json has experts in other layers than the manifest"),
        ("renamed", {"gone": "model.gone"}, "gone: the manifest knows of it, and it is not here"),
    ],
)
def test_a_manifest_of_something_else(copied, key, value, said):
    out = copied("kt-amx int4")
    path = out / "ktforge_manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert any(said in problem for problem in verify(out).problems), verify(out).problems


def run(*words):
    return CliRunner().invoke(app, ["verify", *map(str, words)])


def test_the_command(copied):
    out = copied("kt-amx int4, two nodes")
    shown = run(out)
    assert shown.exit_code == 0, shown.output
    lines = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert lines.keys() == {"files", "hashes", "manifest", "structure", "scales", "codes", "values"}
    assert all(line.startswith("good: ") for line in lines.values())
    assert run(out, "--cold", "--workers", "1").stdout == shown.stdout
    judged.a_bit_of_a_code(out)
    shown = run(out)
    assert shown.exit_code == 1 and "is not what was written (its hash is another): copy it again" in shown.stdout
    told = json.loads(run(out, "--json").stdout)
    assert not told["ok"] and [c["check"] for c in told["checks"] if not c["ok"]] == ["hashes"]


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ktforge.CheckpointError, match="nowhere is no folder: give the one"):
        ktforge.verify(tmp_path / "nowhere")


def test_a_source_is_looked_at_too(source):
    found = verify(source)
    assert found.ok and {check.name for check in found.checks} == {"files", "manifest", "structure", "values"}
