"""Coverage-guided fuzzing of one target, for as long as wanted: `pip install -e '.[test,fuzz]'`, then

    python tests/fuzz/run.py TARGET [--minutes 10] [--extra-bytes 256MiB] [--corpus DIRECTORY]

The process may map so much more memory than it has when it begins; an input that needs more is a failure like any other
exception that a target does not expect. What fails is written to `crash-*` in the current directory, and the exit
status is not 0. `--corpus` keeps what was found to reach new code, and starts with what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import atheris

with atheris.instrument_imports(include=["tiered_cache", "msgpack"]):
    from targets import TARGETS

    from tiered_cache.config import parse_size

MAX_BYTES = 1 << 14


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--extra-bytes", default="256MiB")
    parser.add_argument("--corpus", type=Path)
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    limit = _mapped_bytes() + parse_size(arguments.extra_bytes, "--extra-bytes")
    with contextlib.ExitStack() as stack:
        seeds = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, data in enumerate(target.corpus):
            (seeds / f"{number}").write_bytes(data)
        kept = arguments.corpus or seeds
        kept.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={round(60 * arguments.minutes)}", f"-max_len={MAX_BYTES}", "-timeout=20"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        atheris.Setup([sys.argv[0], *options, str(kept), str(seeds)], target.run)
        atheris.Fuzz()


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
