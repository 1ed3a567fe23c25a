from __future__ import annotations

from pathlib import Path

import checkpoints
import pytest

from ktforge import native


@pytest.fixture(params=[name for name, supported in native.isas().items() if supported])
def isa(request):
    """Each instruction set of this CPU in turn; the one in use before is put back."""
    before = native.current_isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """The small BF16 Qwen3-MoE in two shards with an index."""
    return checkpoints.write(
        tmp_path_factory.mktemp("source") / "qwen3", checkpoints.tensors(), checkpoints.config(), 2
    )


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"
