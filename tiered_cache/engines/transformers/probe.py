"""A few tokens through a model: what its caches hold, and whether they hold everything.

A model that keeps state elsewhere cannot be moved, so two things are looked at. No attribute or buffer of a module may
change while the model computes. And a state that was taken out and put into a fresh cache, while the model computed
something else, must go on exactly as the one that was left alone, as a chunk and token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from tiered_cache.engines.transformers.layout import Cache, CacheLayout, Tensor, plans_of
from tiered_cache.engines.transformers.plans import SUPPORTED_VERSIONS
from tiered_cache.errors import ConfigError, StateError
from tiered_cache.geometry import PartKind

_CACHE_NAMES = ("past_key_values", "cache_params")
_AHEAD = 3  # tokens computed beyond a restore
_PLAIN = (bool, int, float, str, type(None))


class Stepper:
    """Runs one model: tokens in, logits out, a cache that goes on; one sequence, no padding."""

    def __init__(self, model: Any, static_tokens: int | None) -> None:
        """Raises `ConfigError` for a version, mode or model that is not supported."""
        version = str(transformers.__version__)
        if not version.startswith(tuple(f"{supported}." for supported in SUPPORTED_VERSIONS)):
            raise ConfigError(f"transformers {version}: the caches of {', '.join(SUPPORTED_VERSIONS)} alone are known")
        if model.training:
            raise ConfigError("the model is in training mode, where dropout makes every step another one")
        names = inspect.signature(model.forward).parameters
        found = [name for name in _CACHE_NAMES if name in names]
        if not found or getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(f"{type(model).__name__} is no decoder that takes {' or '.join(_CACHE_NAMES)}")
        if (getattr(model, "tp_size", None) or 1) > 1:
            raise ConfigError(f"the model is cut over {model.tp_size} ranks: one rank can be carried")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ConfigError("the model has adapters that can be switched: merge the one that is meant")
        config = model.config.get_text_config(decoder=True)
        _check_rope(config)
        self.model = model
        self.vocabulary = int(config.vocab_size)
        self.static_tokens = static_tokens
        self.logits_dtype: Any = None
        self._cache_name = found[0]
        self._options: dict[str, object] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        self._says_positions = "position_ids" in names  # some models begin at 0 again unless they are told

    def step(self, cache: Cache | None, at: int, tokens: Any) -> tuple[Cache, Tensor]:
        """Compute tokens, an array of ids, after the `at` of the cache; the cache, and the last one's logits."""
        if self.static_tokens is not None and at + len(tokens) > self.static_tokens:
            raise ConfigError(f"{at + len(tokens)} tokens in a static cache of {self.static_tokens}")
        if cache is None and self.static_tokens is not None:
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.static_tokens)
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=self.model.device)[None]
        options = {self._cache_name: cache, **self._options}
        if self._says_positions:
            options["position_ids"] = torch.arange(at, at + ids.shape[1], device=ids.device)[None]
        with torch.no_grad():
            out = self.model(input_ids=ids, **options)
        cache = getattr(out, self._cache_name, None)
        if not hasattr(cache, "layers"):
            raise ConfigError(f"{type(self.model).__name__} gives back no {self._cache_name} of layers, but {cache!r}")
        self.logits_dtype = out.logits.dtype
        return cache, out.logits[0, -1]


class Probed(NamedTuple):
    """What a few tokens have shown."""

    layout: CacheLayout
    step_drift: float
    """How far the logits after a prompt whose last tokens came one by one are from those of the same prompt at once, of
    the largest logit. Rounding alone gives 1e-6 in float32 and 1e-2 in bfloat16.
    """
    chunk_drift: float
    """The same, where the last tokens came in one piece."""

    @property
    def goes_on_in_chunks(self) -> bool:
        """False for a model that forgets its state when several tokens follow, as Jamba's scan does in 5.23."""
        return self.chunk_drift < 0.03 or self.chunk_drift < 4 * self.step_drift


