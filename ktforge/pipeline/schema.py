"""The JSON schema of pipeline files, for editors."""

from __future__ import annotations

from typing import Any

from ktforge.contract.plan import KEEP, Runtime
from ktforge.contract.registry import Registry
from ktforge.pipeline.file import _REQUIRED, _STAGE_KEYS


def json_schema(registry: Registry) -> dict[str, Any]:
    """JSON schema of pipeline files with the stages of ``registry``, for editors."""
    definitions: dict[str, Any] = {}
    choices: dict[str, list[Any]] = {key: [] for key in _STAGE_KEYS}
    for entry in registry.entries():
        schema = entry.cls.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(schema.pop("$defs", {}))
        schema["properties"] = {"use": {"const": entry.cls.name}, **schema.get("properties", {})}
        schema["required"] = ["use", *schema.get("required", [])]
        name = f"{entry.cls.stage}-{entry.cls.name}"
        definitions[name] = schema
        choices[entry.cls.stage].append({"$ref": f"#/$defs/{name}"})
    _add_rules(definitions, [e.cls.name for e in registry.entries() if e.cls.stage == "quantize"])
    properties: dict[str, Any] = {"version": {"const": 1}}
    for key in _STAGE_KEYS:
        one = {"oneOf": choices[key]}
        properties[key] = {"type": "array", "items": one} if key == "preprocess" else one
    properties["mtp"] = {"enum": ["omit", "keep"]}
    properties["runtime"] = Runtime.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ktforge pipeline",
        "type": "object",
        "additionalProperties": False,
        "required": list(_REQUIRED),
        "properties": properties,
        "$defs": definitions,
    }


def _add_rules(definitions: dict[str, Any], quantizers: list[str]) -> None:
    """Lets every quantizer of a schema carry ``rules``, each of which names a quantizer or ``keep``."""
    rule = {
        "type": "object",
        "properties": {"match": {"type": "string"}, "use": {"enum": [*quantizers, KEEP]}},
        "required": ["match", "use"],
    }
    for name in quantizers:
        definitions[f"quantize-{name}"]["properties"]["rules"] = {"type": "array", "items": rule}
