"""Units are worked on in pieces, by any number of workers, and the bytes are those of the whole."""

import threading
import time
import tracemalloc
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16, EXPERTS, LAYERS, fuse
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter, SplitExperts
from pydantic import PrivateAttr

from ktforge import CheckpointError, OutputError, Pipeline, PluginError, Registry, hookimpl
from ktforge.contract.tensors import PackedSpec, TensorSpec
from ktforge.disk import writing
from ktforge.output import sink
from ktforge.output.folder import is_unfinished
from ktforge.output.hashing import Growing
from ktforge.planning import shares
from ktforge.planning.shares import Share
from ktforge.running import workers
from ktforge.running.workers import Workers, ordered
from ktforge.testing import MemoryLoader, MemoryWriter


class Seen:
    def __init__(self):
        self.written = []

    @hookimpl
    def ktforge_unit_written(self, spec, seconds):
        assert seconds > 0
        self.written.append(spec.name)


CONFIG = {"model_type": "qwen3_vl_moe_text"}


def pipeline(data, writer=None, **stages):
    loader = MemoryLoader(tensors=data, model=checkpoints.config(**CONFIG))
    defaults = {"preprocess": [SplitExperts(), MoeToBf16()], "quantize": Int4(), "layout": KtAmx()}
    return Pipeline(loader=stages.pop("loader", loader), writer=writer or MemoryWriter(), **{**defaults, **stages})


class Reads(MemoryLoader):
    """Notes what is read and released."""

    name: ClassVar[str] = "reads"
    _log: list[tuple] = PrivateAttr(default_factory=list)

    def read(self, spec):
        self._log.append(("read", spec.name, spec.shape, spec.offset))
        return super().read(spec)

    def release(self, spec):
        self._log.append(("release", spec.name, spec.shape, spec.offset))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("first", [SplitExperts(), MoeToBf16()])
def test_an_expert_of_a_fused_tensor_is_read_and_released_alone(transposed, first):
    other = MoeToBf16() if isinstance(first, SplitExperts) else SplitExperts()
    data = fuse(checkpoints.tensors(), transposed=transposed)
    loader = Reads(tensors=data, model=checkpoints.config(**CONFIG))
    made = pipeline(data, loader=loader, preprocess=[first, other])
    seen = Seen()
    made.run(workers=1, registry=Registry(seen))
    log = [entry for entry in loader._log if ".experts." in entry[1]]
    size = data["model.layers.0.mlp.experts.down_proj"][0].nbytes
    want = []
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for event in ("read", "release"):
                for tensor, times in (("gate_up_proj", 2), ("down_proj", 1)):
                    name = f"model.layers.{layer}.mlp.experts.{tensor}"
                    want.append((event, name, (1, *data[name].shape[1:]), times * size * expert))
    assert log == want
    assert sorted(seen.written) == sorted(u.source.name for u in made.plan().units), "once a unit, not once an expert"


def test_a_stage_that_looks_at_all_experts_gets_them_all():
    class Together(SplitExperts):
        name: ClassVar[str] = "together"
        rowwise: ClassVar[bool] = False

    class Inherits(SplitExperts):
        name: ClassVar[str] = "inherits"

    class WholeOnly(MemoryLoader):
        name: ClassVar[str] = "whole-only"

        def rows(self, spec, start, stop):
            return None

    data = fuse(checkpoints.tensors())
    want = pipeline(data)
    want.run()
    assert {u.share_rows for u in want.plan().units if u.source.fused} == {1}
    whole = WholeOnly(tensors=data, model=checkpoints.config(**CONFIG))
    stages = [pipeline(data, preprocess=[stage(), MoeToBf16()]) for stage in (Together, Inherits)]
    for made in (*stages, pipeline(data, loader=whole)):
        assert {u.share_rows for u in made.plan().units} == {0}
        made.run(workers=3)
        assert {n: a.tobytes() for n, a in made.writer.tensors.items()} == {
            n: a.tobytes() for n, a in want.writer.tensors.items()
        }


@pytest.mark.parametrize("loader", ["memory", "safetensors"])
def test_a_fused_layer_with_an_empty_tensor_is_worked_on_as_a_whole(tmp_path, loader):
    data = fuse(checkpoints.tensors())
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    data[name] = np.zeros((EXPERTS, 0), BF16)
    loaders = {
        "memory": lambda: MemoryLoader(tensors=data, model=checkpoints.config(**CONFIG)),
        "safetensors": lambda: SafetensorsLoader(
            path=checkpoints.write(tmp_path / "model", data, checkpoints.config(**CONFIG))
        ),
    }
    for writer in (MemoryWriter(), SafetensorsWriter(path=tmp_path / "out")):
        Pipeline(loader=loaders[loader](), preprocess=[MoeToBf16()], writer=writer).run(workers=2)
        made = writer.tensors if isinstance(writer, MemoryWriter) else checkpoints.load_output(tmp_path / "out")
        assert made[name].shape == (EXPERTS, 0)
        assert {n: a.tobytes() for n, a in made.items()} == {n: a.tobytes() for n, a in data.items()}


