"""A test shim: the copy worker that vLLM's tiering lacks on the CPU platform, and two models made to run there.

vLLM 0.32 copies between device and host buffer on GPUs only. `CpuTieringSpec` is its own `TieringOffloadingSpec` with a
worker that copies with NumPy, in place of the one with CUDA streams; scheduler, host buffer, tiers and look-ups are
vLLM's. Named in `kv_connector_extra_config` as `spec_name` and `spec_module_path`.

`patch(family)` is for models whose CPU kernels do not do all that the tier has to keep: see there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

STORED: list[str] = []
LOADED: list[str] = []
"""The digest of every block that this process's workers have copied from the device, and to it."""


class CpuTieringSpec(TieringOffloadingSpec):
    """Tiering on the CPU platform."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = NumpyCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class NumpyCopyWorker(OffloadingWorker):
    """Copies at once, in the caller's thread."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._tensors = kv_caches.tensors
        self._host = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, device: Any, host: Any, *, to_host: bool) -> bool:
        begun_s, copied, per_chunk = time.perf_counter(), 0, self._blocks_per_chunk
        blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
        for refs, size, first in zip(self._groups, device.group_sizes, device.block_indices, strict=True):
            chunk = -1
            for number in range(first, first + size):
                if number == first or number % per_chunk == 0:
                    chunk = next(chunks)
                block, digest = next(blocks), hashlib.sha256()
                for ref in refs:
                    page = self._tensors[ref.tensor_idx].page_size_bytes
                    start = number % per_chunk * page
                    there = self._host[ref.tensor_idx][chunk, start : start + ref.page_size_bytes].numpy()
                    here = self._tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].numpy()
                    np.copyto(there, here) if to_host else np.copyto(here, there)
                    copied += ref.page_size_bytes
                    digest.update(here)
                (STORED if to_host else LOADED).append(digest.hexdigest())
        assert next(blocks, None) is None
        assert next(chunks, None) is None
        self._done.append(TransferResult(job_id, True, copied, time.perf_counter() - begun_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._host, self._tensors, self._groups = [], [], []
        self._region.cleanup()


def patch(family: str) -> None:
    """Let a family run on the CPU with the caches that it has on a GPU. In every process, before the engine is made."""
    if family == "glm_moe_dsa":
        _write_indexer_cache()
    if family == "granitemoehybrid":
        _split_prefill_at_blocks()


def _split_prefill_at_blocks() -> None:
    """The CPU scan of Mamba layers keeps its last state only, not those within a chunk: end chunks at blocks."""
    from vllm.v1.kv_cache_interface import MambaSpec

    whole = MambaSpec.__init__

    def without_checkpoints(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["num_prefill_checkpoint_blocks"] = 0
        whole(self, *args, **kwargs)

    MambaSpec.__init__ = without_checkpoints


def _write_indexer_cache() -> None:
    """Sparse attention has no CPU kernel: attend to all, and write the indexer's keys as on a GPU.

    With `index_topk` at the context's length or more that is the same attention. A cache row is 128 bytes of e4m3 and
    a float32 scale.
    """
    import vllm.model_executor.layers.sparse_attn_indexer as sparse
    import vllm.model_executor.models.deepseek_v2 as deepseek
    from vllm.forward_context import get_forward_context
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
    from vllm.v1.attention.backends.mla import indexer
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def choose_dense(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> Any:
        config = attn_selector_config
        if config.use_sparse:
            changed = {"use_sparse": False}
            config = (
                config._replace(**changed) if hasattr(config, "_replace") else dataclasses.replace(config, **changed)
            )
        return choose(cls, selected_backend, config, num_heads)

    @dataclasses.dataclass
    class Metadata:
        slot_mapping: torch.Tensor

    class Builder(AttentionMetadataBuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            return AttentionCGSupport.ALWAYS

        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any, **_: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, prefix_tokens: int, common: Any, fast_build: bool = False, **_: Any) -> Metadata:
            return Metadata(common.slot_mapping)

    class Backend(indexer.DeepseekV32IndexerBackend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
            return [16]

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    def unquantised(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query, torch.ones(query.shape[0], 1)

    def write_keys(self: Any, hidden_states: Any, query: Any, keys: torch.Tensor, weights: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            slots = metadata[self.k_cache.prefix].slot_mapping
            new = keys[: slots.shape[0]].float()
            scale = (new.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1e-12)
            values = (new / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            row = torch.cat([values, scale.contiguous().view(torch.uint8)], -1)
            cache = self.k_cache.kv_cache
            cache[slots // cache.shape[1], slots % cache.shape[1], : row.shape[1]] = row
        return self.topk_indices_buffer

    CpuPlatform.get_attn_backend_cls = classmethod(choose_dense)
    deepseek.DeepseekV32IndexerCache.get_attn_backend = lambda _: Backend
    deepseek.per_token_group_quant_fp8 = unquantised
    sparse.SparseAttnIndexer.forward = write_keys
    CPUMLAImpl.record_logical_topk_ready = lambda *_, **__: None
