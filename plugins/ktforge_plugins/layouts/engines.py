"""The command lines of engines that read ktforge's outputs. Not a plugin itself."""

from __future__ import annotations

import shlex
from pathlib import Path


def kt_command(method: str, source: Path | None, output: Path, threads: int | None, nodes: int | None) -> str:
    """SGLang's command with KTransformers' options: the original checkpoint is the model, and ``output`` its experts.

    ``threads`` and ``nodes`` that nothing decides are left to the user, in capitals.
    """
    words = ["python", "-m", "sglang.launch_server", "--model", str(source or output), "--kt-weight-path", str(output)]
    words += ["--kt-method", method, "--kt-cpuinfer", str(threads or "CORES")]
    return shlex.join([*words, "--kt-threadpool-count", str(nodes or "NUMA_NODES")])
