"""Causal language models of Hugging Face transformers.

A name is transformers' `model_type` (llama, gpt2, ...). At a width, the dimension of a head, depth,
vocabulary and positions stay.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from rbdc.errors import ModelError
from rbdc.models.hugging_face import config_fields, make_config, transformers
from rbdc.models.spec import ModelSpec

NAMES = (
    "bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj",
    "granite", "llama", "mamba", "mistral", "mixtral", "mpt", "olmo", "olmo2", "opt", "phi", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""The architectures that were tried (tests/models/test_language.py)."""
SEQUENCE = "sequence_length"
"""Argument of a spec: tokens per sequence in training, plans and proofs."""
_DEFAULT_SEQUENCE = 1024
_SMALL_VOCABULARY = 256
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def is_language(name: str) -> bool:
    """Return whether a name is that of a causal language model."""
    return name in NAMES


def language_arguments(name: str) -> tuple[str, ...]:
    """Return the arguments of a spec: fields of the configuration, and tokens per sequence."""
    return (*config_fields(name), SEQUENCE)


def create_language(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model with new weights."""
    config = make_config(name, {k: value for k, value in arguments.items() if k != SEQUENCE})
    for token in _SPECIAL:  # a default that is meant for the vocabulary of the published models
        value = getattr(config, token, None)
        if token not in arguments and isinstance(value, int) and value >= config.vocab_size:
            setattr(config, token, None)
    model = cast(Any, transformers().AutoModelForCausalLM.from_config(config))
    head = model.get_output_embeddings()
    longest = getattr(config, "max_position_embeddings", None) or _DEFAULT_SEQUENCE
    model.pretrained_cfg = {  # as timm describes its models
        "architecture": name,
        "classifier": next((path for path, m in model.named_modules() if m is head), None),
        "vocab_size": config.vocab_size,
        SEQUENCE: arguments.get(SEQUENCE) or min(longest, _DEFAULT_SEQUENCE),
    }
    _check_sequence(name, model.pretrained_cfg[SEQUENCE], longest)
    return cast(nn.Module, model)


def _check_sequence(name: str, length: Any, longest: int) -> None:
    if type(length) is not int or not 0 < length <= longest:
        raise ModelError(
            f"{SEQUENCE} of {name} is {length!r}, and it takes 1 to {longest} tokens",
            "Give a shorter sequence, or more positions (max_position_embeddings, n_positions).",
        )


def small_vocabulary(spec: ModelSpec) -> ModelSpec:
    """Return a model that couples in the same way, for proofs: few tokens, none of them special."""
    arguments = {key: value for key, value in spec.arguments.items() if key not in _SPECIAL}
    most = arguments.get("vocab_size")
    if most is None or (type(most) is int and most > _SMALL_VOCABULARY):  # others: see the builder
        arguments["vocab_size"] = _SMALL_VOCABULARY
    return dataclasses.replace(spec, arguments=arguments)
