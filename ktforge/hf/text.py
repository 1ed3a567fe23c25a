"""Texts as sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ktforge.comparison.side import Side
from ktforge.errors import CheckpointError, ConfigError

#: Tokens that a model sees at once, each predicted from those before it.
CONTEXT = 512
#: Files that hold a tokenizer's words.
TOKENIZERS = ("tokenizer.*", "vocab*", "merges.txt", "*.tiktoken", "*spiece*", "*sentencepiece*", "tokenization_*.py")


def sample_text() -> str:
    """The text that comes with ktforge: parts of Ambrose Bierce's The Devil's Dictionary (1911, public domain)."""
    return (files("ktforge") / "data" / "text" / "devils-dictionary.txt").read_text("utf-8")


def read_texts(paths: Sequence[Path | str]) -> str:
    """The files' texts, one behind the other. Raises ConfigError for one that is no UTF-8 text or cannot be read."""
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"the text {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text in UTF-8 (byte {error.start:,})") from error
    return "\n\n".join(texts)


def tokenizer_of(*sides: Side, **kwargs: Any) -> Any:
    """The tokenizer in the first folder that has one. Raises CheckpointError if none has, or if it cannot be read."""
    for side in sides:
        # Of a folder without one transformers makes up a tokenizer that knows no word.
        if not any(found for pattern in TOKENIZERS for found in side.folder.glob(pattern)):
            continue
        try:
            return AutoTokenizer.from_pretrained(side.folder, **kwargs)
        except Exception as error:  # whatever is in such a file, and whatever a tokenizer of its own does
            said = " ".join(str(error).split())[:200]
            raise CheckpointError(f"transformers cannot read the tokenizer in {side.folder}: {said}") from error
    raise CheckpointError(f"{sides[0].folder} has no tokenizer: copy tokenizer.json and its like from the original")


def sequences(tokenizer: Any, text: str, tokens: int | None, context: int = CONTEXT) -> torch.Tensor:
    """``text`` as sequences [n, context] of tokens, ``tokens`` of them at most; each begins with the token that the
    tokenizer puts before a text, if it does. What does not fill a sequence is left out, unless it is all there is.

    Raises ConfigError for a text of fewer than 16 tokens, or a context or number of tokens that makes no sense.
    """
    if context < 16 or (tokens is not None and tokens < 16):
        raise ConfigError("a context, and the number of tokens, is 16 at least")
    first = tokenizer("").input_ids
    first = first[:1] if len(first) and first[0] == tokenizer.bos_token_id else []
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if tokens is not None:
        ids = ids[:tokens]
    if len(ids) < 16:
        raise ConfigError(
            f"the text has {len(ids)} tokens, and nothing can be said of fewer than 16: give a longer one"
        )
    each = min(context - len(first), len(ids))
    cut = [first + ids[start : start + each] for start in range(0, len(ids) - each + 1, each)]
    return torch.tensor(cut)
