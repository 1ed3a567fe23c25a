"""A model of transformers whose experts kt-kernel computes, beside ktforge's statement of what it should compute."""

import pytest
import torch
from hf.conftest import converted, ids, original  # noqa: F401  (fixtures)

from ktforge import ConfigError, hf
from ktforge.hf.loading import experts_modules

pytestmark = pytest.mark.runtime


@pytest.fixture(autouse=True)
def cpu():
    """Skips where kt-kernel has no kernels for these methods."""
    from kt_kernel.utils import amx

    if amx.AMXInt4_MOE is None or amx.AMXInt8_MOE is None:
        pytest.skip("AMXINT4 and AMXINT8 need a CPU with AVX-512 or AMX")


@pytest.mark.parametrize("name", ["kt-amx int4", "kt-amx int8, two nodes"])
def test_the_engine_computes_what_int8_activations_say(converted, ids, name):  # noqa: F811
    """Each layer on what the engine gave to it: a router may decide otherwise for the last bits of another layer."""
    model = hf.from_pretrained(converted[name], kernels="kt-kernel", dtype=torch.float32)
    stated = hf.from_pretrained(converted[name], activations="int8", dtype=torch.float32)
    errors = []
    for (_, module), (_, other) in zip(experts_modules(model), experts_modules(stated), strict=True):
        module.register_forward_hook(
            lambda m, given, out, other=other: errors.append(float((out - other(*given)).norm() / out.norm()))
        )
    with torch.inference_mode():
        model(ids)
    print(f"{name}: {max(errors):.4f} from int8 activations")
    assert len(errors) == 2 and max(errors) < 0.03


def test_outputs_of_other_formats_are_refused(converted):  # noqa: F811
    with pytest.raises(ConfigError, match="computes with outputs of AMXINT4 and AMXINT8"):
        hf.from_pretrained(converted["rawint4"], kernels="kt-kernel")
