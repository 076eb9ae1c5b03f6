"""Attacks on the command line: bad options, bad traces, bad directories, bad frames, signals.

Each is one line on standard error that names the culprit and exit status 2, and nothing is left half written.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_cache.cli import main
from tiered_cache.replay.traces import SAMPLE_PATH

REPLAY = ["replay", "--ray", "none", "--requests", "2"]
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


Refused = Callable[..., str]


@pytest.fixture
def refused(temporary: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must be refused with one line, which is returned; nothing else is said or left."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("tiered-cache: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert list(temporary.iterdir()) == []
        return err[len("tiered-cache: ") : -1]

    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk tier's directory with some frames; tests copy it."""
    directory = tmp_path_factory.mktemp("kept") / "tier"
    trace = directory.with_name("trace.jsonl")
    trace.write_text(json.dumps({**GOOD, "input_length": 1536, "hash_ids": [1, 2, 3]}) + "\n")
    assert main(["replay", "--ray", "none", "--host-bytes", "0", "--keep", str(directory), "--quiet", str(trace)]) == 0
    return directory


@pytest.fixture
def tier(kept: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "tier"
    subprocess.run(["cp", "-a", str(kept), str(copied)], check=True)
    return copied


def a_frame(tier: Path) -> Path:
    return next(path for path in sorted((tier / "entries").rglob("*.blob")) if "-rows-1024-" in path.name)


def descriptor(tier: Path) -> Path:
    return next((tier / "entries").glob("*/descriptor.blob"))


# ---- options


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--requests", "x"], "--requests"),
        (["--requests", "0"], "--requests"),
        (["--requests", "99999999999999999999"], "--requests"),
        (["--workers", "0"], "--workers"),
        (["--workers", "5000"], "workers 5000"),
        (["--block-tokens", "0"], "--block-tokens"),
        (["--block-tokens", "1000000000"], "block_tokens 1000000000"),
        (["--trace-block-tokens", "0"], "--trace-block-tokens"),
        (["--trace-block-tokens", "7"], "hash_ids: "),
        (["--seed", "-1"], "--seed"),
        (["--host-bytes", "3x"], "--host-bytes '3x'"),
        (["--host-bytes", "-1"], "--host-bytes '-1'"),
        (["--disk-bytes", ""], "--disk-bytes ''"),
        (["--worker-bytes", "1MiB"], " does not fit a worker"),
        (["--worker-bytes", "900TiB"], "memory"),
        (["--host-bytes", "0", "--disk-bytes", "0"], "neither host memory"),
        (["--geometry", "nope"], "'nope'"),
        (["--policy", "nope"], "'nope'"),
        (["--disk-sync", "nope"], "--disk-sync"),
        (["--nope"], "--nope"),
        (["--keep"], "--keep"),
        (["--keep", "x", "--disk-dir", "y"], "--keep"),
        (["--keep", "x", "--disk-bytes", "0"], "--keep"),
        (["--disk-dir", "nothing"], "--disk-dir nothing"),
        (["--object-url", "file:///tmp/x"], "object_bytes"),
        (["--object-bytes", "1GiB"], "object_url"),
        (["--object-url", "nope://x", "--object-bytes", "1GiB"], "nope://"),
        (["--report", "x.pdf"], "--report x.pdf"),
        (["a", "b"], "b"),
    ],
)
def test_a_bad_option_is_named(
    refused: Refused, arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "result.json"
    target.write_text("an older result")
    trace = [] if "b" in arguments else [str(SAMPLE_PATH)]
    assert named in refused("replay", "--ray", "none", *trace, "--json", str(target), *arguments)
    assert target.read_text() == "an older result"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "temporary"]


