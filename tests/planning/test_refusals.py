"""What speaks against a unit at several stages is said once each, with how many units it goes for."""

from typing import ClassVar

import checkpoints
import numpy as np
from checkpoints import BF16
from ktforge_plugins import Int8, KtAmx, MoeToBf16, SafetensorsLoader

from ktforge import Pipeline, Preprocessor, Unsupported
from ktforge.testing import MemoryLoader, MemoryWriter

BOTH, LATER = "both of them have this against it", "the layout alone has this"


class Refuses(Preprocessor):
    name: ClassVar[str] = "refuses"

    def plan(self, unit):
        if unit.is_expert:
            raise Unsupported(BOTH)
        return [unit]

    def apply(self, unit):
        yield unit


class RefusesToo(KtAmx):
    name: ClassVar[str] = "refuses-too"

    def demand(self, unit):
        raise Unsupported(BOTH, LATER)


def test_what_two_stages_say_is_said_once():
    loader = MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config())
    plan = Pipeline(
        loader=loader, preprocess=[Refuses()], quantize=Int8(), layout=RefusesToo(), writer=MemoryWriter()
    ).plan()
    first = "model.layers.0.mlp.experts.0 (and 7 more): "
    assert plan.problems == (first + BOTH, first + LATER)


def test_a_file_that_describes_a_quantisation_goes_from_its_own_place_alone(tmp_path):
    """Beside config.json it is for readers of the weights; in another folder it is somebody's notes."""
    folder = checkpoints.fp8_checkpoint(tmp_path / "model", (128, 128))
    for place in ("quantize_config.json", "sub/quantize_config.json", "sub/hf_quant_config.json"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("{}")
    plan = Pipeline(
        loader=SafetensorsLoader(path=folder), preprocess=[MoeToBf16()], writer=MemoryWriter()
    ).plan()  # fmt: skip
    found = {str(p) for p in plan.side_files if "quant" in p.name}
    assert plan.problems == () and found == {"sub/quantize_config.json", "sub/hf_quant_config.json"}
    assert all(a.dtype in (BF16, np.float32) or ".experts." in n for n, a in checkpoints.load_output(folder).items())
