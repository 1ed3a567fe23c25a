"""Scales of INT4 that are searched, with and without what is known of the inputs."""

import json

import checkpoints
import numpy as np
import pytest
import reference
from checkpoints import EXPERTS, HIDDEN, LAYERS, SIZE
from ktforge_plugins import CompressedTensors, Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.quantize.int4 import CALIBRATED, SEARCHED
from pydantic import ValidationError
from typer.testing import CliRunner

from ktforge import OutputError, Pipeline, PlanError, PluginError, Quantizer, QuantPart, QuantSpec, QuantUnit, Unit
from ktforge.calibration import LayerStatistics, open_calibration, write_calibration
from ktforge.cli import app
from ktforge.contract.tensors import BF16
from ktforge.testing import check_quantizer, expert


def statistics(seed):
    random = np.random.default_rng(seed)
    tokens = np.array([3, 0, 4000, 100])[:EXPERTS]
    return LayerStatistics(
        tokens, random.random((EXPERTS, HIDDEN), np.float32) ** 4, random.random((EXPERTS, SIZE), np.float32) ** 4
    )


@pytest.fixture
def calibration(tmp_path):
    path = tmp_path / "calibration.safetensors"
    write_calibration(path, {layer: statistics(layer) for layer in range(LAYERS)}, {"activation": "silu"})
    return path


def unit():
    found = expert((SIZE, HIDDEN))
    return Unit(found.spec._replace(layer=1, expert=2), found.tensors)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scales", ["searched", "calibrated"])
def test_rows_are_what_numpy_says(isa, calibration, scales, parts):
    quantizer = Int4(scales=scales, calibration=calibration if scales == "calibrated" else None)
    one = unit()
    made = quantizer.quantize(one, quantizer.plan(one.spec, KtAmx(threadpool_count=parts).demand(one.spec)))
    assert made.spec.method == f"{scales}-int4/1"
    known = open_calibration(calibration)
    for part, found in zip(made.spec.parts, made.parts, strict=True):
        weights, factors = None, SEARCHED
        if scales == "calibrated":
            squares = known.mean_squares(one.spec, part.projection)
            weights, factors = (squares / squares.max())[slice(*part.cols)], CALIBRATED
        rows = slice(0, 3)
        weight = np.ascontiguousarray(part.of(one.tensors[part.role])[rows])
        codes, scale = reference.search(weight, 4, weight.shape[1], factors, weights, 16, False)
        assert np.array_equal(found.codes[rows], codes) and np.array_equal(found.scales[rows], scale)


@pytest.mark.parametrize("scales", ["searched", "calibrated"])
def test_groups_are_what_numpy_says(isa, calibration, scales):
    quantizer = Int4(
        scales=scales, calibration=calibration if scales == "calibrated" else None, group_size=32, narrow_range=True
    )
    one = unit()
    made = quantizer.quantize(one, quantizer.plan(one.spec, CompressedTensors().demand(one.spec)))
    part, found = made.spec.parts[2], made.parts[2]
    assert part.projection == "down" and found.scales.dtype == BF16
    squares = open_calibration(calibration).mean_squares(one.spec, "down")
    weights = squares / squares.max() if scales == "calibrated" else None
    factors = CALIBRATED if scales == "calibrated" else SEARCHED
    codes, scale = reference.search(one.tensors[part.role][:2], 4, 32, factors, weights, 1, True)
    assert np.array_equal(found.codes[:2], codes) and np.array_equal(found.scales[:2].astype(np.float32), scale)


@pytest.mark.parametrize("scales", ["searched", "calibrated"])
@pytest.mark.parametrize("layout", [KtAmx(threadpool_count=2), CompressedTensors()], ids=["kt-amx", "groups"])
def test_the_contract(calibration, scales, layout):
    known = {"calibration": calibration} if scales == "calibrated" else {}
    if layout.name != "kt-amx":
        known["group_size"] = 32
    check_quantizer(Int4(scales=scales, **known), layout, unit())


def test_what_auto_stands_for(calibration):
    assert Int4().rule == "absmax"
    assert Int4(scales="auto").rule == "searched"
    assert Int4(scales="auto", group_size=32).rule == "absmax"
    assert Int4(scales="auto", symmetric=False).rule == "absmax"
    assert Int4(scales="auto", calibration=calibration).rule == "calibrated"


