"""Codes of -8 in packed INT4 are found by a bounded look, and ``inspect`` says what they mean."""

import json

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import AutoLoader, CompressedTensors, Int4, Int8, SafetensorsWriter
from ktforge_plugins.preprocess import lowest_codes as codes
from typer.testing import CliRunner

from ktforge import Pipeline
from ktforge.cli import app
from ktforge.model.config import read_model_config
from ktforge.model.units import units_of
from ktforge.testing import MemoryLoader

FULL, NARROW = Int4(group_size=32), Int4(group_size=32, narrow_range=True)
WEIGHTS = 3 * checkpoints.LAYERS * checkpoints.EXPERTS


class CountingLoader(MemoryLoader):
    """Notes what is read of it."""

    def read(self, spec):
        SEEN.append(spec)
        return super().read(spec)


SEEN: list = []


def packed(source, out, quantizer, layout=None):
    Pipeline(
        loader=AutoLoader(path=source), quantize=quantizer, layout=layout or CompressedTensors(),
        writer=SafetensorsWriter(path=out),
    ).run()  # fmt: skip
    return out


def look(folder, *, kind=MemoryLoader):
    config = json.loads((folder / "config.json").read_text())
    loader = kind(tensors=checkpoints.load_output(folder), model=config)
    model = read_model_config(config)
    return codes.lowest_codes(loader, model, units_of(tuple(loader.scan()), model).experts)


def test_the_fraction_of_the_lowest_code(source, out):
    made = [a for n, a in checkpoints.load_output(packed(source, out, FULL)).items() if n.endswith("weight_packed")]
    nibbles = np.concatenate([np.stack([b & 15, b >> 4]).ravel() for b in (a.view(np.uint8) for a in made)])
    found = look(out)
    assert (found.codes, found.looked_at, found.weights) == (nibbles.size, WEIGHTS, WEIGHTS)
    assert found.fraction == (nibbles == 0).mean() and 0.001 < found.fraction < 0.02


def test_narrow_codes_have_none(source, out):
    assert look(packed(source, out, NARROW)).fraction == 0


@pytest.mark.parametrize(
    ("quantizer", "layout"),
    [(Int4(group_size=32, symmetric=False), None), (Int8(group_size=32), None),
     (Int8(), CompressedTensors(format="int-quantized"))],
)  # fmt: skip
def test_what_rawint4_does_not_read_is_not_looked_at(source, out, quantizer, layout):
    assert look(packed(source, out, quantizer, layout)) is None


def test_a_look_is_bounded(source, out, monkeypatch):
    monkeypatch.setattr(codes, "MOST_WEIGHTS", 5)
    monkeypatch.setattr(codes, "MOST_BYTES", 4096)
    packed(source, out, FULL)
    SEEN.clear()
    found = look(out, kind=CountingLoader)
    assert (found.looked_at, found.weights) == (5, WEIGHTS) and found.codes == 2 * 5 * 4096
    assert sum(spec.nbytes for spec in SEEN) == 5 * 4096
    assert len({spec.name.split(".experts.")[0] for spec in SEEN}) == checkpoints.LAYERS


def row(folder):
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    return [line.removeprefix("note").strip() for line in shown.stdout.splitlines() if line.startswith("note ")]


def test_inspect_says_which_versions_mind_and_what_mends_it(source, tmp_path):
    count = WEIGHTS * checkpoints.SIZE * checkpoints.HIDDEN
    sample = f"({count:,} looked at, in {WEIGHTS} of {WEIGHTS} weights)"
    full, mended = packed(source, tmp_path / "full", FULL), tmp_path / "mended"
    (said,) = row(full)
    assert said.endswith(
        f" % of the INT4 codes are -8 {sample}, which RAWINT4 of kt-kernel up to 0.7.0 computes wrongly on "
        "AVX-512: serve it with 0.7.0.post4 or later, or convert it with --quant-method rawint4"
    )
    options = ["--input-path", str(full), "--output", str(mended), "--quant-method", "rawint4"]
    assert CliRunner().invoke(app, ["convert", *options]).exit_code == 0
    assert row(mended) == [f"none of the INT4 codes is -8 {sample}"] and row(source) == []
    as_json = CliRunner().invoke(app, ["inspect", str(full), "--json"])
    assert json.loads(as_json.stdout)["remarks"] == [said]
