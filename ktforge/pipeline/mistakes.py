"""What pydantic says about a pipeline file, in sentences of ktforge's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

Key = str | int


def by_key(error: ValidationError, data: Any) -> Iterator[tuple[tuple[Key, ...], list[Any]]]:
    """What pydantic says, by key: a value that may be one of several things gets an error for each of them, at a place
    that names the thing behind the key."""
    found: dict[tuple[Key, ...], list[Any]] = {}
    for problem in error.errors():
        node: Any = data
        where: list[Key] = []
        for key in problem["loc"]:
            if isinstance(node, list) and isinstance(key, int):
                node = node[key]
            elif isinstance(node, Mapping) and isinstance(key, str):
                node = node.get(key)
            else:
                break
            where.append(key)
        found.setdefault(tuple(where), []).append(problem)
    return iter(found.items())


#: pydantic's types of errors → what the value must be.
_WANTED = {
    **dict.fromkeys(["int_type", "int_parsing", "int_from_float", "int_parsing_size"], "a whole number"),
    **dict.fromkeys(["float_type", "float_parsing", "finite_number"], "a number"),
    **dict.fromkeys(["bool_type", "bool_parsing"], "true or false"),
    **dict.fromkeys(["list_type", "tuple_type"], "a list"),
    **dict.fromkeys(["dict_type", "model_type", "model_attributes_type"], "{key: value, …}"),
    "string_type": "text",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
}


def sentence(problems: Sequence[Any]) -> str:
    """One sentence for all that pydantic says about a value."""
    first = problems[0]
    if first["type"] == "missing":
        return "is missing"
    own = [str(p["ctx"]["error"]) for p in problems if p["type"] == "value_error"]
    if own:
        return own[0]
    wanted = dict.fromkeys(_wanted(problem, alone=len(problems) == 1) for problem in problems)
    value = repr(first["input"])
    return f"must be {' or '.join(wanted)}, not {value if len(value) <= 60 else value[:57] + '...'}"


def _wanted(problem: Any, alone: bool) -> str:
    wrong, context = problem["type"], problem.get("ctx", {})
    if wrong == "literal_error":
        return str(context["expected"]).replace("'", "")
    if wrong in _BOUNDS:
        return ("" if alone else "a number ") + _BOUNDS[wrong].format(**context)
    return _WANTED.get(wrong) or str(problem["msg"]).removeprefix("Input should be ")
