import json

import checkpoints
import pytest
from ktforge_plugins import SafetensorsLoader, SafetensorsWriter
from pydantic import ValidationError

from ktforge import Pipeline


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1.5kb", 1500), ("4GiB", 4 * 2**30), (7, 7), ("7", 7)],
)
def test_sizes(tmp_path, text, size):
    assert SafetensorsWriter(path=tmp_path, max_shard_size=text).max_shard_size == size


@pytest.mark.parametrize("text", ["5 potatoes", "", "-1GB", "GB", 0, "0", "1e9"])
def test_sizes_that_are_none(tmp_path, text):
    with pytest.raises(ValidationError):
        SafetensorsWriter(path=tmp_path, max_shard_size=text)


@pytest.mark.parametrize("limit", ["100KB", "300KB", "1GB"])
def test_shards_and_index(source, out, limit):
    writer = SafetensorsWriter(path=out, max_shard_size=limit)
    Pipeline(loader=SafetensorsLoader(path=source), writer=writer).run()
    data = checkpoints.tensors()
    made = checkpoints.load_output(out)
    assert {n: a.tobytes() for n, a in made.items()} == {n: a.tobytes() for n, a in data.items()}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in data.values())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == data.keys()
    if limit == "1GB":
        assert files == ["model.safetensors"]
    else:
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        largest = max(a.nbytes for a in data.values())
        for file in files:
            loaded = sum(data[n].nbytes for n, f in index["weight_map"].items() if f == file)
            assert loaded <= max(writer.max_shard_size, largest)
