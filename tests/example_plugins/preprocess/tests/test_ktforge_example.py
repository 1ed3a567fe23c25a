import numpy as np
import pytest
from ktforge_example import ExampleFormat

from ktforge import Pipeline, Unsupported
from ktforge.testing import MemoryLoader, MemoryWriter, check_preprocessor, tiny_model, weight_unit

CODES = np.random.default_rng(0).integers(-127, 128, (512, 384), np.int8)
ROW_MAX = np.linspace(0.5, 2, 512, dtype=np.float32)


def test_the_contract():
    (made,) = check_preprocessor(ExampleFormat(), weight_unit({"weight": CODES, "row_max": ROW_MAX}))
    wanted = CODES * (ROW_MAX / np.float32(127))[:, None]
    assert np.array_equal(made.tensors["weight"], wanted.astype(made.tensors["weight"].dtype))


def test_a_pipeline():
    model, name = tiny_model(), "model.layers.0.mlp.experts.1.up_proj"
    tensors = {**model.tensors, f"{name}.weight": CODES[:256, :128], f"{name}.row_max": ROW_MAX[:256]}
    loader, writer = MemoryLoader(tensors=tensors, model=model.model), MemoryWriter()
    Pipeline(loader=loader, preprocess=[ExampleFormat()], writer=writer).run()
    assert writer.tensors.keys() == model.tensors.keys()
    assert {array.dtype.name for array in writer.tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"row_max": ROW_MAX}, "has no I8 weight"),
        ({"weight": CODES.astype(np.float32), "row_max": ROW_MAX}, "has no I8 weight"),
        ({"weight": CODES, "row_max": ROW_MAX[:-1]}, r"is no F32 \[512\]"),
        ({"weight": CODES, "row_max": ROW_MAX.astype(np.float64)}, r"is no F32 \[512\]"),
    ],
)
def test_what_is_wrong_is_refused_in_the_plan(arrays, message):
    with pytest.raises(Unsupported, match=message):
        ExampleFormat().plan(weight_unit(arrays).spec)