def test_options_that_contradict_each_other(calibration):
    with pytest.raises(ValidationError, match="needs a calibration"):
        Int4(scales="calibrated")
    with pytest.raises(ValidationError, match="looks at no calibration"):
        Int4(scales="searched", calibration=calibration)


def convert(source, out, **options):
    layout = options.pop("layout", KtAmx(threadpool_count=1))
    return Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=Int4(**options), layout=layout,
        writer=SafetensorsWriter(path=out),
    )  # fmt: skip


def test_another_models_calibration_is_refused_while_planning(source, out, tmp_path):
    short = tmp_path / "short.safetensors"
    write_calibration(short, {0: statistics(0)}, {})
    with pytest.raises(PlanError, match=r"layers.1.mlp.experts.0 \(and 3 more\): .*knows nothing of layer 1"):
        convert(source, out, scales="calibrated", calibration=short).run()
    with pytest.raises(PlanError, match="is for symmetric codes"):
        convert(source, out, scales="searched", symmetric=False, layout=CompressedTensors()).run()


def test_the_calibration_counts(source, out, calibration, tmp_path):
    """Its content is in the manifest, and an output that was begun with another does not go on."""
    pipeline = convert(source, out, scales="calibrated", calibration=calibration)

    class Stop(Exception):
        pass

    def stop(*_, **__):
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PluginError, match="Stop"):
        patch.setattr("ktforge.output.folder.publish", stop)
        pipeline.run()
    before = calibration.read_bytes()
    write_calibration(calibration, {layer: statistics(9) for layer in range(LAYERS)}, {"activation": "silu"})
    with pytest.raises(OutputError, match="calibration"):
        convert(source, out, scales="calibrated", calibration=calibration).run()
    calibration.write_bytes(before)
    convert(source, out, scales="calibrated", calibration=calibration).run()
    assert "calibration.safetensors" in json.dumps(json.loads((out / "ktforge_manifest.json").read_text()))


class Doubtful(Quantizer):
    """Somebody else's: what is known of the inputs decides its scales, too."""

    name = "doubtful"
    calibration: str

    def input_files(self):
        return (self.calibration,)

    def plan(self, unit, demand):
        open_calibration(self.calibration).check(unit)
        return QuantSpec(unit, demand.parts, 4, "doubtful/1", None, True, demand.scale_dtype, demand.scale_bits)

    def quantize(self, unit, spec):
        known, parts = open_calibration(self.calibration), []
        for part in spec.parts:
            scale = known.mean_squares(unit.spec, part.projection).max()
            codes = np.zeros(part.shape, np.int8)
            parts.append(QuantPart(codes, np.full((part.shape[0], 1), scale, spec.scale_dtype)))
        return QuantUnit(spec, tuple(parts))


def test_a_third_partys_quantizer_gets_the_same(source, out, calibration):
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()],
        quantize=Doubtful(calibration=str(calibration)), layout=KtAmx(threadpool_count=1),
        writer=SafetensorsWriter(path=out),
    ).run()  # fmt: skip
    known = open_calibration(calibration)
    made = checkpoints.load_output(out)
    for layer in range(LAYERS):
        one = unit().spec._replace(layer=layer, expert=3)
        assert made[f"blk.{layer}.ffn_down_exps.3.numa.0.scale"][0] == known.mean_squares(one, "down").max()


def test_the_command(source, out, calibration):
    words = ["convert", "-i", str(source), "-o", str(out), "--threadpool-count", "1"]
    said = CliRunner().invoke(app, [*words, "--calibration", str(calibration)])
    assert said.exit_code == 0, said.output
    manifest = json.loads((out / "ktforge_manifest.json").read_text())
    assert "calibrated-int4/1" in json.dumps(manifest) and manifest["pipeline"]["quantize"]["scales"] == "auto"
    refused = CliRunner().invoke(app, [*words, "--quant-method", "int8", "--scales", "searched"])
    assert refused.exit_code == 2 and "--scales does not go with" in refused.output


