import numpy as np
import pytest
from ktforge_example import ExampleLayout
from ktforge_plugins import Int4, Int8

from ktforge import Pipeline, Unsupported
from ktforge.testing import MemoryWriter, check_layout, expert, tiny_model


@pytest.mark.parametrize("quantizer", [Int8(group_size=32), Int4(group_size=64), Int8()])
def test_the_contract(quantizer):
    check_layout(ExampleLayout(), quantizer, config=tiny_model().model)


def test_a_pipeline():
    model, writer, stem = tiny_model(), MemoryWriter(), "model.layers.0.mlp.experts.1.up_proj"
    Pipeline(loader=model, quantize=Int8(group_size=32), layout=ExampleLayout(), writer=writer).run()
    made = writer.tensors[f"{stem}.codes"] * np.repeat(writer.tensors[f"{stem}.scales"], 32, axis=1)
    assert np.abs(made - model.tensors[f"{stem}.weight"].astype(np.float32)).max() < 0.002


def test_zero_points_are_refused_in_the_plan():
    unit = expert().spec
    spec = Int8(symmetric=False).plan(unit, ExampleLayout().demand(unit))
    with pytest.raises(Unsupported, match="no place for zero points"):
        ExampleLayout().plan(spec)
