"""Outrider: Qwen3.5-class models with multi-token-prediction speculation, tensor-parallel on Ray.

    from outrider import Engine, Sampling

The folders of the project stand at the top of the repository; links beside this file make them
importable as outrider.actors, outrider.model, outrider.parallel and outrider.benchmarks. So no
folder of a user's can stand in for one of ours. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.actors.engine import Chunk, Completion, Engine, Grammar, RequestStats, Sampling

if (
    sys.argv[:1] == ["-m"]  # so it is while Python looks for the module to run
    and sys.orig_argv[sys.orig_argv.index("-m") + 1].startswith("outrider.")
    and Path.cwd() != Path(__file__).resolve().parents[1]
):
    # `python -m` puts the current folder first, and Ray a job's, which is the current one too, into
    # PYTHONPATH: a model's folder may hold a tokenizers.py.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path.cwd()]

__version__ = "0.1.0"

__all__ = ["Chunk", "Completion", "Engine", "Grammar", "RequestStats", "Sampling"]


def __getattr__(name: str) -> object:
    """The names of `__all__`, from outrider.actors.engine when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.actors import engine

    return getattr(engine, name)
