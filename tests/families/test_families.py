"""Every MoE family of the installed transformers: what ktforge makes of it, from_pretrained loads; docs/sources.md has
the table. A few families are always tried, all by ``make test-families``."""

import re
from pathlib import Path

import pytest

from ktforge import KtforgeError, Registry
from ktforge.pipeline.file import build_pipeline
from ktforge.pipeline.presets import convert, dequantize_pipeline, to_bf16

PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
#: model_type → convert, BF16, back, speaks, each ``yes`` or ``no: words of the refusal``.
TABLE = {
    name: cells.split(" | ")
    for name, cells in re.findall(
        r"^\| `(\w+)` \| ((?:yes|no: ).+) \|$", PAGE.partition("## Every family")[2].partition("\n## ")[0], re.M
    )
}
#: One for each way of storing experts: by themselves, fused in halves, transposed, interleaved, without `gate_proj`.
ALWAYS = ["qwen3_moe", "mixtral", "granitemoe", "aria_text", "nemotron_h"]
EVERY = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.families) for name in TABLE]
#: Relative error of INT8 with a scale a row.
INT8 = 0.02


@pytest.fixture(scope="module")
def registry():
    return Registry.installed()


def difference(folder, model):
    """The largest relative error of any weight that ``from_pretrained`` loads."""
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True, dtype=model.dtype)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ours, theirs = loaded.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    norms = ((theirs[n].double().norm(), (ours[n].double() - theirs[n].double()).norm()) for n in theirs)
    return max(float(apart / norm) if norm else float(apart) for norm, apart in norms)


def held(cell, attempt):
    """Does what a cell says can be done, or sees that it is refused in the cell's words; whether it was done."""
    if cell == "yes":
        attempt()
        return True
    with pytest.raises(KtforgeError, match=re.escape(cell.removeprefix("no: "))):
        attempt()
    return False


@pytest.mark.parametrize("original_format", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize("family", EVERY)
def test_what_the_table_says(tmp_path, registry, family, original_format):
    from families.tiny import tiny_model

    converts, bf16, back, _ = TABLE[family]
    model, source = tiny_model(family), tmp_path / "source"
    model.save_pretrained(source, save_original_format=original_format)
    if held(bf16, lambda: build_pipeline(to_bf16(source, tmp_path / "bf16"), registry, "x").run(registry=registry)):
        assert difference(tmp_path / "bf16", model) == 0
    preset = next(p for p in registry.presets() if p.command == "convert --quant-method int8")
    data = convert(source, tmp_path / "packed", preset, given={"threadpool_count": 1})
    if held(converts, lambda: build_pipeline(data, registry, "x").run(registry=registry)):
        assert back == "yes"
        dequantize_pipeline(tmp_path / "packed", tmp_path / "back", registry).run(registry=registry)
        assert 0 < difference(tmp_path / "back", model) < INT8


@pytest.mark.parametrize("family", EVERY)
def test_whether_it_speaks(tmp_path, family):
    """The logits of ``ktforge.hf.from_pretrained`` are those of transformers alone, to float32 rounding."""
    import torch
    from families.tiny import tiny_model

    from ktforge import hf

    model = tiny_model(family)
    model.save_pretrained(tmp_path / "source")
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))

    def attempt():
        plain = type(model).from_pretrained(tmp_path / "source", dtype=torch.float32, experts_implementation="eager")
        mine = hf.from_pretrained(tmp_path / "source", dtype=torch.float32)
        with torch.inference_mode():
            ours, theirs = (m(input_ids=tokens, use_cache=False).logits for m in (mine, plain))
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())

    held(TABLE[family][3], attempt)


@pytest.mark.families
def test_the_table_has_every_family():
    from families.tiny import families

    assert sorted(TABLE) == sorted(families())
