"""What the commands share: options, exit codes, and which configuration is read.

    outrider generate, plan, serve ... (cli.py)      outrider job (job.py)      outrider bench
    options --> overrides of cluster.yaml under dotted keys

It imports nothing slow, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 the engine failed; 2 wrong option, configuration, prompt or checkpoint; "
    "130 interrupted by Ctrl-C."
)

Config = Annotated[
    Path | None, typer.Option(help="Configuration file.  [default: ./cluster.yaml if there is one]")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.SUB=VALUE", help="Any key of cluster.yaml; repeatable."),
]
Model = Annotated[str | None, typer.Option(help="Hugging Face folder or hub id.")]
DraftTokens = Annotated[
    str | None, typer.Option(metavar="K", help="Tokens drafted an iteration, 0 to 16, or auto.")
]
DraftBody = Annotated[str | None, typer.Option(help="Home of the draft body: local or sharded.")]
TensorParallel = Annotated[int | None, typer.Option(help="Ranks: a process and device each.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]


def config_file(given: Path | None) -> Path | None:
    """The file to read: the one given, or ./cluster.yaml if there is one."""
    from outrider.actors.cluster.spec import DEFAULT_FILE

    return given or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None)


def overrides(sets: Sequence[str] | None, named: Mapping[str, object]) -> dict[str, Any]:
    """What wins over cluster.yaml, under dotted keys.

    named: values of options of their own; None was not given, any other wins over --set.
    """
    from outrider.actors.cluster.reader import parse_set

    given = {key: value for key, value in named.items() if value is not None}
    return dict(map(parse_set, sets or [])) | given
