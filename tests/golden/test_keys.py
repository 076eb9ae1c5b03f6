"""Keys never change: digests, hashes and paths as an earlier build made them, in every process and interpreter.

`keys.json` holds them, and is never made anew. `SPECIFICATION` says with the standard library alone what a key is, and
is run by every other Python that is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import CHECKPOINT, FrameKey, Identity, PrefixChain, namespace_of


class Keys(TypedDict):
    """Everything that a key is made of, in hex."""

    identity: str
    geometry: str
    namespace: str
    hashes: list[str]
    tail: str
    paths: list[str]


BARE = Identity(bytes(range(32)), "reference", "7")
FULL = Identity(
    bytes(range(32)),
    "reference",
    "7",
    rounding="store",
    number_format="fp8_e4m3 per head",
    scales_digest=b"s" * 32,
    tokenizer_digest=b"t" * 32,
    adapter_digest=b"a" * 32,
    tenant_salt="Mieterin Ä".encode(),
)
GEOMETRY = Geometry(
    (
        Part("k", PartKind.ROWS, "bfloat16", (2, 64), layers=(0, 2), shard_axis=0),
        Part("near", PartKind.WINDOW, "uint8", (16,), window_tokens=8, content_dtype="float8_e4m3fn"),
        Part("state", PartKind.CARRY, "float32", (), layers=(1,)),
    ),
    block_tokens=4,
    shards=2,
)
TOKENS = np.array([0, 1, 4_294_967_295, 7, 8, 9, 10, 11, 12, 13], np.uint32)
MEDIA = {1: (b"m" * 32, b"n" * 32), 2: (b"o" * 32,)}

GOLDEN: dict[str, Keys] = json.loads((Path(__file__).parent / "keys.json").read_text())

SPECIFICATION = """
import hashlib, json, struct, sys

def H(tag, *parts):
    digest = hashlib.sha256(b"tiered-cache 1 ")
    for part in (tag.encode(), *parts):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()

def identity(full):
    fields = [("weights_digest", bytes(range(32))), ("engine", "reference"), ("engine_revision", "7"),
              ("rounding", "store" if full else ""), ("number_format", "fp8_e4m3 per head" if full else ""),
              ("scales_digest", b"s" * 32 if full else b""), ("tokenizer_digest", b"t" * 32 if full else b""),
              ("adapter_digest", b"a" * 32 if full else b""),
              ("tenant_salt", b"Mieterin \\xc3\\x84" if full else b"")]
    parts = []
    for name, value in fields:
        kind = b"bytes" if isinstance(value, bytes) else b"text"
        parts += [name.encode(), kind, value if isinstance(value, bytes) else value.encode()]
    return H("identity", *parts)

def geometry():
    names = ("name", "kind", "dtype", "shape", "layers", "window_tokens", "shard_axis", "content_dtype")
    parts = []
    for part in (("k", "rows", "bfloat16", "2,64", "0,2", "0", "0", ""),
                 ("near", "window", "uint8", "16", "0", "8", "None", "float8_e4m3fn"),
                 ("state", "carry", "float32", "", "1", "0", "None", "")):
        for name, value in zip(names, part):
            parts += [name.encode(), value.encode()]
    return H("geometry", (4).to_bytes(8, "little"), (2).to_bytes(8, "little"), *parts)

def keys(full):
    tokens = [0, 1, 4294967295, 7, 8, 9, 10, 11, 12, 13]
    media = {1: (b"m" * 32, b"n" * 32), 2: (b"o" * 32,)} if full else {}
    namespace = H("namespace", identity(full), geometry())
    hashes = [H("root", namespace)]
    for block in range(2):
        body = struct.pack("<4I", *tokens[4 * block : 4 * block + 4])
        hashes.append(H("block", hashes[-1], body, *media.get(block, ())))
    tail = H("tail", hashes[-1], struct.pack("<2I", *tokens[8:]), *media.get(2, ()))
    n, h, t = namespace.hex(), [x.hex() for x in hashes], tail.hex()
    paths = [
        "%s/%s/%s-%s-rows-8-1" % (n, h[2][:2], h[2], h[1]),
        "%s/%s/%s-%s-window.8-4-0" % (n, h[1][:2], h[1], h[0]),
        "%s/%s/%s-%s-checkpoint-10-0" % (n, t[:2], t, h[2]),
        "%s/%s/%s-%s-rows-4-0-000000000000002a" % (n, h[1][:2], h[1], h[0]),
    ]
    return {"identity": identity(full).hex(), "geometry": geometry().hex(), "namespace": n, "hashes": h, "tail": t,
            "paths": paths}

json.dump({"bare": keys(False), "full": keys(True)}, sys.stdout)
"""


def keys_of(identity: Identity, media: dict[int, tuple[bytes, ...]]) -> Keys:
    namespace = namespace_of(identity.digest(), GEOMETRY.fingerprint())
    chain = PrefixChain(namespace, 4, TOKENS, media)
    keys = [
        chain.key("rows", 8, 1),
        chain.key("window.8", 4, 0),
        chain.key(CHECKPOINT, 10, 0),
        chain.key("rows", 4, 0, 42),
    ]
    return {
        "identity": identity.digest().hex(),
        "geometry": GEOMETRY.fingerprint().hex(),
        "namespace": namespace.hex(),
        "hashes": [h.hex() for h in chain.block_hashes()],
        "tail": chain.prefix_hash(10).hex(),
        "paths": [key.path() for key in keys],
    }


def everything() -> dict[str, Keys]:
    return {"bare": keys_of(BARE, {}), "full": keys_of(FULL, MEDIA)}


def test_keys_are_what_an_earlier_build_made() -> None:
    assert everything() == GOLDEN


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295", "random"])
def test_keys_are_the_same_in_a_process_with_another_hash_seed(hash_seed: str) -> None:
    command = [sys.executable, __file__]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    assert json.loads(done.stdout) == GOLDEN


def other_interpreters() -> list[str]:
    """Every Python of another minor version that can be run here."""
    found = []
    for minor in range(8, 20):
        path = shutil.which(f"python3.{minor}")
        if path and minor != sys.version_info.minor:
            done = subprocess.run([path, "-c", "import hashlib"], capture_output=True, check=False, timeout=240)
            found += [path] if not done.returncode else []
    return found


def test_keys_are_what_the_specification_says_in_every_interpreter_that_is_there() -> None:
    for interpreter in (sys.executable, *other_interpreters()):
        command = [interpreter, "-c", SPECIFICATION]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        assert json.loads(done.stdout) == GOLDEN, interpreter


def test_an_optional_field_that_is_empty_is_as_if_it_were_not_there() -> None:
    empty = Identity(
        bytes(range(32)),
        "reference",
        "7",
        rounding="",
        number_format="",
        scales_digest=b"",
        tokenizer_digest=b"",
        adapter_digest=b"",
        tenant_salt=b"",
    )
    assert keys_of(empty, {}) == keys_of(BARE, {0: (), 1: (), 2: ()}) == GOLDEN["bare"]
    assert keys_of(BARE, {1: (b"",)}) != GOLDEN["bare"]  # a medium with an empty digest is a medium


def test_every_golden_path_is_that_of_its_key() -> None:
    for keys in GOLDEN.values():
        for path in keys["paths"]:
            assert FrameKey.parse(path).path() == path


if __name__ == "__main__":
    json.dump(everything(), sys.stdout)