def with_inputs(seed, tokens=600):
    """Statistics of a layer with inputs that are correlated, as those of models are."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((tokens, HIDDEN)) @ random.standard_normal((HIDDEN, HIDDEN)) / HIDDEN**0.5
    routed = np.stack([random.permutation(EXPERTS)[:2] for _ in range(tokens)]).astype(np.int32)
    known = statistics(seed)
    return LayerStatistics(known.tokens, known.gate_up, known.down, mixed.astype(BF16), routed)


@pytest.fixture
def inputs(tmp_path):
    path = tmp_path / "inputs.safetensors"
    write_calibration(path, {layer: with_inputs(layer) for layer in range(LAYERS)}, {"activation": "silu"})
    return path


def error_of_outputs(unit, made, inputs):
    """Relative squared error of what gate and up make of inputs, and down of what they should have made."""
    w = {p: unit.tensors[f"{p}.weight"].astype(np.float64) for p in ("gate", "up", "down")}
    off = {p: weight.copy() for p, weight in w.items()}
    for part, found in zip(made.spec.parts, made.parts, strict=True):
        groups = np.repeat(found.scales.astype(np.float64), part.shape[1] // found.scales.shape[1], axis=1)
        part.of(off[part.projection])[:] -= found.codes * groups * made.spec.step
    x = inputs.astype(np.float64)
    gate = x @ w["gate"].T
    middle = gate / (1 + np.exp(-gate)) * (x @ w["up"].T)
    return {
        p: np.square(given @ off[p].T).sum() / np.square(given @ w[p].T).sum()
        for p, given in (("gate", x), ("up", x), ("down", middle))
    }


@pytest.mark.parametrize(
    ("layout", "options"),
    [(KtAmx(threadpool_count=1), {}), (KtAmx(threadpool_count=2), {}), (CompressedTensors(), {"group_size": 32})],
    ids=["one node", "two nodes", "groups"],
)
def test_feedback_makes_up_for_errors_of_the_output(isa, inputs, layout, options):
    one, errors = unit(), {}
    known = with_inputs(1)
    mine = known.inputs[(known.routed == 2).any(axis=1)]
    for scales in ("calibrated", "feedback"):
        quantizer = Int4(scales=scales, calibration=inputs, **options)
        made = check_quantizer(quantizer, layout, one)
        assert made.spec.method == f"{scales}-int4/1"
        errors[scales] = error_of_outputs(one, made, mine)
    for projection, error in errors["feedback"].items():
        assert error < 0.8 * errors["calibrated"][projection]


def test_feedback_is_the_same_everywhere(inputs, isa):
    """From every instruction set, and whatever was made before it."""
    quantizer = Int4(scales="feedback", calibration=inputs)
    one = unit()
    spec = quantizer.plan(one.spec, KtAmx(threadpool_count=2).demand(one.spec))
    made = [p.codes.tobytes() for p in quantizer.quantize(one, spec).parts]
    other = expert((SIZE, HIDDEN), seed=5)
    quantizer.quantize(Unit(other.spec._replace(layer=0, expert=1), other.tensors), spec._replace(unit=other.spec))
    again = [p.codes.tobytes() for p in quantizer.quantize(one, spec).parts]
    assert made == again == KNOWN.setdefault("made", made)


#: What the first instruction set made.
KNOWN: dict[str, list[bytes]] = {}


def test_feedback_needs_inputs_of_silu(source, out, calibration, tmp_path):
    with pytest.raises(PlanError, match="has no inputs of layer 0, which scales: feedback needs"):
        convert(source, out, scales="feedback", calibration=calibration).run()
    other = tmp_path / "gelu.safetensors"
    write_calibration(other, {layer: with_inputs(layer) for layer in range(LAYERS)}, {"activation": "gelu"})
    with pytest.raises(PlanError, match=r"for silu alone, and .* says gelu"):
        convert(source, out, scales="feedback", calibration=other).run()


def test_feedback_does_not_depend_on_workers(source, tmp_path, inputs):
    made = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        convert(source, folder, scales="feedback", calibration=inputs).run(workers=workers)
        made.append({name: array.tobytes() for name, array in checkpoints.load_output(folder).items()})
    assert made[0] == made[1]
