"""Dequantisers take no more memory than they say, and say little."""

import tracemalloc

import numpy as np
import pytest
from ktforge_plugins import MoeToBf16
from preprocess.units import fused_unit, stored_forms, weight_unit

N, K = 1024, 2048


#: A form → one projection [N, K] that is stored so, and its quantization_config.
FORMS = stored_forms(N, K)


def peak(stage, unit):
    """Bytes at the worst moment of making a unit, those of the result left out."""
    tracemalloc.start()
    (result,) = stage.apply(unit)
    made = [result.tensors[role] for role in result.spec.tensors]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most - sum(a.nbytes for a in made)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", [0, 2])
def test_no_more_than_it_says(form, experts):
    stored, quantization = FORMS[form]
    arrays = {p: np.zeros(((experts,) if experts else ()) + shape, dtype) for p, (shape, dtype) in stored.items()}
    unit = fused_unit({f"down.{p}": a for p, a in arrays.items()}) if experts else weight_unit(arrays)
    stage = MoeToBf16().bind({"quantization_config": quantization})
    said = stage.scratch_bytes(unit.spec)
    assert peak(stage, unit) <= said + 100_000  # Python's own objects
    bf16 = 2 * N * K
    assert said <= (3 if experts else 2) * bf16 + 100_000


def test_plain_weights_need_nothing():
    assert MoeToBf16().scratch_bytes(weight_unit({"weight": np.zeros((N, K), np.float32)}).spec) == 0
