"""Tiny configurations of the language models, by the names of transformers."""

from typing import Any

_BODY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
}  # fmt: skip
_NEW: dict[str, Any] = {
    **_BODY, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_OLD: dict[str, Any] = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64,
}  # fmt: skip
_HEADS = {"head_dim": 16}

EXACT: dict[str, dict[str, Any]] = {
    "gpt2": _OLD,
    "gptj": {**_OLD, "rotary_dim": 8},
    "llama": _NEW,
    "mistral": _NEW,
    "qwen2": _NEW,
    "gemma": {**_NEW, **_HEADS},
    "gemma2": {**_NEW, **_HEADS},
    "gpt_neox": {**_BODY, "intermediate_size": 96, "max_position_embeddings": 64},
    "opt": {**_BODY, "ffn_dim": 96, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    "falcon": {**_BODY, "num_kv_heads": 2, "new_decoder_architecture": True},
    "phi": _NEW,
    "phi3": _NEW,
    "olmo": _NEW,
    "olmo2": _NEW,
    "stablelm": _NEW,
    "cohere": _NEW,
    "starcoder2": _NEW,
    "smollm3": _NEW,
    "granite": _NEW,
}
INEXACT: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3": ({**_NEW, **_HEADS}, "q_norm.weight: both branches share it"),
    "gemma3_text": ({**_NEW, **_HEADS}, "q_norm.weight: both branches share it"),
    "bloom": ({"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}, "a constant"),
    "mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 96}, "a constant"),
    "mamba": (
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "time_step_rank": 4},
        "x_proj.weight: mm in backbone.layers.0.mixer follows the mean",
    ),
}
"""Each with a part of the message that says why."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({**_NEW, "num_local_experts": 4}, "mlp.experts"),
    "qwen3_moe": (
        {**_NEW, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "mlp.experts",
    ),
    "olmo": ({**_NEW, "tie_word_embeddings": True}, "no norm before the head"),
}