def test_an_engine_whose_packages_are_missing_is_named(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiered_cache.engines.transformers", None)
    assert "needs the transformers extra" in refused("replay", "--ray", "none", "--geometry", "transformers:model")


@pytest.mark.parametrize("arguments", [["nope"], ["verify"], ["inspect"], ["inspect", "a", "b"], ["replay", "--nope"]])
def test_a_bad_command_is_one_line(refused: Refused, arguments: list[str]) -> None:
    assert refused(*arguments)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:65536", "no-such-host.invalid:6379"])
def test_an_address_where_nobody_listens_is_named_at_once(refused: Refused, address: str) -> None:
    assert refused("replay", "--ray", address).startswith(f"--ray {address}: ")


@pytest.mark.parametrize("option", ["--json", "--keep", "--disk-dir"])
@pytest.mark.parametrize("what", ["below a file", "below nothing that can be made", "nul", "too long"])
def test_a_place_that_cannot_be_written_is_found_before_the_run(
    refused: Refused, tmp_path: Path, option: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_cache.cli.run_replay", lambda *_: pytest.fail("the replay was started"))
    (tmp_path / "file").write_text("mine")
    place = {
        "below a file": f"{tmp_path}/file/place",
        "below nothing that can be made": "/proc/self/no/place",
        "nul": f"{tmp_path}/a\0b",
        "too long": f"{tmp_path}/{'a' * 300}",
    }[what]
    assert option in refused(*REPLAY, option, place)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "temporary"]


def test_the_result_never_replaces_what_is_no_file(tmp_path: Path, refused: Refused) -> None:
    assert refused(*REPLAY, "--json", str(tmp_path)).startswith(f"--json {tmp_path}: ")
    assert main([*REPLAY, "--quiet", "--json", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("an older result")
    link.symlink_to(real)
    assert main([*REPLAY, "--quiet", "--json", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["requests"] == 2


@pytest.mark.parametrize("kind", ["link", "writable by others", "file"])
def test_a_directory_that_is_not_private_is_no_tier(refused: Refused, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "link":
        (tmp_path / "real").mkdir()
        place.symlink_to(tmp_path / "real")
    elif kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        place.chmod(0o777)
    assert str(place) in refused(*REPLAY, "--keep", str(place))


# ---- traces


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"{", "line 1: not JSON"),
        (json.dumps(GOOD).encode() + b"\n[]\n", "line 2: not a JSON object"),
        (json.dumps(GOOD).encode() + b"\n" + json.dumps({**GOOD, "input_length": -5}).encode(), "line 2: input_length"),
        (json.dumps({**GOOD, "hash_ids": [1, 2**40]}).encode(), "line 1: hash_ids"),
        (json.dumps({**GOOD, "input_length": 10**9}).encode(), "line 1: input_length"),
        (json.dumps({"timestamp": 0, "input_length": 1}).encode(), "block size unknown"),
        (json.dumps({"timestamp": 0, "hash_ids": [1]}).encode(), "line 1: input_length: missing"),
        (gzip.compress(json.dumps(GOOD).encode() * 999)[:-20], "line"),
        (b"\x1f\x8b\x08\x00 no gzip", "line 1"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(refused: Refused, tmp_path: Path, content: bytes, named: str) -> None:
    trace, target = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_bytes(content)
    message = refused("replay", "--ray", "none", str(trace), "--json", str(target), "--keep", str(tmp_path / "kept"))
    assert message.startswith(f"{trace}: ")
    assert named in message
    assert not target.exists()


def test_a_bad_line_behind_the_last_request_that_is_asked_for_does_no_harm(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text((json.dumps(GOOD) + "\n") * 2 + "{")
    assert main([*REPLAY, str(trace), "--quiet"]) == 0


@pytest.mark.parametrize("name", ["nothing", "a\0b", "a\nb", "a\udcffb", "."])
def test_a_trace_that_is_not_there_is_named(refused: Refused, tmp_path: Path, name: str) -> None:
    assert refused("replay", "--ray", "none", f"{tmp_path}/{name}")


# ---- directories and frames


@pytest.mark.parametrize("name", ["", "nothing", "file", "a\0b"])
def test_what_is_no_tier_is_not_verified(refused: Refused, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    message = refused("verify", str(tmp_path / name), "--json", str(tmp_path / "result"))
    assert "not a disk tier's directory" in message or "null byte" in message
    assert not (tmp_path / "result").exists()


def verify(tier: Path, tmp_path: Path) -> dict[str, str]:
    """The bad files below `entries`, and why."""
    target = tmp_path / "verified.json"
    status = main(["verify", str(tier), "--quiet", "--json", str(target)])
    bad = json.loads(target.read_text())["bad"]
    assert status == (1 if bad else 0)
    return {bad["path"]: bad["error"] for bad in bad}


def test_every_flipped_byte_of_a_frame_is_found(tier: Path, tmp_path: Path) -> None:
    path = a_frame(tier)
    sound = path.read_bytes()
    for position in [*range(0, 700, 7), *range(700, len(sound), 997), len(sound) - 1]:
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 0x10]) + sound[position + 1 :])
        assert list(verify(tier, tmp_path)) == [str(path.relative_to(tier))], position
    path.write_bytes(sound)
    assert verify(tier, tmp_path) == {}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def of_another_key(path: Path) -> None:
    other = next(found for found in path.parents[1].rglob("*-rows-512-*.blob"))
    path.write_bytes(other.read_bytes())


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    path.with_suffix(".moved").rename(path.parents[3] / "elsewhere")
    path.unlink()
    path.symlink_to(path.parents[3] / "elsewhere")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("attack", [truncate, empty, lengthen, huge, of_another_key, a_link, a_pipe])
def test_a_file_that_is_not_the_frame_of_its_name_is_found(
    tier: Path, tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    path = a_frame(tier)
    attack(path)
    bad = verify(tier, tmp_path)
    assert list(bad) == [str(path.relative_to(tier))]
    assert bad[str(path.relative_to(tier))].isprintable()


@pytest.mark.parametrize("name", ["stranger.blob", "stranger", "descriptor", "x/y/z/stranger.blob"])
def test_a_strange_file_is_found(tier: Path, tmp_path: Path, name: str) -> None:
    path = descriptor(tier).parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"what is this")
    assert list(verify(tier, tmp_path)) == [str(path.relative_to(tier))]


def test_without_its_descriptor_a_namespace_is_told_once_and_its_frames_are_still_checked(
    tier: Path, tmp_path: Path
) -> None:
    path, wrong = descriptor(tier), a_frame(tier)
    path.unlink()
    assert [*verify(tier, tmp_path)] == [str(path.relative_to(tier))]
    truncate(wrong)
    assert {*verify(tier, tmp_path)} == {str(path.relative_to(tier)), str(wrong.relative_to(tier))}


def test_a_forged_descriptor_is_found_and_changes_nothing_else(tier: Path, tmp_path: Path) -> None:
    path = descriptor(tier)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert list(verify(tier, tmp_path)) == [str(path.relative_to(tier))]


def test_what_a_live_tier_is_about_to_reuse_is_left_out(tier: Path, tmp_path: Path) -> None:
    """A file under an exclusive lock was deleted, and is being written again for another name."""
    path = a_frame(tier)
    truncate(path)
    script = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert verify(tier, tmp_path) == {}
        assert holder.stdin is not None
        holder.stdin.close()
    assert list(verify(tier, tmp_path)) == [str(path.relative_to(tier))]


def test_verify_reads_and_changes_nothing(tier: Path, tmp_path: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        return [(str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(tier.rglob("*"))]

    before = state()
    assert verify(tier, tmp_path) == {}
    assert state() == before


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\x89TCF\r\n\x1a\n" + b"\xff" * 100, b"\x89TCF\r\n\x1a\n\x02\0\0\0" + bytes(100)]
)
def test_what_is_no_frame_is_not_inspected(refused: Refused, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "frame.blob"
    path.write_bytes(content)
    assert refused("inspect", str(path)).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["", "nothing", "pipe", "a\0b"])
def test_what_cannot_be_read_is_not_inspected(refused: Refused, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused("inspect", str(tmp_path / name))


def test_a_store_that_is_not_there_or_holds_nothing_is_not_sound(refused: Refused, tmp_path: Path) -> None:
    assert "no such directory" in refused("verify", f"file://{tmp_path}/nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "empty").mkdir()
    assert "holds no frames" in refused("verify", f"file://{tmp_path}/empty")


@pytest.mark.parametrize(
    "names", [["ledger"], ["notes.txt"], ["entries/mine", "ledger"], ["tmp/", "model.safetensors"]]
)
def test_a_directory_with_other_things_in_it_becomes_no_tier(
    refused: Refused, tmp_path: Path, names: list[str]
) -> None:
    mine = tmp_path / "mine"
    for name in names:
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).mkdir() if name.endswith("/") else (mine / name).write_text("precious")
    mine.chmod(0o755)
    before = sorted(mine.rglob("*"))
    assert str(mine) in refused(*REPLAY, "--keep", str(mine))
    assert sorted(mine.rglob("*")) == before
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755
    assert all(path.is_dir() or path.read_text() == "precious" for path in before)


def test_what_a_file_system_puts_into_its_root_is_no_hindrance(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    (volume / "lost+found").mkdir(parents=True, mode=0o700)
    volume.chmod(0o700)
    (volume / ".snapshot").mkdir()
    assert main([*REPLAY, "--quiet", "--keep", str(volume)]) == 0
    assert main(["verify", str(volume), "--quiet"]) == 0


# ---- signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_replay_in_one_line_and_leaves_nothing(
    tmp_path: Path, temporary: Path, number: int, status: int
) -> None:
    script = "import sys; from tiered_cache.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "replay", "--ray", "none", "--json", str(tmp_path / "result.json")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline_s = time.monotonic() + 240
        while not list(temporary.rglob("entries")):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (status, b"")
    assert err.splitlines()[-1] == b"tiered-cache: interrupted"
    assert b"Traceback" not in err
    assert list(temporary.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_killed_replay_leaves_nothing_beside_its_result(tmp_path: Path, temporary: Path, option: str) -> None:
    script = "import sys; from tiered_cache.cli import main; sys.exit(main())"
    results = tmp_path / "results"
    results.mkdir()
    command = [sys.executable, "-c", script, "replay", "--ray", "none", option, str(results / "result.html")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 240
        while not list(temporary.rglob("entries")):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.kill()
    assert list(results.iterdir()) == []


# ---- results


@pytest.mark.parametrize("stdout", ["closed", "nobody reads it", "full"])
def test_a_result_that_cannot_be_told_is_no_success(tier: Path, stdout: str) -> None:
    script = "import sys; from tiered_cache.cli import main; sys.exit(main())"
    redirection = {"closed": ">&-", "nobody reads it": "| sleep 0", "full": ">/dev/full"}[stdout]
    shell = f'set -o pipefail; "$0" -c "$1" verify "$2" --quiet --json - {redirection}'
    command = ["bash", "-c", shell, sys.executable, script, str(tier)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert done.stderr.startswith("tiered-cache: ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_quiet_replay_does_not_speak_of_what_it_made_good(
    tier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (tier / "entries").rglob("*-rows-*.blob"):
        truncate(path)
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_text(json.dumps({**GOOD, "input_length": 1600, "hash_ids": [1, 2, 3]}) + "\n")
    arguments = ["replay", "--ray", "none", "--host-bytes", "0", "--keep", str(tier), "--json", str(result), str(trace)]
    assert main([*arguments, "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert sum(json.loads(result.read_text())["refusals_by_reason"].values()) > 0
