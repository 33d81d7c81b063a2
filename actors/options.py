"""What the commands share: options, exit codes, and which configuration file is read.

    outrider generate, plan, serve ... (cli.py)      outrider job (job.py)      outrider bench

It imports nothing slow, so that --help answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def config_file(given: Path | None) -> Path | None:
    """The file to read: the one given, or ./cluster.yaml if there is one."""
    from outrider.actors.cluster.spec import DEFAULT_FILE

    return given or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None)
