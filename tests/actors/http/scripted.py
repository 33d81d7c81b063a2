"""Ranks whose answers are known texts, and a server over them: what a model would say is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai

from outrider.model.step import Join
from outrider.model.text import Tokenizer
from tests.actors.conftest import Counting
from tests.actors.http.local_server import serving
from tests.test_end_to_end import TINY

IM_END = 2


class Scripted(Counting):
    """Every answer is `text`. Drafts are kept now and then, so chunks hold one token or more."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._ids = [*Tokenizer(TINY).encode(text), IM_END]

    def token(self, join: Join, position: int) -> int:
        return self._ids[position]


@asynccontextmanager
async def saying(
    text: str, folder: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, openai.AsyncOpenAI]]:
    """A server that answers everything with `text`, and clients of it."""
    limits: dict[str, Any] = {
        "vocab_size": 4096, "eos_ids": (IM_END,), "max_model_len": 2048, "num_pages": 800,
    }  # fmt: skip
    async with serving(runner=Scripted(text), folder=folder, chunk=2048, **limits) as (http, _, _):
        url = f"{http.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield http, client
