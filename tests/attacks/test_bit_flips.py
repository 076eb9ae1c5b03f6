"""Stored frames with one bit flipped, cut, made longer, or swapped: none is served, and no other frame suffers.

Each change is made behind the tier's back and met by all who read frames: the checks from outside (`verify`), the
look-up and restore of a request, and a request for another prompt, which must not notice. Then the sequence's worker
stores again what was set aside. `--flips N` makes N changes on a disk, in an object store in a directory and on an S3
server (10,000 flips and 2,000 cuts and additions in each: `--flips 12000`), and a tenth as many in memory.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from places import Place, Store, is_frame, open_place
from serving import BLOCK, DEADLINE_S, MODELS, compute, never_moved, some_tokens

from tiered_cache import frame
from tiered_cache.check import check_directory, check_tier
from tiered_cache.identity import FrameKey
from tiered_cache.policy.base import Hints
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import Prompt, SpillOffer
from tiered_cache.service.router import Placement
from tiered_cache.tiers.object_store import ObjectStoreTier

MODEL = MODELS[0]
PROMPTS = [some_tokens(count, seed=seed) for seed, count in enumerate((45, 32, 21))]
DURABLE = ("disk", "file", "s3")


class Victim:
    """A cluster that has stored some prompts' frames, and can store each again."""

    def __init__(self, place: Place, cluster: LocalCluster) -> None:
        self.place, self.cluster, self.store = place, cluster, Store(cluster, place.tier)
        self.offers = [self.keep(number) for number in range(len(PROMPTS))]
        self.good = self.store.frames()
        self.of: dict[str, int] = {}
        for number, prompt in enumerate(PROMPTS):
            prefixes = {*Prompt(prompt).chain(cluster.namespace, BLOCK).block_hashes()}
            prefixes.add(Prompt(prompt).chain(cluster.namespace, BLOCK).prefix_hash(len(prompt)))
            self.of |= {path: number for path in self.good if FrameKey.parse(path).prefix in prefixes}
        assert self.of.keys() == self.good.keys()
        assert len(self.good) >= 8

    def keep(self, number: int) -> SpillOffer:
        offer = compute(self.cluster, PROMPTS[number]).run.offer
        self.spill(offer)
        return offer

    def spill(self, offer: SpillOffer) -> None:
        (tiering,) = self.cluster.tierings.values()
        spilled = tiering.spill(offer, self.place.durability, Hints(), None, deadline_s=DEADLINE_S)
        assert [kept.tokens for kept in spilled.kept] == [len(offer.offer)]

    def ask(self, number: int) -> Placement:
        """A request that goes on with a prompt; what was restored is what was never moved."""
        cluster, prompt = self.cluster, PROMPTS[number]
        longer = np.concatenate([prompt, some_tokens(3, seed=99)])
        placed = cluster.router.place(cluster.namespace, Prompt(longer), len(longer), deadline_s=DEADLINE_S)
        worker = cluster.workers[placed.owner]
        if placed.restored is None:
            assert placed.lease is not None
            worker.cancel(placed.lease, deadline_s=DEADLINE_S)  # type: ignore[attr-defined]
        else:
            assert placed.restored.mark == never_moved(MODEL, prompt[: placed.restored.tokens]), "silently wrong"
            worker.release(placed.restored.source, deadline_s=DEADLINE_S)
        return placed

    def bad_ones(self) -> set[str]:
        """What `verify` says; that a place which dies with its node has no descriptors is no news."""
        tier = self.store.tier
        if self.place.tier == "disk":
            assert self.place.settings.disk_dir is not None
            checked = list(check_directory(self.place.settings.disk_dir))
            return {file.path.removeprefix("entries/").removesuffix(".blob") for file in checked if file.error}
        if isinstance(tier, ObjectStoreTier):
            with ThreadPoolExecutor(1) as executor:
                checked = list(check_tier(ObjectStoreTier(tier._store, 0, executor)))
        else:
            checked = list(check_tier(tier))
        return {file.path for file in checked if file.error and (self.place.outlives_a_node or is_frame(file.path))}

    def suffer(self, path: str, body: bytes) -> None:
        """One change: nobody is served it, it is set aside, nobody else notices, and it can be stored again."""
        assert body != self.good[path]
        self.store.write(path, body)
        assert self.bad_ones() == {path}
        number = self.of[path]
        placed = self.ask(number)
        assert placed.restored_tokens < len(PROMPTS[number]), "silently served"
        assert placed.refusals, "silently missed"
        other = (number + 1) % len(PROMPTS)
        untouched = self.ask(other)
        assert (untouched.restored_tokens, untouched.refusals) == (len(PROMPTS[other]), ())
        assert self.bad_ones() == set()
        left = self.store.frames()
        assert path not in left
        assert all(self.good[name] == there for name, there in left.items())
        assert {name for name in self.good if self.of[name] != number} <= left.keys()
        self.spill(self.offers[number])

    def settled(self) -> None:
        assert self.store.frames() == self.good
        assert all(self.ask(number).restored_tokens == len(prompt) for number, prompt in enumerate(PROMPTS))


@contextmanager
def victim(place: Place) -> Iterator[Victim]:
    with place.start(MODEL) as cluster:
        yield Victim(place, cluster)


def flipped(body: bytes, rng: random.Random) -> bytes:
    """One bit, in a third of all cases one of the header."""
    end = frame.header_bytes(body) if rng.random() < 1 / 3 else len(body)
    changed = bytearray(body)
    changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def resized(body: bytes, rng: random.Random) -> bytes:
    """Cut anywhere, or with something at its end: zeros, noise, or the frame once more."""
    if rng.random() < 0.5:
        return body[: rng.randrange(len(body))]
    return body + rng.choice([bytes(rng.randrange(1, 5000)), rng.randbytes(rng.randrange(1, 5000)), body])


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*DURABLE, "host", "memory"])
def test_no_changed_frame_is_served(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    changes = int(request.config.getoption("--flips")) // (1 if name in DURABLE else 10)
    seaweed = request.getfixturevalue("seaweed") if name == "s3" else None
    rng = random.Random(2 + len(name))
    with victim(open_place(name, tmp_path, seaweed)) as target:
        paths = sorted(target.good)
        done = {"flips": 0, "cuts and additions": 0}
        for number in range(changes):
            path = rng.choice(paths)
            cut = target.store.can_resize and number % 6 == 5
            target.suffer(path, (resized if cut else flipped)(target.good[path], rng))
            done["cuts and additions" if cut else "flips"] += 1
        target.settled()
        told = target.cluster.counters()[f"cache.frames.{target.place.tier}.quarantined"]
        assert told == changes
        print(f"{name}: {done}, 0 served, 0 other frames affected")


@pytest.mark.parametrize("name", ["disk", "file", "memory"])
def test_no_frame_is_served_under_anothers_name(name: str, tmp_path: Path) -> None:
    with victim(open_place(name, tmp_path)) as target:
        for path, other in itertools.permutations(sorted(target.good), 2):
            target.suffer(path, target.good[other])
        target.settled()
