"""What is read of a checkpoint before it is planned."""

from pathlib import Path

import checkpoints

from ktforge import SourceFile
from ktforge.model.source import read_source
from ktforge.testing import MemoryLoader


class FolderOfBlobs(MemoryLoader):
    """Says that its tensors are in blobs/all.blob, and counts every file of its folder as a side file."""

    path: Path

    def folder(self):
        return self.path

    def side_files(self):
        return sorted(p.relative_to(self.path) for p in self.path.rglob("*") if p.is_file())

    def sources(self):
        return [SourceFile(self.path / "blobs/all.blob", 4, "0" * 32)]


def test_weights_are_no_side_files_whatever_their_suffix(tmp_path):
    for name in ("blobs/all.blob", "blobs/notes.txt", "tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1234")
    loader = FolderOfBlobs(path=tmp_path, tensors=checkpoints.tensors(), model=checkpoints.config())
    assert list(map(str, read_source(loader).side_files)) == ["blobs/notes.txt", "tokenizer.json"]
