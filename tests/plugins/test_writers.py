import json

import checkpoints
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ktforge_plugins import SafetensorsLoader, SafetensorsWriter
from pydantic import ValidationError

from ktforge import Pipeline, TensorSpec, Unsupported
from ktforge.contract.tensors import DTYPES
from ktforge.testing import MemoryLoader


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


NAMES = st.text(min_size=1, max_size=40).filter(lambda name: name != "__metadata__") | st.sampled_from(
    ['a"quote', "back\\slash", "ümlaut", "𝄞", "new\nline", "x" * 500]
)
SHAPES = st.lists(st.sampled_from([0, 1, 3, 9, 10, 11, 99, 100, 4096, 10**5]), max_size=3).map(tuple)
DTYPE = st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__)


def test_a_tensor_that_a_header_has_no_place_for(out):
    tensors = {**checkpoints.tensors(), "__metadata__": np.ones(4, np.float32)}
    loader = MemoryLoader(tensors=tensors, model=checkpoints.config())
    plan = Pipeline(loader=loader, writer=SafetensorsWriter(path=out)).plan()
    assert plan.problems == ("no tensor of a safetensors file can be called __metadata__: rename it in the source",)


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 20))
def test_a_shard_ends_where_the_next_tensor_would_take_it_over_the_limit(sizes, limit):
    tensors = [TensorSpec(f"{i:02}", np.dtype(np.uint8), (n,)) for i, n in enumerate(sizes)]
    expected, size = [[]], 0
    for tensor in tensors:
        if expected[-1] and size + tensor.nbytes > limit:
            expected, size = [*expected, []], 0
        expected[-1].append(tensor)
        size += tensor.nbytes
    assert [list(f.tensors) for f in SafetensorsWriter(path="out", max_shard_size=limit).plan(tensors, [])] == expected


def test_more_bytes_than_there_are(out):
    tensors = [TensorSpec(str(i), np.dtype(np.uint8), (1 << 40, 1 << 20)) for i in range(10)]
    with pytest.raises(Unsupported, match="11,529,215,046,068,469,760 bytes, which no file system holds"):
        SafetensorsWriter(path=out).plan(tensors, [])


@given(st.dictionaries(NAMES, st.tuples(DTYPE, SHAPES), max_size=60), st.sampled_from([1, 100, 10**6, 10**30]))
def test_a_header_is_as_long_as_was_planned_and_says_where_its_tensors_are(named, limit):
    tensors = [TensorSpec(name, *kind) for name, kind in named.items()]
    writer = SafetensorsWriter(path="out", max_shard_size=limit)
    assert writer.plan(tensors, []) == writer.plan(tensors, [])
    found = {}
    for file in writer.plan(tensors, []):
        header = bytes(file.header)
        assert len(file.header) == len(header) == 8 + int.from_bytes(header[:8], "little")
        assert len(header) % 8 == 0
        assert file.nbytes == len(header) + sum(t.nbytes for t in file.tensors)
        entries = json.loads(header[8:])
        assert entries.pop("__metadata__") == {"format": "pt"}
        assert list(entries) == [t.name for t in file.tensors]
        end = 0
        for tensor, entry in zip(file.tensors, entries.values(), strict=True):
            begin, end = end, end + int(np.prod(tensor.shape, dtype=object)) * tensor.dtype.itemsize
            assert entry["data_offsets"] == [begin, end]
        found |= {n: (DTYPES[e["dtype"]], tuple(e["shape"])) for n, e in entries.items()}
    assert found == named
