"""A Ray job: answers a file of prompts on a running cluster, and follows its progress.

    ray start --head --num-cpus 4
    python examples/submit_job.py http://127.0.0.1:8265 prompts.jsonl answers.jsonl
The same as `ray job submit --working-dir . -- python -m outrider.actors.job ...`; it exits as the
job does.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient


def submit(address: str, source: Path, output: Path) -> bool:
    """True when every line was answered. The files are on the machine where the job runs."""
    client = JobSubmissionClient(address)
    words = ["python", "-m", "outrider.actors.job", "--config", "cluster.yaml"]
    words += ["--input", str(source.resolve()), "--output", str(output.resolve())]
    job = client.submit_job(entrypoint=shlex.join(words), runtime_env={"working_dir": "."})
    told = ""
    while not (status := client.get_job_status(job)).is_terminal():
        logs = client.get_job_logs(job)
        print(logs.removeprefix(told), end="", flush=True)
        told = logs
        time.sleep(1)
    print(client.get_job_logs(job).removeprefix(told), end="")
    print(f"{job}: {status}")
    return status == JobStatus.SUCCEEDED


if __name__ == "__main__":
    done = submit(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    sys.exit(0 if done else 1)
