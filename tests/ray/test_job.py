"""The main job as a Ray job, handed in through Ray's job client."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from ray_serving import QUIET, SMALL, come_up, helpers_for_workers

COMMAND = Path(sys.executable).with_name("tiered-cache")


@pytest.fixture(scope="module")
def jobs() -> JobSubmissionClient:
    if ray.is_initialized():
        ray.shutdown()
    options = {**SMALL, "include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": 0}
    with helpers_for_workers():  # the next module may use it, too
        context = come_up(lambda: ray.init("local", **options, **QUIET))
    return JobSubmissionClient(f"http://{context.dashboard_url}")


def run_job(jobs: JobSubmissionClient, *arguments: object) -> tuple[JobStatus, int | None, str]:
    until_s = time.monotonic() + 240
    while True:
        try:
            job = jobs.submit_job(entrypoint=" ".join(map(str, [COMMAND, *arguments])))
            break
        except RuntimeError as error:  # Ray has come up, and the agent that takes jobs has not
            if "try again later" not in str(error) or time.monotonic() > until_s:
                raise
            time.sleep(0.5)
    while not (status := jobs.get_job_status(job)).is_terminal():
        assert time.monotonic() < until_s, jobs.get_job_logs(job)
        time.sleep(0.1)
    return status, jobs.get_job_info(job).driver_exit_code, jobs.get_job_logs(job)


def test_the_replay_is_a_job(jobs: JobSubmissionClient, tmp_path: Path) -> None:
    """On the Ray that runs the job, whose `RAY_ADDRESS` is set; with the same decisions as in one process."""
    found = tmp_path / "result.json"
    options = ("--requests", 25, "--disk-dir", tmp_path, "--quiet", "--json", found)
    status, exit_code, log = run_job(jobs, "replay", "--ray", "auto", *options)
    assert (status, exit_code) == (JobStatus.SUCCEEDED, 0), log
    result = json.loads(found.read_text())
    assert (result["requests"], result["mismatches"], result["failures_by_reason"]) == (25, 0, {})
    assert result["restores"] == result["lookups"] - result["misses"] > 0
    assert result["restores_on_other_worker"] > 0
    status, exit_code, log = run_job(jobs, "replay", "--ray", "none", *options)
    assert (status, exit_code) == (JobStatus.SUCCEEDED, 0), log
    assert json.loads(found.read_text())["decisions_digest"] == result["decisions_digest"]
    assert list(tmp_path.iterdir()) == [found]


def test_bad_input_fails_the_job_with_one_line(jobs: JobSubmissionClient, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": -1}\n')
    status, exit_code, log = run_job(jobs, "replay", tmp_path / "trace.jsonl", "--ray", "auto", "--quiet")
    assert (status, exit_code) == (JobStatus.FAILED, 2)
    assert "trace.jsonl" in log
    assert "Traceback" not in log
