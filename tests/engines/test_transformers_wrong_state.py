"""State that is not the right one: refused on its way out of a tier, and, forced past it, another answer each time.

The second half is why the first is needed: every wrong state here has the right names, dtypes and sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the environment of requirements-transformers.txt")
pytest.importorskip("transformers", reason="needs the environment of requirements-transformers.txt")

from round_trip import AHEAD, CASES, DEADLINE_S, DTYPES, go_on, tokens  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from tiered_cache import frame  # noqa: E402
from tiered_cache.cache import PlannedFrame  # noqa: E402
from tiered_cache.config import ClusterSettings, TierSettings  # noqa: E402
from tiered_cache.engines.base import FrameName  # noqa: E402
from tiered_cache.engines.transformers import TransformersEngine  # noqa: E402
from tiered_cache.errors import BlobError, MissReason, StateError  # noqa: E402
from tiered_cache.identity import CHECKPOINT, FrameKey  # noqa: E402
from tiered_cache.policy.base import Hints  # noqa: E402
from tiered_cache.service.local import LocalCluster  # noqa: E402
from tiered_cache.service.messages import Prompt  # noqa: E402
from tiered_cache.service.owner import SequenceOwner  # noqa: E402
from tiered_cache.testing.engine_suite import Frames, export, frames_needed, restore  # noqa: E402
from tiered_cache.tiers.base import Durability  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STOP, STALE = 45, 32
"""Where the state is taken, and an earlier checkpoint of the same prompt."""
RIGHT, OTHER = 1, 2
"""Seeds of two prompts."""
REPRESENTATIVE = {
    "llama-float32",
    "gemma3-bfloat16",
    "qwen4_exp-bfloat16",
    "glm5_next-bfloat16",
    "deepseek_v4-bfloat16",
}


def cases() -> Iterator[Any]:
    for case in CASES:
        yield pytest.param(case, marks=() if case in REPRESENTATIVE else pytest.mark.slow)


@pytest.fixture(scope="module", params=list(cases()))
def engine(request: pytest.FixtureRequest) -> TransformersEngine:
    torch.set_num_threads(1)
    family, dtype = request.param.split("-")
    return TransformersEngine(tiny_model(family, DTYPES[dtype]), block_tokens=16, staging_slots=64)


def computed(engine: TransformersEngine, seed: int, *, last_token_twice: bool = False) -> int:
    """A sequence of one of the prompts, with its checkpoint at `STALE` staged."""
    prompt = tokens(STOP, seed)
    handle = engine.start(engine.reserve(STOP + 1 + AHEAD))
    for piece in (prompt[:STALE], prompt[STALE:], prompt[-1:] if last_token_twice else prompt[:0]):
        engine.extend(handle, piece)
        if engine.tokens(handle) == STALE:
            engine.stage(handle)
    return handle


# -- on the way out of a tier


class Tampering:
    """A node's tiering service whose answers are changed on their way."""

    def __init__(self, service: Any, change: Callable[[FrameKey, Any], Any]) -> None:
        self._service = service
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def fetch(self, frames: tuple[PlannedFrame, ...], bytes_max: int, *, deadline_s: float) -> list[Any]:
        bodies = self._service.fetch(frames, bytes_max, deadline_s=deadline_s)
        return [self._change(planned.key, body) for planned, body in zip(frames, bodies, strict=False)]


def section(body: Any, name: str) -> slice:
    """Where a frame's section lies."""
    (found,) = [s for s in frame.read_header(body).sections if s.name == name]
    return slice(found.offset, found.offset + found.stored_bytes)


def changed(body: Any, where: slice, content: Any) -> Any:
    copy = np.array(body)
    assert copy[where].tobytes() != bytes(content.tobytes()), "the change changes nothing"
    copy[where] = content
    return copy


def test_the_tier_s_reader_refuses_it(engine: TransformersEngine) -> None:
    settings = ClusterSettings(workers=1, tiers=TierSettings(host_bytes=64 << 20))

    def worker(name: str, node: str, tiering: Any, *_: Any) -> SequenceOwner:
        return SequenceOwner(engine, name=name, node=node, tiering=tiering)

    with LocalCluster(settings, worker) as cluster:
        owner, tiering = cluster.workers["worker-0"], cluster.tierings[cluster.NODE]
        bodies: dict[int, dict[tuple[str, int], Any]] = {}
        for seed in (RIGHT, OTHER):
            prompt = Prompt(tokens(STOP, seed))
            placed = cluster.router.place(cluster.namespace, prompt, STOP, deadline_s=DEADLINE_S)
            ran = owner.run(placed.lease, prompt, (STALE,), deadline_s=DEADLINE_S)
            kept = tiering.spill(ran.offer, Durability.HOST, Hints(), None, deadline_s=DEADLINE_S).kept
            assert [k.tokens for k in kept] == [STALE, STOP]
            owner.release(ran.source, deadline_s=DEADLINE_S)
            chain = prompt.chain(cluster.namespace, 16)
            names = {*frames_needed(engine.geometry, STALE), *frames_needed(engine.geometry, STOP)}
            keys = {name: chain.key(name.group, name.tokens, 0) for name in names}
            found = tiering.cache.fetch(tuple(keys.values()), 1 << 30)
            bodies[seed] = {tuple(name): np.array(body) for name, body in zip(keys, found, strict=True)}

        checkpoint = (CHECKPOINT, STOP)
        carries = [part.name for part in engine.geometry.carries]
        part = carries[-1] if carries else "values"
        where = section(bodies[RIGHT][checkpoint], part)
        if carries:
            stale = bodies[RIGHT][CHECKPOINT, STALE]
            content = stale[section(stale, part)]
        else:
            content = bodies[OTHER][checkpoint][section(bodies[OTHER][checkpoint], part)]
        swapped = bodies[RIGHT][checkpoint][where].view(np.uint16).byteswap().view(np.uint8)
        twice = np.array(bodies[RIGHT][checkpoint])

        def only(name: tuple[str, int], body: Any) -> Callable[[FrameKey, Any], Any]:
            return lambda key, stored: body if (key.group, key.tokens) == name else stored

        attacks = {
            f"{name} of another prefix": only(name, body)
            for name, body in bodies[OTHER].items()
            if FrameName(*name) in frames_needed(engine.geometry, STOP)
        } | {
            "rows without the rest": only(checkpoint, MissReason.LOST),
            "a stale component": only(checkpoint, changed(twice, where, content)),
            "byte-swapped": only(checkpoint, changed(twice, where, swapped)),
        }
        free = engine.bytes_free()
        asked = Prompt(np.concatenate((tokens(STOP, RIGHT), tokens(AHEAD, 3))))
        for what, change in attacks.items():
            cluster.tierings[cluster.NODE] = Tampering(tiering, change)
            placed = cluster.router.place(cluster.namespace, asked, STOP + AHEAD, deadline_s=DEADLINE_S)
            assert placed.restored is None, what
            assert placed.refusals, what
            owner.cancel(placed.lease, deadline_s=DEADLINE_S)
            assert engine.bytes_free() == free, what
        cluster.tierings[cluster.NODE] = tiering
        placed = cluster.router.place(cluster.namespace, asked, STOP + AHEAD, deadline_s=DEADLINE_S)
        assert placed.restored is not None
        assert placed.restored.tokens == STOP
        owner.release(placed.restored.source, deadline_s=DEADLINE_S)


