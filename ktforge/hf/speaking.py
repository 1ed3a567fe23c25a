"""A converted checkpoint that goes on with a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from ktforge.contract.registry import Registry
from ktforge.hf.model import model_of
from ktforge.hf.sides import open_original, open_side
from ktforge.hf.text import tokenizer_of


def speak(
    converted: Path | str,
    prompt: str,
    say: Callable[[str], None],
    *,
    original: Path | str | None = None,
    tokens: int = 200,
    chat: bool = True,
    integers: bool = False,
    engine: bool = False,
    cache: int,
    workers: int | None = None,
    registry: Registry | None = None,
    follow_links: bool = False,
    **kwargs: Any,
) -> None:
    """Gives ``say`` what the model says to ``prompt``, piece by piece, the likeliest token each time.

    ``chat``: the prompt is put into the chat template of the tokenizer, if it has one. ``integers``: activations in
    int8; ``engine``: kt-kernel's kernels. The rest is as in :func:`ktforge.hf.from_pretrained`, which also says what is
    raised.
    """
    side = open_side(converted, registry, follow_links=follow_links)
    rest = open_original(side, original, registry, follow_links=follow_links)
    tokenizer = tokenizer_of(side, rest, **kwargs)
    # Few CPUs multiply in BF16 as fast as in float32.
    model = model_of(
        side, rest, integers=integers, engine=engine, cache=cache, workers=workers, dtype=torch.float32, **kwargs
    )
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        given = tokenizer(prompt, return_tensors="pt")
    inputs = {name: given[name] for name in ("input_ids", "attention_mask") if name in given}
    with torch.inference_mode():
        model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None, top_k=None,
            streamer=_Streamer(tokenizer, say),
        )  # fmt: skip


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: Any, say: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._say(text)
