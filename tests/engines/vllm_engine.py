"""One vLLM engine in a process of its own: `python vllm_engine.py SPEC.json RESULT.json`.

The spec has `family`, `model`, `settings` of `LLM`, its `transfer` config or null, and `steps`: each answers a prompt
or does something to the tier (`STEPS`). The result has the answers and the tier's counters.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiered_cache.errors import TieredCacheError

TOKENS = 6


class Engine:
    """A vLLM engine, its scheduler in this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else each worker wants a NUMA node
        import vllm_cpu_shim

        vllm_cpu_shim.patch(spec["family"])
        from vllm import LLM

        settings: dict[str, Any] = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 2048,
            "disable_log_stats": False,
            "enable_prefix_caching": True,
            "seed": 0,
            **spec.get("settings", {}),
        }
        if spec.get("transfer"):
            settings["kv_transfer_config"] = spec["transfer"]
        self.llm = LLM(spec["model"], **settings)
        self.core = self.llm.llm_engine.engine_core
        self.connector = self.core.engine_core.scheduler.connector
        self.tier = getattr(self.connector, "tier", None)
        self._hung = threading.Event()

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=5, detokenize=False)
        begun_s = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): value.logprob for token, value in step.items()} for step in output.outputs[0].logprobs
            ],
            "cached_tokens": output.num_cached_tokens,
            "seconds": time.perf_counter() - begun_s,
            "first_token_s": output.metrics.first_token_latency if output.metrics else None,
        }

    def settle(self, _: object) -> None:
        """Wait until everything that was computed is kept."""
        for executor in (self.tier._copies, self.tier._keeps, self.tier._keeps):
            executor.submit(int).result(60)

    def hang(self, calls: list[str]) -> None:
        """From now on these calls of the disk tier do not come back."""
        disk = self._disk()
        for call in calls:
            setattr(disk, call, lambda *_: self._hung.wait())

    def limit_files(self, bytes_: int) -> None:
        """From now on a write beyond so many bytes of a file fails, as on a full disk."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))

    def fill(self, directory: str) -> None:
        """Take all room that is left on a filesystem."""
        with suppress(OSError), (Path(directory) / "others").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def command(self, arguments: list[str]) -> None:
        subprocess.run(arguments, check=True, capture_output=True, timeout=300)

    def reach(self, _: object) -> None:
        """Wait until there is a catalogue that answers."""
        until_s = time.monotonic() + 300
        while True:
            try:
                self.tier._bridge.unpin(0, 0, deadline_s=30.0)
            except TieredCacheError:
                assert time.monotonic() < until_s
                time.sleep(0.1)
            else:
                return

    def remove(self, directory: str) -> None:
        shutil.rmtree(directory)

    def kill(self, _: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _disk(self) -> Any:
        tier = next(level.tier for level in self.tier.store.cache._levels if level.name == "disk")
        while hasattr(tier, "inner"):  # what keeps its deadlines and counts its calls
            tier = tier.inner
        return tier


STEPS: dict[str, Callable[[Engine, Any], Any]] = {
    name: getattr(Engine, name)
    for name in ("answer", "settle", "hang", "limit_files", "fill", "command", "reach", "remove", "kill")
}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(spec)
    answers = []
    for name, argument in spec["steps"]:
        answer = STEPS[name](engine, argument)
        if answer is not None:
            answers.append(answer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.core.shutdown()
    import vllm_cpu_shim

    return {
        "answers": answers,
        "counters": engine.tier.counters() if engine.tier is not None else {},
        "stored": vllm_cpu_shim.STORED,
        "loaded": vllm_cpu_shim.LOADED,
    }


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, repeat=True)  # into the log, if it hangs
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # threads that a test has hung
