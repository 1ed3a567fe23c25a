"""atheris targets: whatever the bytes, a parser returns or raises a KtforgeError, in bounded time and memory.

    python tests/fuzz/fuzz.py TARGET [libFuzzer options] [corpus folders]

``make fuzz`` runs all of them; see tests/reliability.mk.
"""

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ktforge", "ktforge_plugins", "ruamel.yaml"]):
    from ktforge_plugins.loaders.safetensors import SafetensorsLoader

    from ktforge.checkpoint import CheckpointFolder
    from ktforge.config import load_pipeline
    from ktforge.errors import KtforgeError
    from ktforge.grouping import group
    from ktforge.journal import Journal
    from ktforge.modelconfig import read_model_config
    from ktforge.names import check_specs
    from ktforge.registry import Registry

FOLDER = Path(tempfile.mkdtemp(prefix="ktforge-fuzz-"))
REGISTRY = Registry.installed(blocked={"loader-bin", "loader-auto"})
CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_experts": 2, "moe_intermediate_size": 8}


def safetensors(data: bytes) -> None:
    (FOLDER / "model.safetensors").write_bytes(data)
    specs = list(SafetensorsLoader(path=FOLDER).scan())
    check_specs(specs)
    for spec in specs:
        assert SafetensorsLoader(path=FOLDER).read(spec).nbytes == spec.nbytes
    group(specs, read_model_config(CONFIG))


def config(data: bytes) -> None:
    (FOLDER / "config.json").write_bytes(data)
    read_model_config(CheckpointFolder(FOLDER).config())


def index(data: bytes) -> None:
    (FOLDER / "model.safetensors.index.json").write_bytes(data)
    files, _ = CheckpointFolder(FOLDER).weight_files("*.safetensors", "model.safetensors.index.json")
    assert all(f.resolve().is_relative_to(FOLDER.resolve()) for f in files)


def pipeline(data: bytes) -> None:
    (FOLDER / "pipeline.yaml").write_bytes(data)
    json.dumps(load_pipeline(FOLDER / "pipeline.yaml", REGISTRY).to_dict())


def journal(data: bytes) -> None:
    """A journal that was cut off or overwritten says less than it did; it is never an error of another kind."""
    path = FOLDER / "journal.jsonl"
    path.write_bytes(data)
    opened = Journal(path)
    assert isinstance(opened.fingerprint, dict) and isinstance(opened.written, dict)


def main() -> None:
    target = {f.__name__: f for f in (safetensors, config, index, pipeline, journal)}[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        try:
            target(data)
        except KtforgeError as error:
            assert error.problems and all(error.problems)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
