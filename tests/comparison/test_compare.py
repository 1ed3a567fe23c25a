"""A right conversion never complains, in any layout; a wrong one is called by its name."""

import json
from pathlib import Path

import checkpoints
import judged
import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, LAYERS, SIZE, expert_name
from judged import DAMAGES, LAYOUTS, can_befall, compare, convert
from typer.testing import CliRunner

import ktforge
from ktforge import ConfigError
from ktforge.cli import app

#: Relative errors of normally distributed weights: none, 8 bits, 4 bits.
ERRORS = {"bf16": (0, 0), "int8": (0.001, 0.02), "int4": (0.05, 0.2)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_one_never_complains(source, out, name):
    found = compare(source, convert(source, out, name))
    assert (found.problems, found.notes) == ((), ())
    assert len(found.experts) == 3 * LAYERS * EXPERTS and len(found.others) == len(checkpoints.tensors()) - len(
        found.experts
    )
    quantizer = LAYOUTS[name][0]
    least, most = ERRORS[quantizer.name if quantizer else "bf16"]
    assert all(least <= t.measures.relative_error <= most for t in found.experts)
    assert all(t.measures.square == 0 for t in found.others)
    assert (found.codes is None) == (quantizer is None)
    if found.codes:
        assert found.codes.codes == 3 * LAYERS * EXPERTS * SIZE * HIDDEN
        assert found.codes.not_finite == found.codes.negative == found.codes.lost == 0


@pytest.mark.parametrize("name", ["kt-amx int4, two nodes", "rawint4"])
def test_the_measures_are_those_of_what_dequantize_makes(source, tmp_path, name):
    packed, back = convert(source, tmp_path / "packed", name), tmp_path / "back"
    done = CliRunner().invoke(app, ["dequantize", "--input-path", str(packed), "--output", str(back)])
    assert done.exit_code == 0, done.output
    made, data = checkpoints.load_output(back), checkpoints.tensors()
    for tensor in ktforge.compare(source, packed).experts:
        x, y = (a[tensor.name].astype(np.float64).ravel() for a in (data, made))
        assert tensor.measures.relative_error == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-9)
        assert (tensor.layer, tensor.expert) == tuple(int(p) for p in tensor.name.split(".") if p.isdigit())


def changed(**weights):
    data = checkpoints.tensors()
    return {**data, **weights}


