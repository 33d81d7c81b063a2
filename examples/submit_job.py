"""Submits a Ray job that answers a file of prompts on a running cluster, and shows its output.

    ray start --head --num-cpus 4
    python examples/submit_job.py http://127.0.0.1:8265 prompts.jsonl answers.jsonl

It does the same as `ray job submit --working-dir . -- python -m outrider.actors.job ...`, and its
exit code is 0 when every line was answered. Where the cluster asks for a token, this process must
have RAY_AUTH_MODE=token in its environment (README.md, On a running Ray cluster).
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient


def submit(address: str, source: Path, output: Path) -> bool:
    """Run the job to its end; True when every line was answered.

    Both files are read and written on the machine where the job runs.
    """
    client = JobSubmissionClient(address)
    command = ["python", "-m", "outrider.actors.job", "--config", "cluster.yaml"]
    command += ["--input", str(source.resolve()), "--output", str(output.resolve())]
    job = client.submit_job(entrypoint=shlex.join(command), runtime_env={"working_dir": "."})
    printed = ""
    while not (status := client.get_job_status(job)).is_terminal():
        logs = client.get_job_logs(job)
        print(logs.removeprefix(printed), end="", flush=True)
        printed = logs
        time.sleep(1)
    print(client.get_job_logs(job).removeprefix(printed), end="")
    print(f"{job}: {status}")
    return status == JobStatus.SUCCEEDED


if __name__ == "__main__":
    try:
        all_answered = submit(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except AuthenticationError:
        sys.exit("this cluster asks for a token: export RAY_AUTH_MODE=token (see README.md)")
    except ConnectionError as problem:
        sys.exit(str(problem))
    sys.exit(0 if all_answered else 1)
