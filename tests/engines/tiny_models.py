"""Tiny random models of every family that the adapter is proven on: real classes, seeded weights, seconds to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 97
HIDDEN = 32

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_GENERAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DSA = {"q_lora_rank": 16, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, **_MOE}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}

_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 64, "num_hidden_layers": 2, **_HEADS}),
    "gemma3": (
        "Gemma3Text:Gemma3",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_HEADS,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            **_HEADS,
            **_DELTA_NET,
            **_MOE,
        },
    ),
    "qwen3_5": ("Qwen3_5Text:Qwen3_5", {"intermediate_size": 64, "num_hidden_layers": 4, **_HEADS, **_DELTA_NET}),
    "qwen4_exp": (
        "Qwen4ExpText:Qwen4Exp",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 32,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            **_HEADS,
            **_DELTA_NET,
            **_MOE,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            **_MLA,
            **_DSA,
            **_EXPERTS,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            **_MLA,
            **_DSA,
            **_EXPERTS,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["moe", "moe", "moe"],
            "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
            "sliding_window": 9,
            "hc_mult": 2,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
            **_MOE,
        },
    ),
    "mamba2": (
        "Mamba2",
        {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "bamba": (
        "Bamba",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_chunk_size": 16,
            **_HEADS,
            **_MAMBA,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_chunk_size": 16,
            **_HEADS,
            **_MAMBA,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_chunk_size": 16,
            **_HEADS,
            **_MAMBA,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "adapter_rank": 4,
            "use_mem_rope": True,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            **_HEADS,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "intermediate_size": 64,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            **_HEADS,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
            **_HEADS,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_local_experts": 4,
            "n_shared_experts": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            **_MLA,
            **_MOE,
        },
    ),
    "gemma3n": (
        "Gemma3nText:Gemma3n",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 5,
            "sliding_window": 9,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
            **_HEADS,
        },
    ),
    "zaya": (
        "Zaya",
        {
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "sliding_window": 9,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "router_hidden_size": 16,
            **_HEADS,
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLText:MiniMaxM3VL",
        {
            "intermediate_size": 16,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 16,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            **_HEADS,
        },
    ),
    "glm5_next": (
        "Glm5NextText:Glm5Next",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "index_kpool": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
            **_MLA,
            "qk_rope_head_dim": 0,
            **_DSA,
            **_EXPERTS,
        },
    ),
}


FAMILIES = tuple(sorted(_SETTINGS))
GLM5_NEXT_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "image_size": 28,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 16,
    "projection_intermediate_size": 16,
}


def tiny_model(family: str, dtype: Any = torch.float32, seed: int = 0) -> Any:
    """A model of the family in evaluation mode; equal seeds give equal weights."""
    names, settings = _SETTINGS[family]
    config_name, _, model_name = names.partition(":")
    config = getattr(transformers, f"{config_name}Config")(**{**_GENERAL, **settings})
    made_for = "CausalLM"
    if family == "glm5_next":  # there is no class for its text alone
        config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=GLM5_NEXT_VISION)
        made_for = "ConditionalGeneration"
    torch.manual_seed(seed)
    model: Callable[..., Any] = getattr(transformers, f"{model_name or config_name}For{made_for}")
    made = model(config)
    with torch.no_grad():
        for weight in made.parameters():
            if not weight.any():  # what starts as zero would hide a state that is wrong
                weight.normal_(std=0.2)
    return _to(made, dtype).eval()


def _to(model: Any, dtype: Any) -> Any:
    """The model in another dtype, as loading it gives it: what is computed from its settings stays float32."""
    computed = [
        (module, name, module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers[name] is not None
    ]
    model.to(dtype)
    for module, name, buffer in computed:
        module._buffers[name] = buffer
    return model