def probe(stepper: Stepper, block_tokens: int | None) -> Probed:
    """Try the model. Raises `StateError` naming what cannot be carried, `GeometryError`, `ConfigError`."""
    title = type(stepper.model).__name__
    before = dict(_module_state(stepper.model))
    first, _ = stepper.step(None, 0, [1, 0])
    tokens = 2 + max(plan.tokens_to_show_all for _, plan in plans_of(first))
    text = (np.arange(tokens + _AHEAD) * 5 + 3) % min(stepper.vocabulary, 89)

    def started() -> Cache:
        return stepper.step(None, 0, text[:tokens])[0]

    layout = CacheLayout(started(), tokens, block_tokens)
    left_alone = [_go_on(stepper, started(), text, tokens, step) for step in (_AHEAD, 1)]
    taken_out = started()
    arrays = _take_out(layout, taken_out, tokens)
    _check_rows(layout, stepper.step(taken_out, tokens, text[tokens:])[0], arrays, tokens)
    stepper.step(None, 0, text[::-1].copy())  # something else, between out and in
    for step, expected in zip((_AHEAD, 1), left_alone, strict=True):
        copy = layout.make(tokens)
        layout.load(copy, 0, tokens, arrays)
        went_on = _go_on(stepper, copy, text, tokens, step)
        if not all(torch.equal(a, b) for a, b in zip(went_on, expected, strict=True)):
            raise StateError(f"{title}: a copy of its cache goes on otherwise: it keeps state elsewhere")
    changed = [name for name, value in _module_state(stepper.model) if not _same(before.get(name, _ABSENT), value)]
    if changed:
        raise StateError(f"{title} keeps state on its modules: {', '.join(changed[:4])}")
    at_once = stepper.step(None, 0, text)[1].float()
    drifts = [float((logits[-1].float() - at_once).abs().max() / at_once.abs().max()) for logits in left_alone]
    return Probed(layout, step_drift=drifts[1], chunk_drift=drifts[0])


def _go_on(stepper: Stepper, cache: Cache, text: Any, at: int, step: int) -> list[Tensor]:
    """Go on over `text[at:]`, so many tokens at a time; the logits after each."""
    logits = []
    for start in range(at, len(text), step):
        cache, last = stepper.step(cache, start, text[start : start + step])
        logits.append(last)
    return logits


def _take_out(layout: CacheLayout, cache: Cache, tokens: int) -> dict[str, Any]:
    layout.check(cache, tokens)
    taken = layout.take(cache)
    arrays = {}
    for part in layout.geometry.parts:
        spec = part.array(tokens)
        out = arrays[part.name] = np.empty(spec.shape, dtype=spec.storage)
        if part.kind is PartKind.CARRY:
            layout.read_carry(taken, part.name, out)
        else:
            layout.read(cache, 0, tokens, part.name, out)
    return arrays


def _check_rows(layout: CacheLayout, longer: Cache, arrays: dict[str, Any], tokens: int) -> None:
    """Rows must stay what they were while the sequence grows."""
    for part in layout.geometry.parts:
        if part.kind is PartKind.ROWS:
            again = np.empty_like(arrays[part.name])
            layout.read(longer, 0, tokens, part.name, again)
            if again.tobytes() != arrays[part.name].tobytes():
                raise StateError(f"rows of {part.name} change while the sequence grows")


def _check_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        raise ConfigError("dynamic RoPE: its modules remember the longest sequence that they have seen")


_ABSENT: Any = object()


def _module_state(model: Any) -> Iterator[tuple[str, Any]]:
    """Everything on the modules but parameters and sub-modules, by name; tensors with their version."""
    for prefix, module in model.named_modules():
        held = {k: v for k, v in vars(module).items() if k not in {"_parameters", "_modules", "_buffers"}}
        for name, value in {**held, **module._buffers}.items():  # noqa: SLF001 - torch names them so
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(value, torch.Tensor):
                yield path, (value, value._version)  # noqa: SLF001
            elif isinstance(value, (*_PLAIN, list, tuple, dict)):
                yield path, _plain(value)


def _plain(value: Any) -> Any:
    """A copy that shows a change of numbers and tensors within lists and dicts, three levels deep at most."""

    def walk(inner: Any, depth: int) -> Any:
        if isinstance(inner, torch.Tensor):
            return inner, inner._version  # noqa: SLF001
        if isinstance(inner, dict) and depth:
            return {str(k): walk(v, depth - 1) for k, v in inner.items()}
        if isinstance(inner, list | tuple) and depth:
            return [walk(v, depth - 1) for v in inner]
        return inner if isinstance(inner, _PLAIN) else type(inner).__name__

    return walk(value, 3)


def _same(before: Any, now: Any) -> bool:
    """Equal numbers, and the very same tensors, unchanged."""
    if isinstance(now, torch.Tensor):
        return before is now
    if isinstance(now, dict):
        return isinstance(before, dict) and before.keys() == now.keys() and all(_same(before[k], now[k]) for k in now)
    if isinstance(now, list | tuple):
        return (
            isinstance(before, list | tuple)
            and len(before) == len(now)
            and all(_same(a, b) for a, b in zip(before, now, strict=True))
        )
    return bool(before is now or before == now)
