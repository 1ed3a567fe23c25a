"""Types as a page says them: a reader of the reference need not know Python's notation for them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import annotated_types
import numpy as np

PLAIN = {
    str: "text", int: "a whole number", float: "a number", bool: "`true` or `false`", bytes: "bytes", Path: "a path",
    Any: "anything", Self: "itself, or a copy", np.ndarray: "an array", np.dtype: "a dtype", object: "anything",
    type(None): "nothing", BaseException: "an exception",
}  # fmt: skip
#: What is said of one of many.
MANY: dict[Any, str] = {
    Sequence: "a sequence of {}", list: "a list of {}", Iterable: "any number of {}", Iterator: "{}, one after another",
    Collection: "a collection of {}", Set: "a set of {}", set: "a set of {}", frozenset: "a set of {}",
    AbstractContextManager: "a context manager that gives {}",
}  # fmt: skip
LIMITS: dict[type, str] = {annotated_types.Gt: ", above {0.gt}", annotated_types.Ge: ", at least {0.ge}"}


def in_words(kind: Any) -> str:
    """A type as words, such as "a sequence of `UnitSpec`" or "a whole number above 0, or `channel`"."""
    origin, of = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Literal:
        return _or([f"`{value}`" for value in of])
    if origin in (Union, types.UnionType):
        return _or([in_words(one) for one in sorted(of, key=lambda one: one is type(None))])
    if origin is Annotated:
        return "".join([in_words(of[0]), *limits(of[1:])])
    if origin is tuple and of[-1] is ...:
        return f"several {_many(of[0])}"
    if origin is tuple:
        return f"two {_many(of[0])}" if of == (of[0], of[0]) else f"({', '.join(map(in_words, of))})"
    if origin in (Mapping, dict):
        return f"a mapping of {in_words(of[0])} to {in_words(of[1])}"
    if origin is Callable:
        return "a function"
    if origin is type:
        return f"a subclass of {in_words(of[0])}"
    if origin in MANY:
        return MANY[origin].format(_many(of[0]))
    if inspect.isclass(origin or kind):
        return f"`{(origin or kind).__name__}`"
    raise TypeError(f"docs/in_words.py has no words for {kind!r}")


def limits(metadata: Iterable[Any]) -> list[str]:
    """What pydantic keeps beside a type, as far as it is a limit."""
    return [LIMITS[type(limit)].format(limit) for limit in metadata if type(limit) in LIMITS]


def _many(kind: Any) -> str:
    """The plural of a type; the name of a class has none."""
    if get_origin(kind) is type:
        return f"subclasses of {in_words(get_args(kind)[0])}"
    article, _, noun = in_words(kind).partition(" ")
    return f"{noun}s" if kind in PLAIN and article in ("a", "an") else in_words(kind)


def _or(words: list[str]) -> str:
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]
