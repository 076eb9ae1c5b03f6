"""Hugging Face transformers: hand over any decoder's caches, KV and all auxiliary state, and get them back.

    engine = TransformersEngine(model)

`plans` knows the cache layer classes, `layout` maps their tensors to parts and back, `probe` tries a model before it is
trusted, `identity` says whose state it is, `engine` owns sequences. What cannot be carried is refused by name when the
engine is made: state outside the cache, an unknown class or attribute, another version of transformers.
"""

from __future__ import annotations

from tiered_cache.engines.transformers.engine import TransformersEngine, load_engine

__all__ = ["TransformersEngine", "load_engine"]
