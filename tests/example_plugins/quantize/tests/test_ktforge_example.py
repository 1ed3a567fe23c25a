import numpy as np
import pytest
from ktforge_example import ExampleQuantizer
from ktforge_plugins import CompressedTensors, KtAmx

from ktforge import CheckpointError, Pipeline, Unsupported
from ktforge.testing import MemoryWriter, check_quantizer, expert, tiny_model


@pytest.mark.parametrize(("clip", "error"), [(1, 0.1), (0.9, 0.1), (0.5, 0.35)])
def test_the_contract(clip, error):
    made = check_quantizer(ExampleQuantizer(clip=clip), CompressedTensors(), expert((512, 256)), max_error=error)
    assert np.abs(made.parts[0].codes).max() == 7


def test_a_pipeline():
    writer = MemoryWriter()
    Pipeline(loader=tiny_model(), quantize=ExampleQuantizer(), layout=CompressedTensors(), writer=writer).run()
    assert writer.tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale"].shape == (256, 4)


def test_zeros():
    unit = expert()
    unit.tensors["up.weight"][:] = 0
    spec = ExampleQuantizer().plan(unit.spec, CompressedTensors().demand(unit.spec))
    assert not ExampleQuantizer().quantize(unit, spec).parts[1].codes.any()


@pytest.mark.parametrize(
    ("quantizer", "layout", "message"),
    [
        (ExampleQuantizer(group_size=48), CompressedTensors(), "group_size 48 does not divide 128 columns"),
        (ExampleQuantizer(), KtAmx(), "the layout asks for others"),
    ],
)
def test_what_does_not_go_together_is_refused_in_the_plan(quantizer, layout, message):
    unit = expert().spec
    with pytest.raises(Unsupported, match=message):
        quantizer.plan(unit, layout.demand(unit))


def test_a_weight_that_is_not_finite_is_refused():
    unit = expert()
    unit.tensors["up.weight"][3, 5] = np.nan
    spec = ExampleQuantizer().plan(unit.spec, CompressedTensors().demand(unit.spec))
    with pytest.raises(CheckpointError, match=r"up\.weight is NaN or infinite"):
        ExampleQuantizer().quantize(unit, spec)
