"""The Ray Serve LLM example: its `kv_transfer_config` is the one that `kv_transfer_config()` gives."""

from __future__ import annotations

from pathlib import Path

import yaml

from tiered_cache.engines.vllm import kv_transfer_config

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "ray-serve-llm" / "serve.yaml"


def test_the_ray_serve_example_is_what_the_engine_takes() -> None:
    document = yaml.load(EXAMPLE.read_text(), Loader=yaml.CSafeLoader)
    (application,) = document["applications"]
    (config,) = application["args"]["llm_configs"]
    found = config["engine_kwargs"]["kv_transfer_config"]
    assert found == kv_transfer_config(
        64 << 30,
        disk_dir="/var/lib/tiered-cache/frames",
        disk_bytes="1TiB",
        object_url="s3://BUCKET/qwen3-next",
        object_bytes="20TiB",
        cluster="qwen3-next",
    )
