"""params.json, which Mistral's own format has in the place of config.json.

Source of the names: mistral-inference's model arguments, and what vLLM makes of them for its models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARAMS = "params.json"
#: Their names → those of config.json.
_MODEL = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "hidden_dim": "intermediate_size"}
_MOE = {
    "num_experts": "num_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "num_experts_per_tok": "num_experts_per_tok",
}


def from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json would say of layers, sizes and experts; all else of ``params`` stays under its own name."""
    config = {_MODEL.get(name, name): value for name, value in params.items() if name != "moe"}
    moe = params.get("moe")
    more: dict[str, Any] = moe if isinstance(moe, dict) else {}
    return {**config, **{_MOE.get(name, name): value for name, value in more.items()}}
