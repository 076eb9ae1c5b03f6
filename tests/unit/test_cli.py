"""The command line: what each command prints, writes and returns."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import stat
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from tiered_cache import cli
from tiered_cache.cli import main
from tiered_cache.errors import CapacityError
from tiered_cache.identity import FrameKey
from tiered_cache.service.owner import SequenceOwner

REPLAY = ["replay", "--ray", "none", "--disk-bytes", "64MiB"]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the process puts temporary directories."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests of four sessions; 1 MiB of host memory holds about half of their state."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for turn in range(5):
            for session in range(4):
                ids = [100 * session + block for block in range(3 * turn + 3)]
                request = {"timestamp": turn, "input_length": 512 * len(ids) + 9, "output_length": 5, "hash_ids": ids}
                print(json.dumps(request), file=file)
    return path


def frames(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "entries").rglob("*.blob") if path.name != "descriptor.blob")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == version("tiered-cache") + "\n"


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    commands = re.findall(r"^. (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert commands[-4:] == ["replay", "simulate", "verify", "inspect"]


def test_replay_prints_a_table_and_writes_the_result(
    trace: Path, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    target.write_text("an older result")
    assert main([*REPLAY, str(trace), "--host-bytes", "1MiB", "--json", str(target), "--seed", "3"]) == 0
    result = json.loads(target.read_text())
    assert (result["requests"], result["restores"], result["mismatches"]) == (20, 16, 0)
    assert result["counters"]["cache.hits.disk"] > 0
    assert result["settings"]["cluster"]["worker"]["seed"] == result["settings"]["seed"] == 3
    out, err = capsys.readouterr()
    assert re.search(r"^requests +20 in [0-9.]+ s, ", out)
    assert re.search(rf"^hit rate +{result['hit_rate']:.2%}, {result['hit_tokens']:,} tokens", out, re.MULTILINE)
    assert re.search(r"^misses +4: not_stored 4", out, re.MULTILINE)
    assert re.search(r"^mismatches +0 of 16 restores", out, re.MULTILINE)
    assert err == ""
    assert list(temporary.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.suffix in {".json", ".part"}] == ["result.json"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


def test_the_bundled_sample_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--requests", "3", "--json", "-", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], Path(result["settings"]["trace"]).name[:21]) == (3, "mooncake_conversation")


def test_json_on_standard_output_is_alone_there(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, str(trace), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 20
    assert "hit rate" in err


def test_quiet_prints_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, str(trace), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "PLAIN_PROGRESS_S", 0.0)
    assert main([*REPLAY, str(trace)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert re.fullmatch(
        r"100%  0\.0 s left  20/20 requests  [\d,]+/s  hit rate \S+%  16 restores  0 mismatches", lines[-1]
    )


def test_a_mismatch_is_exit_status_1_and_is_shown(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inject = SequenceOwner.inject

    def wrong(owner: SequenceOwner, *arguments: object, **options: object) -> object:
        restored = inject(owner, *arguments, **options)
        object.__setattr__(restored, "mark", restored.mark._replace(digest="another"))
        return restored

    monkeypatch.setattr(SequenceOwner, "inject", wrong)
    target = tmp_path / "result.json"
    assert main([*REPLAY, str(trace), "--json", str(target)]) == 1
    result = json.loads(target.read_text())
    assert result["mismatches"] == result["restores"] == len(result["mismatched"]) > 0
    assert FrameKey.parse(result["mismatched"][0]["frames"][-1]).tokens == result["mismatched"][0]["tokens"]
    assert f"request {result['mismatched'][0]['request']}, " in capsys.readouterr().out


def test_requests_that_failed_are_exit_status_1(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, calls = SequenceOwner.run, iter(range(99))

    def sometimes(owner: SequenceOwner, *arguments: object, **options: object) -> object:
        if next(calls) == 5:
            raise CapacityError("no room")
        return run(owner, *arguments, **options)

    monkeypatch.setattr(SequenceOwner, "run", sometimes)
    assert main([*REPLAY, str(trace)]) == 1
    assert re.search(r"^failed +1: CapacityError 1", capsys.readouterr().out, re.MULTILINE)


def test_what_is_kept_is_sound_and_is_used_again(
    trace: Path, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    arguments = [*REPLAY, str(trace), "--host-bytes", "1MiB", "--keep", str(kept), "--quiet", "--json", "-"]
    assert main(arguments) == 0
    cold = json.loads(capsys.readouterr().out)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    found = frames(kept)
    assert len(found) == cold["counters"]["cache.frames.disk.put"] > 10
    assert list(temporary.iterdir()) == []

    assert main(["verify", str(kept), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["checked"], json.loads(out)["bad"]) == (len(found) + 1, [])
    assert err.endswith(": 0 bad\n")

    assert main(arguments) == 0
    warm = json.loads(capsys.readouterr().out)
    assert warm["hit_tokens"] > cold["hit_tokens"]
    assert warm["verified_by_recomputing"] > 0


def test_a_bad_frame_is_one_short_line(trace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    arguments = [*REPLAY, str(trace), "--host-bytes", "0", "--keep", str(kept)]
    assert main(arguments) == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    path = frames(kept)[0]
    key = FrameKey.parse(str(path.relative_to(kept / "entries")).removesuffix(".blob"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert main(arguments) == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"tier disk: {key.short()} is set aside: ")
    assert re.search(r"checksum|padding", line)
    assert len(line) < 160


def test_the_disk_tier_can_be_elsewhere_and_leaves_nothing_there(trace: Path, tmp_path: Path, temporary: Path) -> None:
    where = tmp_path / "nvme"
    where.mkdir()
    (where / "other").write_text("mine")
    assert main([*REPLAY, str(trace), "--host-bytes", "0", "--disk-dir", str(where), "--quiet"]) == 0
    assert [path.name for path in where.iterdir()] == ["other"]
    assert list(temporary.iterdir()) == []


def test_inspect_prints_the_header(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    assert main([*REPLAY, str(trace), "--host-bytes", "0", "--keep", str(kept), "--quiet"]) == 0
    rows = next(path for path in frames(kept) if "-rows-1024-0" in path.name)
    assert main(["inspect", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "span       tokens 512 to 1,024" in out
    assert rows.name[:64] in out
    assert re.search(r"attn\.k +bfloat16 +2 x 512 x 1 x 4 +BF16_SPLIT +8,192 +[45],\d{3} +1\.[45]\d", out)

    sound = rows.read_bytes()
    for position in (len(sound) // 2, len(sound) - 1):
        rows.write_bytes(sound[:position] + bytes([sound[position] ^ 4]) + sound[position + 1 :])
        assert main(["inspect", str(rows)]) == 1
        out, err = capsys.readouterr()
        assert "span       tokens 512 to 1,024" in out
        assert err.startswith(f"tiered-cache: {rows}: ")
    rows.write_bytes(sound + b"\0")
    assert main(["inspect", str(rows)]) == 1
    assert str(len(sound)) in capsys.readouterr().err


def test_an_object_store_below_the_nodes_is_used_and_verified(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store"
    below = ["--host-bytes", "1MiB", "--disk-bytes", "0", "--object-url", url, "--object-bytes", "64MiB"]
    arguments = ["replay", "--ray", "none", str(trace), *below, "--quiet", "--json", "-"]
    assert main(arguments) == 0
    cold = json.loads(capsys.readouterr().out)
    assert cold["mismatches"] == 0
    assert main(["verify", url, "--quiet"]) == 0
    assert main(arguments) == 0
    warm = json.loads(capsys.readouterr().out)
    assert warm["hit_tokens"] > cold["hit_tokens"]


def test_verify_names_each_bad_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    assert main([*REPLAY, str(trace), "--host-bytes", "0", "--keep", str(kept), "--quiet"]) == 0
    first, second, *_ = frames(kept)
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes()[:200] + b"\xff" + second.read_bytes()[201:])
    assert main(["verify", str(kept)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in out[:2]] == [str(path.relative_to(kept)) for path in (first, second)]
    assert out[-1].endswith(": 2 bad")

    target = tmp_path / "result.json"
    assert main(["verify", str(kept), "--quiet", "--json", str(target)]) == 1
    result = json.loads(target.read_text())
    assert capsys.readouterr() == ("", "")
    assert [bad["path"] for bad in result["bad"]] == [str(path.relative_to(kept)) for path in (first, second)]
    assert all(bad["error"] for bad in result["bad"])


def test_a_signal_that_was_lost_is_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loses_it(*_: object) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        assert threading.Event().wait(60)

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(cli, "TIDY_S", 0.05)
    monkeypatch.setattr(cli, "run_replay", loses_it)
    assert main([*REPLAY, "--requests", "1", "--quiet"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "tiered-cache: interrupted\n"
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_in_compiled_code_ends_a_command_like_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def returns_a_result_with_an_exception_set(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

    monkeypatch.setattr(cli, "run_replay", returns_a_result_with_an_exception_set)
    assert main([*REPLAY, "--requests", "1", "--quiet"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "tiered-cache: interrupted\n"