def test_a_state_one_token_ahead_cannot_pass_for_this_one(engine: TransformersEngine) -> None:
    handle = computed(engine, RIGHT, last_token_twice=True)
    if engine.geometry.carries:
        with pytest.raises(StateError):
            export(engine, handle, [FrameName(CHECKPOINT, STOP)])
    ahead = export(engine, handle, frames_needed(engine.geometry, STOP + 1))
    with pytest.raises(StateError):
        restore(engine, ahead, STOP, STOP + AHEAD)
    engine.release(handle)


# -- forced past it


UNREAD = {"DeepseekV4ForCausalLM": {"window.values"}}
"""What a model keeps and never looks at: there the keys of a sliding layer are its values, too."""


class Answers:
    """What the right state answers, and whether another one does."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.ahead = tokens(AHEAD, 3)
        self.right = self.frames(RIGHT)
        self.expected = self.logits(self.right)

    def frames(self, seed: int, **how: bool) -> Frames:
        handle = computed(self.engine, seed, **how)
        stop = self.engine.tokens(handle)
        frames = export(self.engine, handle, frames_needed(self.engine.geometry, stop))
        self.engine.release(handle)
        return frames

    def logits(self, frames: Frames) -> list[Any]:
        handle = restore(self.engine, frames, STOP, STOP + AHEAD)
        logits = go_on(self.engine, handle, self.ahead, (1, 1, 4, 1, 1, 1))
        self.engine.release(handle)
        return logits

    def same(self, frames: Frames) -> bool:
        """Whether a state goes on like the right one; one that the engine itself refuses does not."""
        try:
            return all(torch.equal(a, b) for a, b in zip(self.logits(frames), self.expected, strict=True))
        except BlobError:
            return False

    def with_part(self, name: FrameName, part: str, array: Any) -> Frames:
        return {**self.right, name: {**self.right[name], part: array}}


def test_forced_in_it_changes_the_answer(engine: TransformersEngine) -> None:
    answers = Answers(engine)
    assert answers.same(answers.right)
    other, twice = answers.frames(OTHER), answers.frames(RIGHT, last_token_twice=True)
    assert not answers.same(other)
    unread = UNREAD.get(type(engine.model).__name__, set())
    unnoticed = []
    for name, arrays in answers.right.items():
        if answers.same({**answers.right, name: other[name]}):
            unnoticed.append(f"{name} of another prefix")
        for part, array in ((p, a) for p, a in arrays.items() if p not in unread):
            if array.tobytes() != other[name][part].tobytes() and answers.same(
                answers.with_part(name, part, other[name][part])
            ):
                unnoticed.append(f"{part} of {name} of another prefix")
            swapped = array.byteswap()
            if swapped.tobytes() != array.tobytes() and answers.same(answers.with_part(name, part, swapped)):
                unnoticed.append(f"{part} of {name} byte-swapped")
    checkpoint = FrameName(CHECKPOINT, STOP)
    handle = computed(engine, RIGHT)
    carries = [part.name for part in engine.geometry.carries]
    if carries:
        (stale,) = export(engine, handle, [FrameName(CHECKPOINT, STALE)]).values()
        none = {part: np.zeros_like(array) for part, array in stale.items() if part in carries}
        ahead = twice[FrameName(CHECKPOINT, STOP + 1)]
        for what, source in (("stale", stale), ("double-advanced", ahead), ("missing", none)):
            together = {**answers.right[checkpoint], **{part: source[part] for part in carries}}
            if answers.same({**answers.right, checkpoint: together}):
                unnoticed.append(f"all carries {what}")
            for part in set(carries) - unread:
                differs = source[part].tobytes() != answers.right[checkpoint][part].tobytes()
                if differs and answers.same(answers.with_part(checkpoint, part, source[part])):
                    unnoticed.append(f"{part} {what}")
    engine.release(handle)
    assert not unnoticed