def test_every_preprocessor_of_ktforge_says_itself_that_experts_may_come_one_by_one():
    own = [e.cls for e in Registry.installed().entries() if e.cls.__module__.startswith("ktforge_plugins.preprocess.")]
    assert len(own) >= 7 and all(vars(stage).get("rowwise") is True for stage in own)


def run_fused(folder, out, monkeypatch, **options):
    """Experts stay fused and become BF16, everything else is copied, both in pieces; every tensor is noted at once."""
    monkeypatch.setattr(sink, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(shares, "COPIED", 5000)
    made = Pipeline(
        loader=SafetensorsLoader(path=folder), preprocess=[MoeToBf16()], writer=SafetensorsWriter(path=out)
    )  # fmt: skip
    return made.run(**options).plan


@pytest.fixture
def fused(tmp_path):
    data = {n: a.astype(np.float16) if ".experts." in n else a for n, a in fuse(checkpoints.tensors()).items()}
    return checkpoints.write(tmp_path / "fused", data, checkpoints.config(**CONFIG), 2)


@pytest.mark.parametrize("workers", [1, 5])
def test_a_tensor_that_is_written_in_pieces(fused, out, monkeypatch, workers):
    plan = run_fused(fused, out, monkeypatch, workers=workers)
    pieces = {u.source.name: u.shares for u in plan.units}
    assert pieces["model.layers.1.mlp.experts"] == EXPERTS and pieces["lm_head.weight"] > 6
    assert pieces["model.norm.weight"] == 1
    source, made = checkpoints.load_output(fused), checkpoints.load_output(out)
    for name, array in source.items():
        want = array.astype(BF16) if ".experts." in name else array
        assert made[name].dtype == BF16 and made[name].tobytes() == want.tobytes(), name


def test_pieces_that_are_cut_off_are_written_again_and_hashed_as_one(fused, out, monkeypatch):
    """Stopped within a tensor of which some pieces are there; --verify then reads what the others left."""
    write, left = writing.write_at, iter(range(40))

    def failing(*arguments):
        if next(left, None) is None:
            raise OSError(5, "Input/output error", "here")
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_at", failing)
        with pytest.raises(OutputError, match="here cannot be written"):
            run_fused(fused, out, monkeypatch, workers=3)
    assert is_unfinished(out)
    run_fused(fused, out, monkeypatch, workers=3, verify=True)
    source, made = checkpoints.load_output(fused), checkpoints.load_output(out)
    assert {n: a.tobytes() for n, a in made.items()} == {n: a.astype(BF16).tobytes() for n, a in source.items()}


def test_pieces_are_hashed_in_order_whatever_order_they_come_in(tmp_path):
    import xxhash

    data = np.random.default_rng(0).integers(0, 256, (7, 500_000), np.uint8)
    path = tmp_path / "file"
    path.write_bytes(b"header" + data.tobytes())
    with path.open("rb") as opened:
        growing = Growing(TensorSpec("x", data.dtype, data.shape))
        order = [3, 0, 6, 1, 2, 5, 4]
        done = []
        for row in order:
            found = growing.turn(row * 500_000)
            assert (found is not None) == (row in {0, 1, 2, 4})
            if found is not None:
                found.update(data[row].data)
            done.append(growing.add(row * 500_000, 500_000, found is not None, opened.fileno(), 6))
        with pytest.raises(PluginError, match="rows of x were written twice"):
            growing.turn(0)
    assert done == [False] * 6 + [True]
    assert growing.found.hexdigest() == xxhash.xxh3_128_hexdigest(data.tobytes())


def test_an_expert_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    """Of a fused layer, too: what is noted counts, not the unit."""
    data = fuse(checkpoints.tensors())
    folder, out = checkpoints.write(tmp_path / "model", data, checkpoints.config(**CONFIG)), tmp_path / "out"
    monkeypatch.setattr(sink, "SAVE_EVERY", 0.0)
    packed = []

    class Stops(KtAmx):
        def _quantise_and_pack(self, spec, unit, out):
            packed.append((unit.spec.layer, unit.spec.expert))
            if len(packed) == 3:
                raise CheckpointError("enough")
            super()._quantise_and_pack(spec, unit, out)

    def run(**options):
        loader, writer = SafetensorsLoader(path=folder), SafetensorsWriter(path=out)
        return pipeline(data, writer, loader=loader, layout=Stops()).run(workers=1, **options)

    with pytest.raises(CheckpointError, match="enough"):
        run()
    seen = Seen()
    run(registry=Registry(seen), verify=True)
    assert packed == [(0, 0), (0, 1), (0, 2), *[(0, e) for e in (2, 3)], *[(1, e) for e in range(EXPERTS)]]
    assert [n for n in seen.written if "experts" in n] == [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]


class Idle:
    """Counts the threads in which parts of one expert are packed."""

    def __init__(self, wanted):
        self.threads, self.met = set(), threading.Barrier(wanted)

    def layout(self):
        class Meets(KtAmx):
            name: ClassVar[str] = "meets"

            def _quantise_and_pack(this, spec, unit, out):
                self.threads.add(threading.get_ident())
                self.met.wait(timeout=30)
                super()._quantise_and_pack(spec, unit, out)

        return Meets(threadpool_count=2)


def test_workers_without_a_unit_help_with_the_parts_of_an_expert():
    """One expert of six parts and six workers: none gets on without the others."""
    data = {n: a for n, a in checkpoints.tensors().items() if ".experts.0." in n and "layers.0" in n}
    idle = Idle(6)
    loader = MemoryLoader(tensors=data, model=checkpoints.config(num_experts=1, num_hidden_layers=1))
    stages = {"preprocess": [MoeToBf16()], "quantize": Int4(), "layout": idle.layout()}
    made, alone = MemoryWriter(), MemoryWriter()
    Pipeline(loader=loader, writer=made, **stages).run(workers=6)
    assert len(idle.threads) == 6
    Pipeline(loader=loader, writer=alone, **{**stages, "layout": KtAmx(threadpool_count=2)}).run(workers=1)
    assert {n: a.tobytes() for n, a in made.tensors.items()} == {n: a.tobytes() for n, a in alone.tensors.items()}


def share(nbytes, limit_bytes=0):
    """As much of a share as the workers look at."""
    planned = SimpleNamespace(source=SimpleNamespace(nbytes=nbytes), working_bytes=limit_bytes)
    return Share(planned, planned)


def test_what_a_part_raises_ends_the_run():
    """Both threads are in parts that fail, so neither takes another before one of them has failed."""
    crew = Workers(2)
    begun, late = threading.Barrier(2), []

    def work(_):
        def fails():
            begun.wait(timeout=30)
            raise KeyError("oops")

        crew.together([fails, fails, *[lambda: late.append(None)] * 5])

    with pytest.raises(KeyError, match="oops"):
        crew.run([share(1)], work)
    assert not late, "those that have not begun are dropped"


def test_an_interrupt_of_the_stop_leaves_no_thread(monkeypatch):
    """Ctrl-C while the run waits, and again before the threads have been told: none may outlive the sink."""
    crew = Workers(2)
    stop, begun, interrupts = Workers._stop, threading.Event(), iter([KeyboardInterrupt])

    def interrupted(self):
        if threading.current_thread() is threading.main_thread():
            for interrupt in interrupts:
                raise interrupt
        stop(self)

    def wait(*arguments, **options):
        begun.wait(timeout=30)
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "_stop", interrupted)
    monkeypatch.setattr(workers, "wait", wait)
    done = []

    def work(_):
        begun.set()
        time.sleep(0.05)
        done.append(None)

    with pytest.raises(KeyboardInterrupt):
        crew.run([share(1)] * 100, work)
    assert not [t for t in threading.enumerate() if t.name.startswith("ktforge")] and len(done) < 100


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_limit_counts_what_waiting_threads_would_keep(in_parts):
    """All threads pack 1 MB of what they have read at the same moment; then one packs what the whole limit is for."""
    threads, one = 8, 1_000_000
    met = threading.Barrier(threads)
    crew = Workers(threads, memory_limit=threads * one)

    def pack(nbytes):
        return crew.buffers.of(PackedSpec((TensorSpec("x", np.dtype(np.int8), (nbytes,)),), "x"))

    def small(read):
        pack(one // 2)
        met.wait(timeout=30)

    def work(found):
        if found is large:
            pack(threads * one)
        elif in_parts:
            read = np.empty(threads * one // 2, np.int8)
            crew.together([partial(small, read) for _ in range(threads)])
        else:
            small(np.empty(one // 2, np.int8))

    large = share(1, threads * one)
    first = [share(1, threads * one)] if in_parts else [share(1, one)] * threads
    tracemalloc.start()
    try:
        crew.run([*first, large], work)
        assert tracemalloc.get_traced_memory()[1] < threads * one + 200_000
    finally:
        tracemalloc.stop()


def test_the_last_large_tensor_comes_first_and_nothing_else_moves():
    def sizes(given, workers):
        return [s.planned.source.nbytes for s in ordered([share(n) for n in given], workers)]

    assert sizes([1] * 10 + [30], 4) == [30] + [1] * 10
    assert sizes([30] + [1] * 10, 4) == [30] + [1] * 10
    assert sizes([1, 2, 3] * 5, 4) == [1, 2, 3] * 5
    assert sizes([1] * 10 + [30], 1) == [1] * 10 + [30]
    assert sizes([1] * 100 + [8] * 100, 2) == [1] * 100 + [8] * 100
    assert sizes([], 2) == []
