"""The API server with the tier: the second start answers from what the first has spilled, and sooner than by computing.

The model is a Llama that is large enough for a prompt to take a while. Both times are measured in the same, second
server, and printed: a prompt that it has to compute, and one of equal length that the first server had answered.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

from vllm_models import make_model, make_tokenizer
from vllm_runs import HERE, prompt_of, transfer_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT_TOKENS = 1540
SIZE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "initializer_range": 0.05}
START_S = 240.0


@contextmanager
def server(model: Path, transfer: dict[str, Any], log: Path) -> Iterator[int]:
    """A server's port, once it answers; it is told to end as an operator would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        until_s = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until_s, log.read_text()[-4000:]
            try:
                if get(port, "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.2)
        yield port
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def complete(port: int, prompt: list[int]) -> tuple[float, int, list[Any]]:
    """Seconds to the first token, how many prompt tokens were not computed, and the answer with its logprobs."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    begun_s, first_s, cached, said = time.perf_counter(), 0.0, 0, []
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event["choices"]:
            first_s = first_s or time.perf_counter() - begun_s
            choice = event["choices"][0]
            said.append((choice["text"], choice["logprobs"] and choice["logprobs"]["token_logprobs"]))
        if event.get("usage"):
            cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return first_s, cached, said


def events(port: int) -> dict[str, float]:
    """Our counters, as Prometheus sees them."""
    found = {}
    for line in get(port, "/metrics")[1].decode().splitlines():
        if line.startswith("vllm:tiered_cache_events_total{"):
            found[line.split('event="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


def test_a_second_start_answers_from_the_tier_and_sooner(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", **SIZE)
    make_tokenizer(model)
    transfer = transfer_of(tmp_path / "disk", disk_bytes="1GiB")
    transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 256 << 20
    warm_up, known, new = (prompt_of(seed, PROMPT_TOKENS) for seed in range(3))
    with server(model, transfer, tmp_path / "first.log") as port:
        complete(port, warm_up)
        computed_first_s, cached, said = complete(port, known)
        assert cached == 0
    with server(model, transfer, tmp_path / "second.log") as port:
        complete(port, prompt_of(3, PROMPT_TOKENS))
        computed_s, cached, _ = complete(port, new)
        assert cached == 0
        loaded_s, cached, said_again = complete(port, known)
        assert cached == PROMPT_TOKENS // 128 * 128
        assert said_again == said
        time.sleep(1.5)  # vLLM hands figures over once a second
        complete(port, warm_up[:8])
        counted = events(port)
    print(
        f"\nfirst token: {loaded_s:.3f} s loaded, {computed_s:.3f} s computed ({computed_first_s:.3f} s the first time)"
    )
    assert counted["hits.disk"] >= 1
    assert loaded_s < computed_s
