"""`tiered-cache simulate` and the reports of both commands: what they write, and what they refuse."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tiered_cache.cli import main
from tiered_cache.replay.simulate import TierModel, simulate
from tiered_cache.replay.traces import SAMPLE_PATH, Trace

FIELDS = "policy capacity_bytes input_tokens hit_tokens frames_peak policy_bytes_peak elapsed_s"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four sessions that take turns, each a block of 512 tokens longer than the last."""
    path = tmp_path / "trace_b512.jsonl"
    with path.open("w") as file:
        for turn in range(4):
            for session in range(4):
                ids = [100 * session + block for block in range(turn + 1)]
                request = {"timestamp": 1000 * turn, "input_length": 512 * len(ids) + 9, "output_length": 5}
                print(json.dumps({**request, "hash_ids": ids}), file=file)
    return path


def test_every_policy_meets_every_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", str(SAMPLE_PATH), "--requests", "60", "--policy", "lru,s3fifo", "--capacity", "60GB,20GB"]
    assert main([*command, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert all(set(FIELDS.split()) <= result.keys() for result in document["results"])
    runs = [(result["policy"], result["capacity_bytes"]) for result in document["results"]]
    assert runs == [(policy, size * 10**9) for size in (20, 60) for policy in ("lru", "s3fifo")]
    requests = list(Trace(SAMPLE_PATH))[:60]
    expected = simulate(requests, 512, "lru", [TierModel("host", 20 * 10**9)])
    assert document["results"][0]["hit_tokens"] == expected.hit_tokens
    for bound, results in zip(document["bounds"], (document["results"][:2], document["results"][2:]), strict=True):
        assert max(result["hit_tokens"] for result in results) <= bound["upper_tokens"]
    assert document["settings"]["kv_bytes_per_token"] == 65_536
    assert re.search(rf"20.GB +lru +{expected.hit_rate:.2%}", err)


def test_sizes_of_the_model_and_its_blocks_are_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen blocks and their checkpoints, of 512 and 100 bytes: all that there is."""
    command = ["simulate", str(trace), "--policy", "lru", "--quiet", "--json", "-", "--kv-bytes-per-token", "1"]
    assert main([*command, "--checkpoint-bytes", "100", "--capacity", "9792"]) == 0
    (fits,) = json.loads(capsys.readouterr().out)["results"]
    assert fits["hit_tokens"] == 4 * 512 * (1 + 2 + 3)
    assert fits["removals_by_reason"] == {}
    assert main([*command, "--checkpoint-bytes", "100", "--capacity", "2000"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["removals_by_reason"]["host.evicted"] > 0
    assert main([*command, "--block-tokens", "1024", "--capacity", "1GB"]) == 0
    (coarse,) = json.loads(capsys.readouterr().out)["results"]
    assert (coarse["block_tokens"], coarse["hit_tokens"]) == (1024, 4 * 2 * 1024)


def test_a_disk_below_and_rates_give_the_time_that_is_saved(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", str(trace), "--policy", "lru", "--quiet", "--json", "-", "--capacity", "150MB"]
    saved = []
    for disk_rate in ("1TB", "2GB", "1MB"):
        more = ["--disk-bytes", "2GB", "--host-rate", "1TB", "--disk-rate", disk_rate, "--prefill-rate", "5000"]
        assert main([*command, *more]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        assert [tier["capacity_bytes"] for tier in result["tiers"]] == [150 * 10**6, 2 * 10**9]
        assert result["hit_tokens"] == 4 * 512 * (1 + 2 + 3)
        saved.append(result["saved_s"])
    assert 12_288 / 5000 > saved[0] > saved[1] > saved[2] >= 0


def test_reports_appear_whole_beside_the_result(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for command in (
        ["simulate", str(trace), "--capacity", "1GB,2GB", "--plot", str(out / "simulate.png")],
        ["replay", str(trace), "--ray", "none", "--disk-bytes", "0", "--plot", str(out / "replay.svg")],
    ):
        page = out / f"{command[0]}.html"
        assert main([*command, "--quiet", "--report", str(page)]) == 0
        assert page.read_text().endswith("</html>\n")
    assert {path.name for path in out.iterdir()} == {"simulate.html", "simulate.png", "replay.html", "replay.svg"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "lru,best"], "no policy 'best'; there are default"),
        (["--capacity", "1GB,0"], "--capacity '0': nothing fits in there"),
        (["--capacity", "1GB,big"], "--capacity 'big' is not a size"),
        (["--prefill-rate", "inf"], "--prefill-rate inf is not a rate"),
        (["--block-tokens", "500"], "block_tokens 500 is not a multiple of the trace's 512"),
        (["--plot", "plot.gif"], "--plot plot.gif: the name of a picture ends in .png or .svg"),
        (["--report", "no/such/directory/page.html"], "--report no/such/directory/page.html: No such file"),
    ],
)
def test_bad_input_is_one_line(
    trace: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--capacity", "1GB", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_without_matplotlib_a_report_is_refused_before_anything_runs(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("tiered_cache.report.drawing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    target = tmp_path / "result.json"
    command = ["simulate", str(trace), "--capacity", "1GB", "--json", str(target)]
    assert main([*command, "--report", str(tmp_path / "page.html")]) == 2
    assert "pip install 'tiered-cache[report]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]
    assert main([*command, "--quiet"]) == 0


def test_more_room_never_lowers_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "40", "--policy", "lru", "--capacity", "5GB,10GB,80GB", "--json", "-"]) == 0
    bounds = json.loads(capsys.readouterr().out)["bounds"]
    for less, more in pairwise(bounds):
        assert less["upper_tokens"] <= more["upper_tokens"]
    assert all(bound["feasible_tokens"] <= bound["upper_tokens"] for bound in bounds)
