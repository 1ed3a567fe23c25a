import json

import numpy as np
import pytest
from ktforge_example import ExampleLoader

from ktforge import CheckpointError, Pipeline
from ktforge.testing import MemoryWriter, check_loader, tiny_model

MODEL = tiny_model()
TENSORS = {name: array.astype(np.float32) for name, array in MODEL.tensors.items()}
TENSORS["model.steps"] = np.arange(600_000)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL.model))
    (tmp_path / "tokenizer.json").write_text("{}")
    names = list(TENSORS)
    np.savez(tmp_path / "one.npz", **{n: TENSORS[n] for n in names[1:]})
    np.savez_compressed(tmp_path / "two.npz", **{n: TENSORS[n] for n in names[:1]})
    return tmp_path


def test_the_contract(folder):
    check_loader(ExampleLoader(path=folder), TENSORS)


def test_a_pipeline(folder):
    writer = MemoryWriter()
    Pipeline(loader=ExampleLoader(path=folder), writer=writer).run()
    assert {n: a.tobytes() for n, a in writer.tensors.items()} == {n: a.tobytes() for n, a in TENSORS.items()}


@pytest.mark.parametrize("keep", [0, 40, 100])
def test_a_file_that_was_cut_short(folder, keep):
    file = folder / "two.npz"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"two\.npz is no whole \.npz file"):
        list(ExampleLoader(path=folder).scan())


def test_what_is_no_number(folder):
    np.savez(folder / "three.npz", odd=np.array([{}]))
    with pytest.raises(CheckpointError, match=r"three\.npz: odd\.npy holds object, which is no number"):
        list(ExampleLoader(path=folder).scan())


def test_a_folder_without_any(folder):
    for file in folder.glob("*.npz"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.npz files"):
        list(ExampleLoader(path=folder).scan())
