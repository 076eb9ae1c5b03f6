"""Whose state a transformers model computes: its weights, its configuration, and how it rounds."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import transformers

from tiered_cache.errors import ConfigError
from tiered_cache.identity import Identity

REVISION = "1"
"""Goes up whenever the engine calls a model otherwise, so that its states are others."""

_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "architectures", "_commit_hash", "dtype", "torch_dtype"}
)
"""Fields of a configuration that say where a model came from, not what it computes; each weight's dtype is hashed."""
_STEP_BYTES = 1 << 24


def model_digest(model: Any) -> bytes:
    """SHA-256 over the configuration and over names, dtypes, shapes and bytes of all parameters and buffers.

    The bytes are those in memory: an adapter that is merged or active is part of them. Weights that change later
    change nothing here; make a new engine then.
    """
    digest = hashlib.sha256(b"tiered-cache transformers model 1")
    settings = json.dumps(_settings(model.config.to_dict()), sort_keys=True, default=str)
    _update(digest, type(model).__name__.encode(), settings.encode())
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.device.type == "meta":
            raise ConfigError(f"weight {name} is not in memory")
        _update(digest, name.encode(), str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode())
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _STEP_BYTES):
            digest.update(flat[start : start + _STEP_BYTES].cpu().numpy().data)
    return digest.digest()


def identity_of(model: Any, *, static_tokens: int | None, tenant_salt: bytes, tokenizer_digest: bytes) -> Identity:
    """The identity of all states that this model computes in this process."""
    config = model.config
    rounding = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "static_tokens": static_tokens,  # a longer buffer is another sum
    }
    return Identity(
        weights_digest=model_digest(model),
        engine="transformers",
        engine_revision=f"{REVISION}, transformers {transformers.__version__}, torch {torch.__version__}",
        rounding=", ".join(f"{name} {value}" for name, value in rounding.items() if value is not None),
        tokenizer_digest=tokenizer_digest,
        tenant_salt=tenant_salt,
    )


def _settings(document: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration, and of those within it, decides what the model computes."""
    return {
        str(name): _settings(value) if isinstance(value, dict) else value
        for name, value in document.items()
        if name not in _NOT_THE_MODEL
    }


def _update(digest: Any, *fields: bytes) -> None:
    for value in fields:
        digest.update(len(value).to_bytes(8, "little") + value)
