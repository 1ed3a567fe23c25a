"""docs/sources.md says what the architecture files and the preprocessors do, no more and no less."""

from importlib.resources import files
from pathlib import Path

import pytest
from ktforge_plugins.preprocess.moe_to_bf16 import FORMATS, MoeToBf16
from ruamel.yaml import YAML

from ktforge import TensorSpec, UnitSpec, Unsupported
from ktforge.contract.tensors import BF16, DTYPES
from ktforge.model.architectures import Architecture, architectures

TEXT = (Path(__file__).parents[2] / "docs" / "sources.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table below a heading."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def test_the_table_of_families_is_that_of_the_files():
    folder = files("ktforge") / "data" / "architectures"
    stated = {row[0]: row[1:] for row in table("Families")}
    assert stated.keys() == {p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")}
    for name, cells in stated.items():
        text = (folder / f"{name}.yaml").read_text("utf-8")
        architecture = Architecture.model_validate(YAML(typ="safe").load(text))
        assert architecture in architectures()
        fused = architecture.fused
        assert cells == [
            ", ".join(architecture.model_types),
            f"`{architecture.experts}`" if architecture.experts else "–",
            f"`{fused.experts}`" if fused else "–",
        ]


def test_the_table_of_formats_names_every_preprocessor():
    named = {cell.strip("`") for row in table("Number formats") for cell in [row[2]]} - {"–"}
    assert named == {f.name for f in FORMATS} | {"moe-to-bf16"}


#: The form of a row → one projection [64, 128] that is stored so.
EXAMPLES = {
    "BF16, FP16, FP32": {"weight": ("F16", (64, 128))},
    "FP8 in blocks": {"weight": ("F8_E4M3", (64, 128)), "weight_scale_inv": ("F32", (2, 4))},
    "FP8 per channel": {"weight": ("F8_E4M3", (64, 128)), "weight_scale": ("BF16", (64, 1))},
    "FP8 static": {"weight": ("F8_E5M2", (64, 128)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
    "MXFP8": {"weight": ("F8_E4M3", (64, 128)), "weight_scale_inv": ("U8", (64, 4))},
    "MXFP4": {"weight": ("I8", (64, 64)), "scale": ("F8_E8M0", (64, 4))},
    "MXFP4 in blocks": {"blocks": ("U8", (64, 4, 16)), "scales": ("U8", (64, 4))},
    "NVFP4": {
        "weight_packed": ("U8", (64, 64)), "weight_scale": ("F8_E4M3", (64, 8)), "weight_global_scale": ("F32", (1,)),
    },
    "pack-quantized": {"weight_packed": ("I32", (64, 16)), "weight_scale": ("BF16", (64, 4))},
    "int-quantized": {"weight": ("I8", (64, 128)), "weight_scale": ("F32", (64, 4))},
    "GPTQ": {"qweight": ("I32", (16, 64)), "qzeros": ("I32", (4, 8)), "scales": ("F16", (4, 64))},
    "AWQ": {"qweight": ("I32", (128, 8)), "qzeros": ("I32", (4, 8)), "scales": ("F16", (4, 64))},
    "others": {"weight": ("U8", (4096, 1)), "absmax": ("F32", (64,))},
}  # fmt: skip
CONFIG = {
    "bits": 4,
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


def test_every_row_has_an_example():
    assert [row[0] for row in table("Number formats")] == list(EXAMPLES)


@pytest.mark.parametrize("row", table("Number formats"), ids=lambda row: row[0])
def test_a_row_says_what_happens(row):
    title, _, preprocessor, _, status = row
    stored = {p: TensorSpec(p, DTYPES[dtype], shape) for p, (dtype, shape) in EXAMPLES[title].items()}
    config = {"quantization_config": CONFIG}
    wanting = [f.name for f in FORMATS if f().bind(config).stored(stored) is not None]
    unit = UnitSpec("x", {f"gate.{p}": t for p, t in stored.items()}, 0, 0)
    if status == "refused":
        assert wanting == []
        with pytest.raises(Unsupported, match="which moe-to-bf16 does not read"):
            MoeToBf16().bind(config).plan(unit)
        return
    assert wanting in ([preprocessor.strip("`")], [])
    (made,) = MoeToBf16().bind(config).plan(unit)
    assert {r: (t.dtype, t.shape) for r, t in made.tensors.items()} == {"gate.weight": (BF16, (64, 128))}
