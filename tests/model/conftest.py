"""The checkpoint that most tests of whole requests run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests import checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and what is in it."""

    folder: Path
    text: dict
    weights: dict[str, Tensor]

    def oracle(self) -> Any:
        """transformers' own model with these weights."""
        return checkpoints.transformers_model(self.text, self.weights)


@pytest.fixture(scope="session")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoints.varied_weights: many distinct tokens, drafts that are right now and then."""
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.varied_weights(text)
    folder = checkpoints.write(tmp_path_factory.mktemp("varied"), text, weights)
    return Checkpoint(folder, text, weights)
