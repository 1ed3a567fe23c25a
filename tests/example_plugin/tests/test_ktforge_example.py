import numpy as np
import pytest
from ktforge_example import ExampleLayout, ExampleQuantizer

from ktforge import CheckpointError, Pipeline, Unsupported
from ktforge.testing import MemoryWriter, check_layout, check_quantizer, expert, tiny_model


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.15), (3, 0.35)])
def test_the_contract(bits, error):
    quantizer, unit = ExampleQuantizer(bits=bits), expert((512, 256))
    check_quantizer(quantizer, ExampleLayout(), unit, max_error=error)
    check_layout(ExampleLayout(), quantizer, unit)


def test_a_pipeline():
    model, writer = tiny_model(), MemoryWriter()
    Pipeline(loader=model, quantize=ExampleQuantizer(bits=8), layout=ExampleLayout(), writer=writer).run()
    for name, weight in model.tensors.items():
        if ".experts." in name:
            restored = writer.tensors[f"{name}_codes"] * np.repeat(writer.tensors[f"{name}_scales"], 32, axis=1)
            assert np.allclose(restored, weight.astype(np.float32), atol=np.abs(weight.astype(np.float32)).max() / 254)


def test_groups_that_do_not_divide_are_refused_in_the_plan():
    unit = expert()
    with pytest.raises(Unsupported, match="group_size 48 does not divide 128 columns"):
        ExampleQuantizer(group_size=48).plan(unit.spec, ExampleLayout().demand(unit.spec))


def test_other_sources_are_refused_in_the_plan():
    unit = expert().spec
    codes = unit.tensors["up.weight"]._replace(dtype=np.dtype(np.int8))
    with pytest.raises(Unsupported, match=r"up is .* takes a float weight"):
        ExampleQuantizer().plan(unit.with_tensors({"up.weight": codes}), ExampleLayout().demand(unit))


def test_a_weight_that_is_not_finite_is_refused():
    unit = expert()
    unit.tensors["up.weight"][3, 5] = np.nan
    with pytest.raises(CheckpointError, match=r"up\.weight is NaN or infinite"):
        ExampleQuantizer().quantize(unit, ExampleQuantizer().plan(unit.spec, ExampleLayout().demand(unit.spec)))
