"""A Hugging Face checkpoint folder: its config, its weight files, and what else lies in it. Loaders build on this."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from ktforge.checkpoint.downloads import is_mark, sentence, unfinished
from ktforge.checkpoint.links import check_links
from ktforge.checkpoint.params import PARAMS, from_params
from ktforge.checkpoint.shards import is_mtp_file, missing_shards
from ktforge.contract.identity import Identity
from ktforge.disk.folders import NONE
from ktforge.disk.journal import Journal
from ktforge.disk.marks import CONFIG, JOURNAL, MANIFEST, PARTIAL, UNFINISHED, WEIGHT_SUFFIXES
from ktforge.disk.reading import JSON_LIMIT, content_hash, is_file, open_regular, pointer_problem, read_json
from ktforge.errors import CheckpointError
from ktforge.text import counted, first_of

#: What to do with weights that no loader of ktforge's own reads, by the end of their names.
_TORCH = (
    "files of torch.save; where you trust them, save what they hold with safetensors.torch.save_file as "
    "model.safetensors, under the names that transformers gives the model's tensors"
)
_ELSEWHERE = "weights for other programs; get the model's *.safetensors"
_OTHER = {
    **dict.fromkeys([".pth", ".pt", ".ckpt"], _TORCH),
    ".bin": "call it pytorch_model.bin if torch.save wrote it; otherwise get the model's *.safetensors",
    ".gguf": "llama.cpp's, quantised already; get the model's *.safetensors",
    ".ggml": "llama.cpp's, quantised already; get the model's *.safetensors",
}
INDEX_SUFFIX = ".index.json"
#: What a safetensors header has beside tensors.
METADATA = "__metadata__"
#: Where quantisers describe their work beside config.json. Readers take the first, of Model Optimizer, for what
#: config.json does not say; the others are AutoGPTQ's, AWQ's and AutoRound's copies of what it does.
HF_QUANT_CONFIG = "hf_quant_config.json"
QUANTIZATION_FILES = frozenset(
    [HF_QUANT_CONFIG, "quantize_config.json", "quant_config.json", "quantization_config.json"]
)
#: A config or index larger than this is no config or index.
CONFIG_LIMIT = 10 * 1000 * 1000
#: Files of an index; the largest models have a few hundred.
FILE_LIMIT = 10_000
#: What PEFT calls the weights of a LoRA adapter: adapter_model.safetensors, adapter_model.bin.
ADAPTER = "adapter_model"
#: A second copy of the weights under the publisher's own names, beside the shards of Hugging Face.
DUPLICATE = "consolidated"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder at ``path``. Every method raises CheckpointError with one sentence for what it cannot use."""

    path: Path
    #: Whether links of files that are no weights may lead anywhere.
    follow_links: bool = False

    def check(self) -> None:
        if not self._exists():
            raise CheckpointError(f"{self.path} does not exist{self._on_the_hub()}")
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder: give the folder that holds config.json")
        snapshots = self.path / "snapshots"
        if snapshots.is_dir() and not (self.path / CONFIG).exists():
            found = ", ".join(str(p) for p in sorted(snapshots.iterdir())) or "there is none, so download it again"
            raise CheckpointError(f"{self.path} is a folder of the hub's cache: give one of its snapshots: {found}")
        if not any(self.path.iterdir()):
            raise CheckpointError(f"{self.path} is empty: give the folder that holds config.json")
        if not self._is_whole():
            begun = self.begun()
            what = f" ({begun})" if begun else ""
            raise CheckpointError(
                f"{self.path} is an unfinished output of ktforge{what}: run the same command again, which goes on "
                "where it stopped, or with --restart, which begins anew"
            )

    def _exists(self) -> bool:
        try:
            self.path.stat()
            if self.path.is_dir():
                next(self.path.iterdir(), None)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise CheckpointError(f"{str(self.path)[:200]} cannot be read: {error.strerror}") from error
        return True

    def _on_the_hub(self) -> str:
        """How to get what looks like the name of a model there: OWNER/NAME."""
        name = str(self.path)
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is None or self.path.parent.exists():
            return ""
        folder = self.path.name
        return f"; of a model on the Hugging Face Hub, `hf download {name} --local-dir {folder}` makes a folder to give"

    def begun(self) -> str | None:
        """What a run that was cut off, or still goes on, has made so far in this folder; None if there is none."""
        path = self.path / PARTIAL / JOURNAL
        if path.is_file() and path.stat().st_size > JSON_LIMIT:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: too many to be what its name says")
        journal = Journal(path)
        formats = journal.fingerprint.get("formats")
        if not journal.fingerprint:
            return None
        what = ", ".join(map(str, formats)) if isinstance(formats, list) else ""
        return f"{what or 'no layout'}; {counted(len(journal.written), 'tensor')} written"

    def _is_whole(self) -> bool:
        """Whether there is a checkpoint: one that is to be replaced stays until the new one is complete."""
        if (self.path / UNFINISHED).exists():
            return False
        return not (self.path / PARTIAL / JOURNAL).exists() or (self.path / CONFIG).exists()

    def _check_links(self, *paths: Path) -> None:
        check_links(self.path, paths, follow=self.follow_links)

    def config(self) -> dict[str, Any]:
        """The parsed config.json, with what Model Optimizer says beside it about quantisation; where there is none,
        what Mistral's own params.json says in its place.

        transformers writes Infinity where a limit of Mamba's layers is none.
        """
        self.check()
        own, params = self.path / CONFIG, self.path / PARAMS
        file = params if is_file(params) and not own.exists() else own
        self._check_links(file)
        config = read_json(file, CONFIG_LIMIT, any_number=True)
        if file == params:
            return from_params(config)
        beside = self.path / HF_QUANT_CONFIG
        if "quantization_config" not in config and beside.is_file():
            self._check_links(beside)
            config["quantization_config"] = read_json(beside, CONFIG_LIMIT)
        return config

    def documents(self) -> dict[str, str]:
        """What config.json and the files beside it that say what weights are hold: name → xxh3-128, in hex."""
        names = [CONFIG, HF_QUANT_CONFIG, MANIFEST, *(p.name for p in sorted(self.path.glob("*" + INDEX_SUFFIX)))]
        found = {}
        for path in (self.path / name for name in names if is_file(self.path / name)):
            with open_regular(path) as opened:
                found[path.name] = content_hash(opened)
        return found

    def open(self, relative: Path) -> BinaryIO:
        """Opens a file that is carried over. Raises OSError, and CheckpointError where it has become a link that is not
        to be followed: it is looked at again once it is open."""
        path = self.path / relative
        opened = open_regular(path)
        try:
            self._check_links(path)
            Identity.of(os.fstat(opened.fileno())).check(path, os.stat(path.resolve()))
        except BaseException:
            opened.close()
            raise
        return opened

    def weight_files(self, pattern: str, index_name: str) -> tuple[list[Path], dict[str, str] | None]:
        """The weight files and, if there is an index, its tensor name → file name.

        With an index, the files are those it names, and all must exist; without, all that match ``pattern``. Files of
        multi-token-prediction layers count in both cases, duplicates under the publisher's own names in neither.
        """
        self.check()
        index = self.path / index_name
        found = sorted(p for p in self.path.glob(pattern) if is_file(p) or p.is_symlink())  # no pipes
        if index.exists():
            weight_map = self._weight_map(index)
            named = [self.path / n for n in sorted(set(weight_map.values()))]
            known = set(named)
            unnamed = [p for p in found if p not in known and not p.name.startswith(DUPLICATE)]
            mtp = [p for p in unnamed if is_mtp_file(p)]
            strange = [p for p in unnamed if not is_mtp_file(p) and not p.name.startswith(ADAPTER)]
            begun = self._begun_downloads(pattern, named)
            problems = [
                begun.get(p) or f"{index} names {str(p.relative_to(self.path))[:200]}, which is missing: "
                "download it again"
                for p in named if not is_file(p)
            ]  # fmt: skip
            problems += [f"{p} is not in {index.name}: remove it, or get the index that belongs to it" for p in strange]
            files = [*named, *mtp]
        else:
            weight_map = None
            own = [p for p in found if not p.name.startswith(ADAPTER)]
            files = [p for p in own if not p.name.startswith(DUPLICATE)] or own
            begun = self._begun_downloads(pattern, files)
            problems = [*begun.values(), *missing_shards([*files, *begun])]
            problems += [
                _misspelled(p) for p in self._files() if fnmatchcase(p.name.lower(), pattern) and p not in found
            ]
            problems += [f"{p} is a link to nothing: download it again" for p in files if not p.exists()]
        problems += [
            _adapter_problem(p) for p in sorted(self.path.glob(f"{ADAPTER}*")) if p.suffix.lower() in WEIGHT_SUFFIXES
        ]
        problems += unfinished(p for p in files if is_file(p))
        problems += [pointer for p in files if (pointer := pointer_problem(p))]
        if problems:
            raise CheckpointError(*first_of(problems))
        if not files:
            self._point_below(pattern)
        return files, weight_map

    def _files(self) -> list[Path]:
        return sorted(p for p in self.path.iterdir() if is_file(p))

    def other_weights(self) -> list[str]:
        """What to say of a folder without weights that a loader reads: a sentence for each kind that it has."""
        nothing = f"{self.path} has no weights: neither *.safetensors nor pytorch_model*.bin"
        kinds: dict[str, list[str]] = {}
        for path in self._files():
            if path.suffix.lower() in WEIGHT_SUFFIXES:
                kinds.setdefault(_OTHER.get(path.suffix.lower(), _ELSEWHERE), []).append(path.name)
        found = [
            f"{nothing}, but {', '.join(names[:5])}{' …' if names[5:] else ''}: {mend}" for mend, names in kinds.items()
        ]
        return found or [f"{nothing}: download it again, with its weights"]

    def _begun_downloads(self, pattern: str, files: Sequence[Path]) -> dict[Path, str]:
        """Weight files that are not there yet under their names, or only in the index → what to say about each."""
        begun = {}
        for mark in sorted(p for p in self.path.iterdir() if is_mark(p.name)):
            file = mark.with_suffix("")
            wanted = fnmatchcase(file.name, pattern) and not file.name.startswith(DUPLICATE)
            if (wanted or file in files) and not is_file(file):
                begun[file] = sentence(file, mark.name)
        return begun

    def _point_below(self, pattern: str) -> None:
        """Raises CheckpointError where weights are in sub-folders only, and names those."""
        found = (p for depth in range(1, 4) for p in self.path.glob("*/" * depth + pattern))  # it may be a whole disk
        below = sorted(
            {p.parent for p in found if not any(part.startswith(".") for part in p.relative_to(self.path).parts)}
        )
        if below:
            folders = ", ".join(map(str, below[:5])) + (" …" if len(below) > 5 else "")
            raise CheckpointError(f"{self.path} has no index, and {pattern} only in sub-folders: give one of {folders}")

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not set(map(type, weight_map.values())) <= {str}:
            raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
        names = set(weight_map.values())
        if len(names) > FILE_LIMIT:
            raise CheckpointError(f"{index} names {len(names):,} files: too many to be the index of a checkpoint")
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise CheckpointError(f"{index} points outside its folder, to {name[:200]!r}")
        return weight_map

    def all_files(self) -> list[Path]:
        """In all folders, but for hidden ones; a folder that cannot be looked into would lose them without a word."""
        try:
            return sorted(NONE.files(self.path, hidden=False))
        except OSError as error:
            raise CheckpointError(
                f"{error.filename} cannot be looked into: {error.strerror}: make it readable, or move it elsewhere"
            ) from error

    def side_files(self) -> list[Path]:
        """Files to carry over unchanged, relative to the folder: all but weights, indexes, config.json, hidden ones and
        what a download leaves as long as it goes on."""
        found: list[Path] = []
        problems: list[str] = []
        for path in self.all_files():
            relative = path.relative_to(self.path)
            if not path.is_file():
                continue
            if path.suffix.lower() in WEIGHT_SUFFIXES or path.name.endswith(INDEX_SUFFIX) or is_mark(path.name):
                continue
            if pointer := pointer_problem(path):
                problems.append(pointer)
            if str(relative) not in (CONFIG, MANIFEST):
                found.append(relative)
        self._check_links(*(self.path / relative for relative in found))
        problems += unfinished(self.path / relative for relative in found)
        if problems:
            raise CheckpointError(*first_of(problems))
        return found


def _adapter_problem(file: Path) -> str:
    return (
        f"{file} is a LoRA adapter, which would be left out: merge the adapter first, with PEFT's merge_and_unload() "
        "and save_pretrained(), or move it elsewhere to convert the model without it"
    )


def _misspelled(file: Path) -> str:
    return f"{file} would not be read for the letters of its name: call it {file.name.lower()}"
