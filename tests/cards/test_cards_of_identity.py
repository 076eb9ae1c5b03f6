"""Cards 05, 06, 07, 08 and 21: nobody is given what another model, format, layout, adapter or tenant has stored."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from places import Place, Store, look_up
from serving import DEADLINE_S, MODELS, Served, never_moved, serve, some_tokens
from spilling import BLOCK, NO_HINTS, State, match, restore, spill
from spilling import some_tokens as some_prompt

from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import IdentityError, MissReason
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import Identity, PrefixChain, Tokens
from tiered_cache.service.local import InlineExecutor, LocalCluster
from tiered_cache.service.messages import Prompt, StateMark
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.service.router import RestoreRouter
from tiered_cache.tiers.base import Durability, GetRequest, PutItem

NODE = LocalCluster.NODE
MODEL = MODELS[0]
PROMPT = some_tokens(45)
LONGER = np.concatenate([PROMPT, some_tokens(5, seed=2)])


class Tenant:
    """A cluster as one kind of its workers sees it: to the helpers of `serving`, a cluster."""

    def __init__(self, cluster: LocalCluster, engine: ReferenceEngine, name: str) -> None:
        self.workers, self.tierings, self.name = cluster.workers, cluster.tierings, name
        self.owner = SequenceOwner(engine, name=name, node=NODE, tiering=cluster.tierings.__getitem__)
        cluster.workers[name] = self.owner
        self.router = RestoreRouter({name: self.owner}, cluster.tierings, InlineExecutor(), catalogue=cluster.catalogue)
        self.namespace = cluster.tiering.register(engine.identity, engine.geometry, deadline_s=DEADLINE_S)

    def ask(self, tokens: Tokens, durability: Durability) -> Served:
        return serve(self, tokens, durability)  # type: ignore[arg-type]


def engine(seed: int = 0, block_tokens: int | None = None, **identity: object) -> ReferenceEngine:
    """An engine that says so much else about itself; its state is that of the model and the seed."""
    made = ReferenceEngine(MODEL, seed=seed, block_tokens=block_tokens)
    made.identity = replace(made.identity, **identity)
    return made


def computed(engine: ReferenceEngine, tokens: Tokens) -> StateMark:
    sequence = engine.start(engine.reserve(len(tokens)))
    engine.extend(sequence, tokens)
    return StateMark(len(tokens), engine.digest(sequence), engine.output(sequence))


# Card 05


def test_card_05_other_weights_under_the_same_name_get_nothing_and_the_old_ones_get_theirs_back(place: Place) -> None:
    with place.start() as cluster:
        first = Tenant(cluster, engine(), "first")
        fine_tuned = Tenant(cluster, engine(seed=1), "fine-tuned")
        first.ask(PROMPT, place.durability)
        served = fine_tuned.ask(LONGER, place.durability)
        assert (served.placement.restored, served.placement.reason) == (None, MissReason.NOT_STORED)
        assert served.mark == computed(engine(seed=1), LONGER)
        updated = Tenant(cluster, engine(seed=2), "updated")  # the first one's weights, changed in place
        served = updated.ask(LONGER, place.durability)
        assert (served.placement.restored, served.placement.reason) == (None, MissReason.NOT_STORED)
        assert served.mark == computed(engine(seed=2), LONGER)
        back = Tenant(cluster, engine(), "back")
        served = back.ask(LONGER, place.durability)
        assert served.placement.restored_tokens == 45
        assert served.mark == never_moved(MODEL, LONGER)


# Card 06

FORMATS: dict[str, tuple[Mapping[str, object], str]] = {
    "8 bits": ({"number_format": "fp8_e4m3 per head"}, "number_format"),
    "scales": ({"scales_digest": bytes(range(32))}, "scales_digest"),
    "page size": ({"block_tokens": 8}, "block_tokens"),
}


@pytest.mark.parametrize("other", FORMATS)
def test_card_06_another_number_format_is_refused_by_name_before_a_byte_is_read(
    place: Place, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, named = FORMATS[other]
    with place.start() as cluster:
        sixteen = Tenant(cluster, engine(), "16 bits")
        sixteen.ask(PROMPT, place.durability)
        plan = look_up(cluster, sixteen.namespace, LONGER)
        assert plan is not None
        asked = engine(**change)  # type: ignore[arg-type]
        differences = cluster.cache.differences(asked.identity, asked.geometry)
        assert any(named in difference for difference in differences), differences
        tenant = Tenant(cluster, asked, other)
        with monkeypatch.context() as patch:
            patch.setattr(Store(cluster, place.tier).tier, "get", lambda *_: pytest.fail("bytes were read"))
            with pytest.raises(IdentityError):
                tenant.owner.inject(plan, Prompt(LONGER), 100, b"", deadline_s=DEADLINE_S)
            placed = tenant.router.place(tenant.namespace, Prompt(LONGER), 100, deadline_s=DEADLINE_S)
        assert (placed.restored, placed.reason) == (None, MissReason.NOT_STORED)
        assert tenant.router.counters()["misses.not_stored"] == 1


# Card 07


def heads(values: int, shards: int) -> Geometry:
    """So many values a token and rank: all of these hold as many bytes."""
    assert values * shards == 48
    return Geometry(
        (Part("k", PartKind.ROWS, "bfloat16", (values,)), Part("s", PartKind.CARRY, "float32", (values,))),
        BLOCK,
        shards=shards,
    )


def test_card_07_what_two_workers_stored_is_refused_to_one_and_to_four(place: Place) -> None:
    two = heads(24, 2)
    prompt = some_prompt(14)
    longer = np.append(prompt, prompt[:1])
    with place.cache() as cache:
        for geometry in (two, heads(48, 1), heads(12, 4)):
            cache.register(State(geometry, prompt).identity, geometry)
        spill(cache, State(two, prompt, rank=0), durability=place.durability)
        assert match(cache, two, longer).reason is MissReason.SHARD_MISSING
        spill(cache, State(two, prompt, rank=1), durability=place.durability)
        hit = match(cache, two, longer).hit
        assert hit is not None
        restore(cache, two, hit, prompt)
        for geometry in (heads(48, 1), heads(12, 4)):
            found = match(cache, geometry, longer)
            assert (found.hit, found.reason) == (None, MissReason.NOT_STORED)
            assert any("shards" in told for told in cache.differences(State(geometry, prompt).identity, geometry))


@pytest.mark.parametrize("place", ["disk", "file", "memory", "s3"], indirect=True)
def test_card_07_equal_length_under_the_right_name_is_not_enough(place: Place) -> None:
    """A half lies where a whole is looked for: as many bytes, and not them."""
    one, two = heads(48, 1), heads(24, 2)
    prompt = some_prompt(14)
    with place.cache() as cache:
        for geometry in (one, two):
            cache.register(State(geometry, prompt).identity, geometry)
        spill(cache, State(one, prompt), durability=place.durability)
        for rank in range(2):
            spill(cache, State(two, prompt, rank=rank), durability=place.durability)
        tier = next(level.tier for level in cache._levels if level.name == place.tier)
        mine, theirs = (State(geometry, prompt).chain.key("rows", BLOCK, 0).path() for geometry in (one, two))
        tier.delete([mine])
        (body,) = tier.get([GetRequest(theirs)])
        assert isinstance(body, memoryview)
        with tier.reserve([len(body)]) as room:
            tier.put([PutItem(mine, [body])], room)
        hit = cache.match(State(one, np.append(prompt, prompt[:1])).chain, NO_HINTS).hit
        assert hit is not None
        with pytest.raises(IdentityError):
            restore(cache, one, hit, prompt)


# Card 08


def test_card_08_salt_adapter_and_name_are_never_mixed_up(place: Place) -> None:
    x = b"x" * 32
    owners = {"salt x": {"tenant_salt": x}, "adapter x": {"adapter_digest": x}, "neither": {}}
    with place.start() as cluster:
        tenants = {name: Tenant(cluster, engine(**fields), name) for name, fields in owners.items()}  # type: ignore[arg-type]
        for tenant in tenants.values():
            assert tenant.ask(PROMPT, place.durability).placement.restored is None
        for tenant in tenants.values():
            placed = tenant.ask(LONGER, place.durability).placement
            assert placed.restored_tokens == 45
        for asker, stored in itertools.permutations(tenants.values(), 2):
            plan = look_up(cluster, stored.namespace, LONGER)
            assert plan is not None
            with pytest.raises(IdentityError):
                asker.owner.inject(plan, Prompt(LONGER), 100, b"", deadline_s=DEADLINE_S)


def test_card_08_no_joining_of_fields_makes_two_identities_equal() -> None:
    texts = ["", "x", "xx", "x,", ",x", "x\0", "\0x", "engine", "engine\0x"]
    identities = {
        Identity(b"w" * 32, engine, revision, rounding=rounding)
        for engine, revision, rounding in itertools.product([t for t in texts if t], texts, texts)
    }
    identities |= {Identity(b"w" * 32, "x", "", tenant_salt=text.encode()) for text in texts if text}
    assert len({identity.digest() for identity in identities}) == len(identities) > 600


# Card 21


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    """The keys of the golden file, and the program that makes them anew."""
    path = Path(__file__).parents[1] / "golden" / "test_keys.py"
    spec = importlib.util.spec_from_file_location("golden_keys", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_card_21_four_processes_and_every_interpreter_have_the_same_keys(golden: ModuleType) -> None:
    commands = [([sys.executable, golden.__file__], seed) for seed in ("0", "1", "31337", "random")]
    commands += [([path, "-c", golden.SPECIFICATION], "7") for path in golden.other_interpreters()]
    processes = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for command, seed in commands
    ]
    keys = [json.loads(process.communicate(timeout=240)[0]) for process in processes]
    assert len(keys) >= 4
    assert all(made == golden.GOLDEN for made in keys), "with and without the optional fields"


def test_card_21_another_scheme_of_keys_is_refused_when_it_is_first_heard_of(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not left with silent misses: its spill and its look-up are told what differs."""
    with place.start() as cluster:
        served = serve(cluster, PROMPT, place.durability)
        offer = served.run.offer
        seeded = PrefixChain(b"another seed".ljust(32), cluster.geometry.block_tokens, PROMPT)
        strange = replace(offer, offer=replace(offer.offer, hashes=tuple(seeded.block_hashes()), checkpoints=()))
        with pytest.raises(IdentityError, match=r"h\(0\) is not the namespace's root"):
            cluster.tiering.spill(strange, place.durability, Prompt(PROMPT).hints, None, deadline_s=DEADLINE_S)
        placed = cluster.workers["worker-0"]
        with pytest.raises(IdentityError, match=r"namespace is .* here, .* was asked for"):
            placed.bid(seeded.namespace, (), deadline_s=DEADLINE_S)
