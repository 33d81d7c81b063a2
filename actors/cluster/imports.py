"""From where a process of ours imports: never from the folder of whoever started it.

    Ray: caller's script folder and current folder --> front of sys.path  --> taken out again
         a job's working_dir --> PYTHONPATH and the current folder        --> taken out again
A model's folder may hold a tokenizers.py. An actor calls this before it imports anything of ours or
of others, so its module imports inside methods. Imports nothing that Ray has not imported already.
"""

from __future__ import annotations

import sys
from pathlib import Path

HOME = Path(__file__).parents[3]
"""The folder that `outrider` is imported from: a checkout, or site-packages."""


def leave_callers_folders(path: list[str], ray_home: Path) -> None:
    """Take out of `path` (sys.path) what Ray put before its own folders for the caller's job.

    Folders of PYTHONPATH, of a runtime_env and of the installation stand behind Ray's and stay, as
    does HOME. ray_home: the folder of the package ray.
    """
    ours = [Path(entry).is_relative_to(ray_home) for entry in path]
    first = ours.index(True) if any(ours) else 0
    path[:first] = [entry for entry in path[:first] if Path(entry) == HOME]


def leave_current_folder(path: list[str]) -> None:
    """Take the current folder out of `path`, however it is written, unless it is HOME.

    Of a job it is the working_dir that was uploaded.
    """
    here = Path.cwd()
    if here != HOME.resolve():
        path[:] = [entry for entry in path if Path(entry).resolve() != here]


def isolate_worker() -> None:
    """Do both for this process, which Ray has started."""
    import ray

    leave_callers_folders(sys.path, Path(ray.__file__).parent)
    leave_current_folder(sys.path)
