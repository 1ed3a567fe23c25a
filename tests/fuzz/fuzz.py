"""atheris targets: whatever the bytes, a parser returns or raises a KtforgeError, in bounded time and memory.

    python tests/fuzz/fuzz.py TARGET [libFuzzer options] [corpus folders]

``make fuzz`` runs all of them; see tests/reliability.mk.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ktforge", "ktforge_plugins", "ruamel.yaml"]):
    from ktforge_plugins.loaders.safetensors import SafetensorsLoader

    from ktforge.checkpoint.folder import CheckpointFolder
    from ktforge.contract.checks import check_specs
    from ktforge.contract.registry import Registry
    from ktforge.disk.journal import Journal
    from ktforge.errors import KtforgeError
    from ktforge.model.config import read_model_config
    from ktforge.model.units import units_of
    from ktforge.pipeline.file import load_pipeline

REGISTRY = Registry.installed(blocked={"loader-bin", "loader-auto"})
CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_experts": 2, "moe_intermediate_size": 8}


def safetensors(folder: Path, data: bytes) -> None:
    """Input that begins with a brace is a header and, behind a NUL, data; a length that fits is found by no fuzzer."""
    if data.startswith(b"{"):
        header, _, rest = data.partition(b"\0")
        data = len(header).to_bytes(8, "little") + header + rest
    (folder / "model.safetensors").write_bytes(data)
    specs = list(SafetensorsLoader(path=folder).scan())
    check_specs(specs)
    for spec in specs:
        assert SafetensorsLoader(path=folder).read(spec).nbytes == spec.nbytes
    units_of(specs, read_model_config(CONFIG))


def config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    read_model_config(CheckpointFolder(folder).config())


def index(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    files, _ = CheckpointFolder(folder).weight_files("*.safetensors", "model.safetensors.index.json")
    assert all(f.resolve().is_relative_to(folder.resolve()) for f in files)


def pipeline(folder: Path, data: bytes) -> None:
    (folder / "pipeline.yaml").write_bytes(data)
    json.dumps(load_pipeline(folder / "pipeline.yaml", REGISTRY).to_dict())


def journal(folder: Path, data: bytes) -> None:
    """A journal that was cut off or overwritten says less than it did; it is never an error of another kind."""
    path = folder / "journal.jsonl"
    path.write_bytes(data)
    opened = Journal(path)
    assert isinstance(opened.fingerprint, dict) and isinstance(opened.written, dict)


def fuzz(target: Callable[[Path, bytes], None], folder: Path) -> None:
    def one(data: bytes) -> None:
        try:
            target(folder, data)
        except KtforgeError as error:
            assert error.problems and all(error.problems)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


def main() -> None:
    target = {f.__name__: f for f in (safetensors, config, index, pipeline, journal)}[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory(prefix="ktforge-fuzz-") as folder:
        child = os.fork()  # libFuzzer ends its process itself, and would leave the folder behind
        if child == 0:
            fuzz(target, Path(folder))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(status)


if __name__ == "__main__":
    main()
