"""The Serve application: a conversation's next turn goes on from what was kept of the last, through HTTP."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ray import serve

from actors.cluster import RayCluster
from actors.serve import application
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import ConfigError
from tiered_cache.testing.object_servers import free_ports

MODEL = "qsa-ple-gdn:tiny"
Post = Callable[[object], tuple[int, Any]]


@pytest.fixture
def post(local_ray: None) -> Iterator[Post]:
    name, port = f"serve-{secrets.token_hex(4)}", free_ports(1)[0]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application({"engine": MODEL, "workers": 2, "host_bytes": "16MiB", "name": name}))

    def ask(body: object) -> tuple[int, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    yield ask
    serve.shutdown()
    RayCluster.connect(name).shut_down()


def what_follows(tokens: list[int], count: int) -> list[int]:
    engine = ReferenceEngine(MODEL)
    sequence = engine.start(engine.reserve(len(tokens) + count))
    engine.extend(sequence, np.array(tokens, dtype=np.uint32))
    return [int(token) for token in engine.generate(sequence, count)]


def test_the_next_turn_goes_on_from_what_was_kept(post: Post) -> None:
    first = list(range(3, 90))
    status, answer = post({"tokens": first, "max_tokens": 8, "session": "a"})
    assert (status, answer) == (200, {"tokens": what_follows(first, 8), "restored_tokens": 0})
    second = [*first, *answer["tokens"], 5, 6, 7]
    until_s = time.monotonic() + 120
    while True:  # it is kept after the answer
        status, answer = post({"tokens": second, "max_tokens": 4, "session": "a"})
        assert (status, answer["tokens"]) == (200, what_follows(second, 4))
        if answer["restored_tokens"]:
            break
        assert time.monotonic() < until_s
    assert answer["restored_tokens"] >= len(first) + 8
    for wrong, named in (
        ([], "JSON object"),
        ({"tokens": []}, "tokens"),
        ({"tokens": ["x"]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [1 << 31]}, "token id"),
        ({"tokens": [1], "max_tokens": 0}, "max_tokens"),
        ({"tokens": [1], "session": 7}, "session"),
    ):
        status, answer = post(wrong)
        assert status == 400
        assert named in answer["error"]


@pytest.mark.parametrize(
    "arguments", [{"nope": 1}, {"host_bytes": "x"}, {"workers": 0}, {"disk_bytes": "1GiB"}, {"object_bytes": -1}]
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        application(arguments)
