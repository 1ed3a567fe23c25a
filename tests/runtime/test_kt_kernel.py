"""A converted checkpoint, opened by KTransformers' own loader."""

import checkpoints
import numpy as np
import pytest
import reference
from ktforge_plugins import AutoLoader, Int4, Int8, KtAmx, MoeToBf16, SafetensorsWriter

from ktforge import Pipeline

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("quantizer", "bits"), [(Int4(), 4), (Int8(), 8)])
def test_load_experts(source, out, quantizer, bits, parts):
    from kt_kernel.utils.loader import SafeTensorLoader

    Pipeline(
        loader=AutoLoader(path=source), preprocess=[MoeToBf16()], quantize=quantizer,
        layout=KtAmx(threadpool_count=parts), writer=SafetensorsWriter(path=out, max_shard_size="800KB"),
    ).run()  # fmt: skip
    data = checkpoints.tensors()
    loader = SafeTensorLoader(str(out))
    for layer in range(checkpoints.LAYERS):
        loaded = loader.load_experts(f"blk.{layer}")
        assert loaded.keys() == {"gate", "up", "down", "gate_scale", "up_scale", "down_scale"}
        for number in range(checkpoints.EXPERTS):
            weights = {p: data[checkpoints.expert_name(layer, number, p)] for p in ("gate", "up", "down")}
            for name, want in reference.packed_expert(layer, number, weights, bits, parts).items():
                projection, part, kind = name.split(".")[2].split("_")[1], int(name.split(".")[5]), name.split(".")[6]
                lists = loaded[projection if kind == "weight" else f"{projection}_scale"]
                assert len(lists) == parts and len(lists[part]) == checkpoints.EXPERTS
                got = lists[part][number]
                assert isinstance(got, np.ndarray) and got.tobytes() == want.tobytes(), name
    with pytest.raises(ValueError):
        loader.load_experts(f"blk.{checkpoints.LAYERS}")