def mixed_up(kind):
    """The model's tensors with a mix-up in its first layer, and what is said of it."""
    data, layer = checkpoints.tensors(), 0
    gate, up, down = (expert_name(layer, 1, p) for p in ("gate", "up", "down"))
    if kind == "swapped":
        return {**data, gate: data[up], up: data[gate]}, "gate.weight is found as up of"
    if kind == "shifted experts":
        shifted = {
            expert_name(0, e, p): data[expert_name(0, (e + 1) % EXPERTS, p)]
            for e in range(EXPERTS)
            for p in ("gate", "up", "down")
        }
        return {**data, **shifted}, "is found at expert 3 of"
    if kind == "exchanged layers":
        mixed = {
            expert_name(la, e, p): data[expert_name(1 - la, e, p)]
            for la in (0, 1)
            for e in range(EXPERTS)
            for p in ("gate", "up", "down")
        }
        return {**data, **mixed}, "is found in layer 1 of"
    if kind == "nodes exchanged":
        return {**data, down: np.roll(data[down], SIZE // 2, 1)}, "has the parts of its NUMA nodes exchanged"
    if kind == "another checkpoint":
        return {n: a for n, a in checkpoints.tensors(1).items()}, "has nothing in common with the original's"
    raise AssertionError(kind)


KINDS = ["swapped", "shifted experts", "exchanged layers", "nodes exchanged", "another checkpoint"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mix_up_is_called_by_its_name(source, out, name, kind):
    if kind == "nodes exchanged" and name not in ("kt folder", "kt-amx int4, two nodes"):
        pytest.skip("there are no nodes in this layout")
    data, said = mixed_up(kind)
    found = compare(source, convert(source, out, name, data))
    assert any(said in problem for problem in found.problems), found.problems


def test_transposed_weights_are_called_that(tmp_path):
    data = {n: a[:HIDDEN, :HIDDEN].copy() if ".experts." in n else a for n, a in checkpoints.tensors().items()}
    model = checkpoints.config(moe_intermediate_size=HIDDEN)
    name = expert_name(1, 2, "up")
    one = checkpoints.write(tmp_path / "one", data, model)
    other = checkpoints.write(tmp_path / "other", {**data, name: np.ascontiguousarray(data[name].T)}, model)
    (problem,) = ktforge.compare(one, other).problems
    assert problem.startswith(f"{name}: up.weight is transposed: convert it again")


def edited(out, change):
    """Changes the tensors of an output in place."""
    data = checkpoints.load_output(out)
    change(data)
    index = out / "model.safetensors.index.json"
    if index.exists():
        weight_map = {n: f for n, f in json.loads(index.read_text())["weight_map"].items() if n in data}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file in out.glob("*.safetensors"):
        own = checkpoints.load_file(file).keys()
        checkpoints.save_file({n: data[n] for n in data if n in own}, file)


@pytest.mark.parametrize(
    ("value", "said"),
    [(np.nan, "NaN or infin"), (np.inf, "NaN or infin"), (-0.01, "has scales below zero"),
     (0.0, "has scales of zero for codes that are not")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["kt-amx int4, two nodes", "kt-amx int8", "rawint4"])
def test_wrong_scales(source, out, name, value, said):
    convert(source, out, name)

    def change(data):
        scale = next(n for n in sorted(data) if (n.endswith("scale") and "exps" in n) or n.endswith("weight_scale"))
        data[scale] = data[scale].copy()
        data[scale].reshape(-1)[3] = value

    edited(out, change)
    problems = ktforge.compare(source, out).problems
    assert any(said in p for p in problems), problems


def test_what_is_missing(source, out):
    convert(source, out, "kt-amx int4")
    edited(out, lambda data: [data.pop(n) for n in list(data) if n == "norm.weight"])
    (out / "tokenizer.json").write_text("{}")
    (out / "generation_config.json").unlink(missing_ok=True)
    problems = ktforge.compare(source, out).problems
    assert any(p.startswith("model.norm.weight: missing from") for p in problems), problems
    assert any(p.startswith("tokenizer.json differs between") for p in problems), problems


def test_a_missing_expert(source, out):
    convert(source, out, "kt-amx int4")
    edited(out, lambda data: [data.pop(n) for n in list(data) if ".ffn_up_exps.3." in n and n.startswith("blk.1.")])
    problems = ktforge.compare(source, out).problems
    assert any("blk.1.ffn_up_exps.3.numa.0.weight is missing from" in problem for problem in problems), problems


CASES = [(damage, name) for damage in DAMAGES for name in LAYOUTS if can_befall(damage, name)]


@pytest.mark.parametrize(("damage", "name"), CASES)
def test_what_befell_an_output_is_found(source, out, damage, name):
    """By what it is alone, without another word for it here."""
    (out.parent / "layout").write_text(name)
    (out.parent / "source").symlink_to(source)
    DAMAGES[damage][0](convert(source, out, name))
    alone = judged.verify(out).problems
    assert alone and {f"{out}: {problem}" for problem in alone} <= set(compare(source, out).problems)


def test_another_model(source, tmp_path):
    data = {n: a for n, a in checkpoints.tensors().items() if ".layers.1." not in n}
    other = checkpoints.write(tmp_path / "other", data, checkpoints.config(num_hidden_layers=1))
    problems = ktforge.compare(source, other).problems
    assert "the two are different models: layers 2 and 1" in problems
    assert any("missing from" in p and "more)" in p for p in problems)


def test_a_sample_is_spread_and_always_the_same(source, out):
    convert(source, out, "kt-amx int4")
    first, again = (ktforge.compare(source, out, sample=0.5) for _ in range(2))
    assert first.experts == again.experts and first.sample == 0.5
    assert {(t.layer, t.expert) for t in first.experts} == {(la, e) for la in range(LAYERS) for e in (0, 2)}
    assert len(first.experts) == 3 * LAYERS * 2
    little = ktforge.compare(source, out, sample=0.01)
    assert {t.layer for t in little.experts} == set(range(LAYERS)) and len(little.experts) == 3 * LAYERS
    whole = {t.name: t.measures for t in ktforge.compare(source, out).experts}
    assert all(whole[t.name] == t.measures for t in first.experts)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="a sample is a fraction of all tensors"):
            ktforge.compare(source, out, sample=wrong)


def test_equal_outputs_are_equal_byte_for_byte(source, tmp_path):
    one, other = (convert(source, tmp_path / n, "kt-amx int4") for n in ("one", "other"))
    assert ktforge.compare(one, other).identical
    edited(
        other,
        lambda data: data.update(
            {n: a * np.float32(1.1) for n, a in data.items() if n.endswith("ffn_up_exps.0.numa.0.scale")}
        ),
    )
    judged.forget_hashes(other)
    found = ktforge.compare(one, other)
    assert not found.identical and found.ok and sum(t.measures.square > 0 for t in found.experts) == LAYERS


def test_fused_experts_against_single_ones(source, tmp_path):
    data = checkpoints.fuse(checkpoints.tensors())
    fused = checkpoints.write(tmp_path / "fused", data, checkpoints.config(model_type="qwen3_vl_moe_text"))
    for pair in ((source, fused), (fused, source)):
        found = ktforge.compare(*pair)
        assert found.ok and len(found.experts) == 3 * LAYERS * EXPERTS
        assert not any(t.measures.square for t in found.experts)


def run(*words):
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def test_the_command(source, out):
    convert(source, out, "kt-amx int4")
    shown = run("--original", source, "--converted", out)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == run(source, out).stdout
    lines = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert lines["experts"] == f"{LAYERS * EXPERTS} experts in {LAYERS} layers"
    assert lines["gate"].startswith("relative error 0.1") and "SQNR 1" in lines["down"]
    assert run(source, out, "--max-error", "0.5").exit_code == 0
    refused = run(source, out, "--max-error", "0.01")
    assert refused.exit_code == 1 and "is further than 0.01 from the original (relative error)" in refused.stdout
    as_json = json.loads(run(source, out, "--json", "--sample", "50%").stdout)
    assert as_json["ok"] and as_json["sample"] == 0.5 and len(as_json["experts"]) == 3 * LAYERS * 2
    assert as_json["experts"][0].keys() >= {"relative_error", "sqnr", "cosine", "layer", "expert", "ends", "zero"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one"], "give two folders"),
        (["a", "b", "--original", "c"], "give two folders"),
        (["a", "b", "--sample", "many"], "--sample many: write it as 5%"),
        (["a", "b", "--sample", "0%"], "--sample 0%: write it as 5%"),
    ],
)
def test_words_that_make_no_sense(words, said):
    shown = run(*words)
    assert shown.exit_code == 2 and said in shown.output


def test_a_folder_that_is_none(source, tmp_path):
    shown = run(source, tmp_path / "nowhere")
    assert isinstance(shown.exception, ktforge.CheckpointError) and "nowhere" in str(shown.exception)


def test_a_third_partys_layout_is_compared(source, out):
    plugin = str(Path(__file__).parents[1] / "example_plugins/layout/ktforge_example.py")
    words = ["--input-path", str(source), "--output", str(out), "--quant-method", "example", "--plugin", plugin]
    done = CliRunner().invoke(app, ["convert", *words])
    assert done.exit_code == 0, done.output
    shown = run(source, out, "--plugin", plugin)
    assert shown.exit_code == 0 and "relative error 0.0" in shown.stdout and "codes " in shown.stdout, shown.output


def test_plain_data_has_every_number_that_is_one(source, out):
    found = compare(source, convert(source, out, next(iter(LAYOUTS))))
    rows = found.to_dict()["experts"]
    assert rows and all(row["relative_error"] > 0 and row["cosine"] > 0.9 for row in rows)
    same = ktforge.compare(source, source).to_dict()["experts"]
    assert all(row["relative_error"] == 0 and row["sqnr"] is None for row in same)
    json.dumps(rows, allow_nan=False)
