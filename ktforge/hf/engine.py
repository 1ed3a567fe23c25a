"""KTransformers' own kernels as the computation of experts, so that one hears the engine itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from ktforge.comparison.side import Side
from ktforge.errors import ConfigError
from ktforge.hf.sides import experts_of
from ktforge.readback.packed import stated_formats

#: Format of an output → what the engine calls its method.
METHODS = {"kt-amx-int4/1": "AMXINT4", "kt-amx-int8/1": "AMXINT8"}
#: Tokens that the engine is given at once.
CHUNK = 512


def check_kernels(kernels: str | None, activations: str) -> None:
    """Raises ConfigError for kernels that are none, or that compute otherwise than ``activations`` say."""
    if kernels not in (None, "kt-kernel"):
        raise ConfigError(f"kernels are 'kt-kernel', or ktforge's own if it is left out, not {kernels!r}")
    if kernels and activations != "exact":
        raise ConfigError("kt-kernel computes with int8 activations anyhow: leave `activations` out")


class Engine:
    """The experts of a kt-amx output in kt-kernel, on the CPU; a layer is loaded when it is first asked for, and stays.

    Raises ConfigError where kt-kernel is not installed, the CPU has not what its kernels need, or the output is of
    another format.
    """

    def __init__(self, side: Side, *, workers: int) -> None:
        formats = stated_formats(side.manifest)
        if len(formats) != 1 or formats[0] not in METHODS:
            raise ConfigError(
                f"kernels: kt-kernel computes with outputs of {' and '.join(METHODS.values())}, and {side.folder} is "
                f"{' and '.join(formats) or 'none of ktforge'}: leave `kernels` out"
            )
        if find_spec("kt_kernel") is None:
            raise ConfigError("kernels: kt-kernel is not installed: pip install --no-deps kt-kernel gguf")
        self.side, self._method, self._workers = side, METHODS[formats[0]], workers
        self._nodes = int(side.manifest["numa_nodes"])  # type: ignore[call-overload]
        self._counts, self._layers = experts_of(side), dict[int, tuple[Any, torch.Tensor]]()
        with _without_pinning():
            from kt_kernel.utils import amx

            if getattr(amx, self._method.replace("AMXINT", "AMXInt") + "_MOE", None) is None:
                raise ConfigError(f"kernels: kt-kernel has no {self._method} for this CPU, which needs AVX-512 or AMX")
            # Both are kept for the whole process: the loader of another folder, threads for other NUMA nodes.
            amx.AMXMoEWrapper._safetensor_loader_instance = amx.AMXMoEWrapper._cpu_infer_instance = None

    def computed(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts make of tokens [n, hidden], each routed to experts ``index`` [n, top_k]."""
        loaded = self._loaded(layer, index.shape[1])
        given = hidden.to(torch.bfloat16).contiguous()
        chosen, shares = index.to(torch.int64).contiguous(), weights.float().contiguous()
        out = torch.empty_like(given)
        for start in range(0, len(given), CHUNK):
            part = slice(start, start + CHUNK)
            count = torch.tensor([len(given[part])], dtype=torch.int32)
            addresses = (t[part].data_ptr() for t in (chosen, shares, given, out))
            loaded.cpu_infer.submit(loaded.moe.forward_task(count.data_ptr(), index.shape[1], *addresses, False))
            loaded.cpu_infer.sync()
        return out.to(hidden.dtype)

    def _loaded(self, layer: int, top: int) -> Any:
        if layer not in self._layers:
            from kt_kernel import KTMoEWrapper

            gate = self.side.places[layer, 0, "gate.weight"].tensor
            with _without_pinning():
                wrapper = KTMoEWrapper(
                    layer_idx=layer, num_experts=self._counts[layer], num_experts_per_tok=top,
                    hidden_size=gate.shape[1], moe_intermediate_size=gate.shape[0], gpu_experts_mask=None,
                    cpuinfer_threads=self._workers * self._nodes, threadpool_count=self._nodes,
                    weight_path=str(self.side.folder), chunked_prefill_size=CHUNK, method=self._method,
                    numa_nodes=_numa_nodes(self._nodes),
                )  # fmt: skip
                places = torch.arange(
                    self._counts[layer], dtype=torch.int64
                )  # each expert's own; the engine keeps the address
                wrapper.load_weights(places)
            self._layers[layer] = wrapper, places
        return self._layers[layer][0]


def _numa_nodes(count: int) -> list[int]:
    """Nodes to work on, those of this machine again and again if it has fewer."""
    there = sum(name.startswith("node") and name[4:].isdigit() for name in _listed("/sys/devices/system/node")) or 1
    return [number % there for number in range(count)]


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@contextmanager
def _without_pinning() -> Iterator[None]:
    """kt-kernel pins memory for a GPU, which torch refuses where there is none."""
    if torch.cuda.is_available():
        yield
        return

    def unpinned(make: Any) -> Any:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    with (
        mock.patch.object(torch, "zeros", unpinned(torch.zeros)),
        mock.patch.object(torch, "empty", unpinned(torch.empty)),
    ):
        yield
