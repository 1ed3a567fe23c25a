"""Outputs in every layout, right and made wrong, for the tests of what judges them."""

import json
import shutil
from pathlib import Path

import checkpoints
import numpy as np
from ktforge_plugins import (
    CompressedTensors,
    Int4,
    Int8,
    KtAmx,
    KtFolderWriter,
    MoeToBf16,
    SafetensorsLoader,
    SafetensorsWriter,
)

import ktforge
from ktforge import Pipeline, Registry
from ktforge.contract.registry import load_file

THIRD_PARTY = Path(__file__).parent / "example_plugins/layout/ktforge_example.py"
LAYOUTS = {
    "kt-amx int4": (Int4(), KtAmx(threadpool_count=1)),
    "kt-amx int4, two nodes": (Int4(), KtAmx(threadpool_count=2)),
    "kt-amx int8": (Int8(), KtAmx(threadpool_count=4)),
    "kt folder": (Int4(), KtAmx(threadpool_count=2)),
    "rawint4": (Int4(group_size=32, narrow_range=True), CompressedTensors()),
    "zero points": (Int4(group_size=32, symmetric=False), CompressedTensors()),
    "int-quantized": (Int8(), CompressedTensors(format="int-quantized")),
    "third party": (Int8(group_size=32), None),
    "bf16": (None, None),
}


def registry():
    """What is installed, and a third party's layout."""
    found = Registry.installed()
    found.add(load_file(THIRD_PARTY), "example")
    return found


def convert(source, out, name, data=None, **options):
    """An output of ``source`` in one of LAYOUTS; of other ``data`` with its config if they are given."""
    quantizer, layout = LAYOUTS[name]
    if name == "third party":
        layout = registry().build("layout", "example", {})
    writer = KtFolderWriter if name == "kt folder" else SafetensorsWriter
    if data is not None:
        source = checkpoints.write(out.with_name("other"), data, json.loads((source / "config.json").read_text()))
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=quantizer, layout=layout,
        writer=writer(path=out),
    ).run(**options)  # fmt: skip
    return out


def verify(out, **options):
    return ktforge.verify(out, registry=registry(), **options)


def compare(one, other, **options):
    return ktforge.compare(one, other, registry=registry(), **options)


def forget_hashes(out):
    """As an earlier version left its manifest."""
    path = out / "ktforge_manifest.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "files"}))


def places(out):
    """Name of a stored tensor → the file that holds it, where it begins there, and its bytes."""
    found = {}
    for path in sorted(out.rglob("*")):
        if path.suffix == ".kt":
            found[str(path.relative_to(out))] = path, 0, path.stat().st_size
        elif path.suffix == ".safetensors":
            with path.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    found[name] = path, 8 + length + begin, end - begin
    return found


def is_expert(name):
    return "_exps" in name or ".experts." in name or name.endswith(".kt")


def is_scale(name):
    return is_expert(name) and ("scale" in name)


def is_code(name):
    return is_expert(name) and not is_scale(name) and "shape" not in name and "zero_point" not in name


def overwrite(place, change):
    """``change`` gets the bytes of a tensor and returns others."""
    path, offset, nbytes = place
    with path.open("r+b") as opened:
        opened.seek(offset)
        before = opened.read(nbytes)
        after = change(before)
        assert len(after) == nbytes and after != before
        opened.seek(offset)
        opened.write(after)


def with_bit_flipped(content, at=None):
    at = len(content) // 2 if at is None else at
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def first(out, wanted):
    return next(place for name, place in sorted(places(out).items()) if wanted(name))


def a_bit_of_a_code(out):
    overwrite(first(out, is_code), with_bit_flipped)


def a_scale(out):
    overwrite(first(out, is_scale), lambda content: content[:-4] + np.float32(3).tobytes())


def a_missing_expert(out):
    """Expert 1 of a layer is in no file; the index, if there is one, and all headers agree about that."""
    for path in out.rglob("_layer_1/*/*_1_*Byte_*.kt"):
        path.unlink()
    for path in out.glob("*.safetensors"):
        kept = {n: checkpoints.as_numpy(a) for n, a in checkpoints.load_file(path).items() if not _is_of_expert(n)}
        checkpoints.save_file(kept, path)
    index = out / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"] = {n: f for n, f in told["weight_map"].items() if not _is_of_expert(n)}
    index.write_text(json.dumps(told))


def _is_of_expert(name):
    return name.startswith(("blk.1.", "model.layers.1.")) and any(s in name for s in (".experts.1.", "exps.1."))


def exchanged_nodes(out):
    found = {n: p for n, p in sorted(places(out).items()) if is_code(n) and ("numa.0" in n or "_numa_0" in n)}
    name = next(iter(found))
    here, there = found[name], places(out)[name.replace("numa.0", "numa.1").replace("_numa_0", "_numa_1")]
    one, other = (p[0].read_bytes()[p[1] : p[1] + p[2]] for p in (here, there))
    overwrite(here, lambda _: other)
    overwrite(there, lambda _: one)


def a_truncated_file(out):
    path, *_ = first(out, is_code)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 7)


def a_lost_file(out):
    first(out, is_code)[0].unlink()


def a_stale_manifest(out):
    """Of an earlier output of the same kind in that folder, of other weights."""
    other = convert(out.parent / "source", out.with_name("earlier"), name_of(out), checkpoints.tensors(5))
    shutil.copy(other / "ktforge_manifest.json", out)


def name_of(out):
    return (out.parent / "layout").read_text()


#: What befalls files once they are written → how, and which check of ``verify`` finds it.
DAMAGES = {
    "a bit of a code": (a_bit_of_a_code, "hashes"),
    "a scale": (a_scale, "hashes"),
    "a missing expert": (a_missing_expert, "structure"),
    "NUMA parts exchanged": (exchanged_nodes, "hashes"),
    "a truncated file": (a_truncated_file, "files"),
    "a lost file": (a_lost_file, "files"),
    "a stale manifest": (a_stale_manifest, "files or hashes"),
}


def can_befall(damage, name):
    if damage == "a scale":
        return name != "bf16"
    return damage != "NUMA parts exchanged" or name in ("kt folder", "kt-amx int4, two nodes", "kt-amx int8")
