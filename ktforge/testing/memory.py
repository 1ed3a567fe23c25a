"""A checkpoint and an output in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, PrivateAttr, field_validator

from ktforge.contract.plan import Plan, Sink, Writer
from ktforge.contract.stages import Loader, PlanKey, alike
from ktforge.contract.tensors import BF16, DTYPES, PROJECTIONS, FileSpec, TensorSpec
from ktforge.testing.units import expert

_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


class MemoryLoader(Loader):
    """A checkpoint in memory: ``tensors`` by name, numpy's or torch's, and the content of its config.json."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    name: ClassVar[str] = "memory"
    tensors: dict[str, np.ndarray] = Field(exclude=True)
    model: dict[str, Any] = Field(exclude=True)

    @field_validator("tensors", mode="before")
    @classmethod
    def _arrays(cls, tensors: object) -> object:
        return {n: _array(t) for n, t in tensors.items()} if isinstance(tensors, Mapping) else tensors

    def config(self) -> Mapping[str, Any]:
        return self.model

    def scan(self) -> Iterator[TensorSpec]:
        for name, array in self.tensors.items():
            yield TensorSpec(name, array.dtype, array.shape)

    def read(self, spec: TensorSpec) -> np.ndarray:
        whole = self.tensors[spec.name]
        if spec.shape == whole.shape:
            return whole
        row = spec.offset // whole[:1].nbytes
        return whole[row : row + spec.shape[0]]

    def plan_key(self) -> PlanKey:
        return alike

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return spec.rows(start, stop)


def tiny_model(shape: tuple[int, int] = (256, 128), experts: int = 2, layers: int = 1) -> MemoryLoader:
    """A MoE model in memory: experts of ``shape`` (expert size, hidden size) and a few weights beside them, in BF16."""
    size, hidden = shape
    tensors = {"model.norm.weight": np.ones(hidden, BF16)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        tensors[f"{stem}.mlp.gate.weight"] = np.full((experts, hidden), 0.01 * layer, BF16)
        for number in range(experts):
            unit = expert(shape, seed=layer * experts + number)
            for projection in PROJECTIONS:
                name = f"{stem}.mlp.experts.{number}.{projection}_proj.weight"
                tensors[name] = unit.tensors[f"{projection}.weight"]
    model = {"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "hidden_size": hidden}
    return MemoryLoader(tensors=tensors, model={**model, "moe_intermediate_size": size})


def _array(tensor: Any) -> Any:
    """A torch tensor as an array with its bits; anything else as it is. Where there is a tensor, there is torch."""
    if type(tensor).__module__.partition(".")[0] != "torch":
        return tensor
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return flat.view(_BY_NAME[str(tensor.dtype).removeprefix("torch.")]).reshape(tuple(tensor.shape))


class MemoryWriter(Writer):
    """An output in memory: after a run, ``tensors`` maps names to arrays; after a failed one it is empty."""

    name: ClassVar[str] = "memory"
    _tensors: dict[str, np.ndarray] = PrivateAttr(default_factory=dict)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return self._tensors

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        return [FileSpec("memory", b"", tuple(tensors))]

    @contextmanager
    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> Iterator[Sink]:
        written: dict[str, np.ndarray] = {}

        class _Sink:
            def has(self, tensor: TensorSpec) -> bool:
                return False

            def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
                if row is None:
                    written[tensor.name] = data.copy()
                else:
                    whole = written.setdefault(tensor.name, np.empty(tensor.shape, tensor.dtype))
                    whole[row : row + len(data)] = data

        yield _Sink()
        self._tensors.clear()
        self._tensors.update(written)
