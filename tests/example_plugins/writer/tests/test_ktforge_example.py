import json

import numpy as np
from ktforge_example import ExampleWriter

from ktforge import Pipeline
from ktforge.contract.tensors import DTYPES
from ktforge.testing import check_writer, tiny_model


def read(folder):
    """The tensors as a reader of the format finds them."""
    raw, found = np.fromfile(folder / "weights.raw", np.uint8), {}
    for name, entry in json.loads((folder / "weights.json").read_text()).items():
        dtype, count = DTYPES[entry["dtype"]], int(np.prod(entry["shape"]))
        data = raw[entry["offset"] : entry["offset"] + count * dtype.itemsize]
        found[name] = data.view(dtype).reshape(entry["shape"])
    return found


def test_the_contract(tmp_path):
    check_writer(ExampleWriter(path=tmp_path / "out"), read_back=lambda: read(tmp_path / "out"))


def test_a_pipeline(tmp_path):
    model, out = tiny_model(), tmp_path / "out"
    Pipeline(loader=model, writer=ExampleWriter(path=out)).run()
    assert {n: a.tobytes() for n, a in read(out).items()} == {n: a.tobytes() for n, a in model.tensors.items()}
    assert json.loads((out / "config.json").read_text()) == model.model
