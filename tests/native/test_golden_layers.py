"""Whole layers, converted: every file is the one that kt-kernel itself wrote, on every instruction set of this CPU."""

import hashlib
import json
from functools import cache
from pathlib import Path

import checkpoints
import pytest
from golden_inputs import golden_input
from ktforge_plugins import Int4, Int8, KtAmx, KtFolderWriter

from ktforge import Pipeline
from ktforge.testing import MemoryLoader

CASES = json.loads((Path(__file__).parents[1] / "golden" / "kt_kernel.json").read_text())["cases"]
QUANTIZERS = {4: Int4(), 8: Int8()}


@cache
def layer(first_seed, experts, size, hidden):
    """The weights of a layer by name; every width and number of nodes is made from the same."""
    return {
        checkpoints.expert_name(0, expert, projection): golden_input(first_seed + 10 * expert + number, *shape)
        for expert in range(experts)
        for number, (projection, shape) in enumerate(
            {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}.items()
        )
    }


def test_all_are_there():
    assert sum(len(case["files"]) for case in CASES) == 420


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "{expert_size}x{hidden_size}-int{bits}-{threadpool_count}".format(**c)
)
def test_a_layer_equals_the_files_of_kt_kernel(isa, out, case):
    experts, size, hidden = case["experts"], case["expert_size"], case["hidden_size"]
    model = checkpoints.config(
        num_hidden_layers=1, num_experts=experts, moe_intermediate_size=size, hidden_size=hidden
    )  # fmt: skip
    Pipeline(
        loader=MemoryLoader(tensors=layer(case["first_seed"], experts, size, hidden), model=model),
        quantize=QUANTIZERS[case["bits"]], layout=KtAmx(threadpool_count=case["threadpool_count"]),
        writer=KtFolderWriter(path=out),
    ).run()  # fmt: skip
    made = {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*.kt")}
    assert made == case["files"]
