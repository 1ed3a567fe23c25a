"""Names by which an output of ktforge is known, finished or not, and by which weights are."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"
MANIFEST = "ktforge_manifest.json"
#: Lies in an output of ktforge that is not finished, and is no safetensors file, so that loaders fail on it.
UNFINISHED = "UNFINISHED.safetensors"
#: What an output grows in; :mod:`ktforge.output.folder` says how.
PARTIAL = ".ktforge-partial"

JOURNAL = "journal.jsonl"

#: The name of the lock file.
LOCK = "lock"

#: The suffix of files whose header says where each tensor is.
SAFETENSORS = ".safetensors"

#: Files of these kinds hold weights; they are read by a loader or left behind, never carried over.
WEIGHT_SUFFIXES = frozenset(
    [
        SAFETENSORS,
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".ggml",
        ".onnx",
        ".msgpack",
        ".h5",
        ".npz",
        ".kt",
    ]
)


def staged(staging: Path, path: str) -> Path:
    """Where a file grows: its suffix is one that weight loaders, which walk folders for theirs, do not look for."""
    return staging / (path + ".partial")
