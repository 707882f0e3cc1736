"""Causal language models of Hugging Face transformers, built from their own configuration classes.

A name is transformers' `model_type` (llama, gpt2, ...). The arguments are the fields of its
configuration, and nothing else: no code of a folder is run, nothing is downloaded. At a width,
hidden and intermediate sizes and the numbers of heads are scaled; the dimension of a head, depth,
vocabulary and positions stay. `transformers` is imported only when such a model is built.
"""

import dataclasses
import importlib
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from torch import nn

from rbdc.errors import ModelError
from rbdc.models.spec import ModelSpec

NAMES = (
    "bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj",
    "granite", "llama", "mamba", "mistral", "mixtral", "mpt", "olmo", "olmo2", "opt", "phi", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""The architectures that were tried (tests/models/test_language.py)."""
WIDTHS = (
    "hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "intermediate_size", "n_inner",
    "ffn_dim", "ffn_hidden_size", "moe_intermediate_size", "num_attention_heads", "n_head",
    "n_heads", "num_key_value_heads", "num_kv_heads",
)  # fmt: skip
"""Fields that scale with the width."""
SEQUENCE = "sequence_length"
"""Argument of a spec: tokens per sequence in training, plans and proofs."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers")
_DEFAULT_SEQUENCE = 1024
_SMALL_VOCABULARY = 256
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
_NOT_ARCHITECTURE = frozenset({
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype",
    "id2label", "label2id", "problem_type", "is_encoder_decoder", "use_cache", "auto_map",
})  # fmt: skip


def is_language(name: str) -> bool:
    """Return whether a name is that of a causal language model."""
    return name in NAMES


@cache
def _transformers() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"language models need transformers, which cannot be imported: {error}",
            "Install it with: pip install 'rbdc[language]'",
        ) from None
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def version() -> str:
    """Return the version of transformers."""
    return str(_transformers().__version__)


@cache
def config_fields(name: str) -> tuple[str, ...]:
    """Return the fields of an architecture's configuration that describe the architecture."""
    fields = dataclasses.fields(_transformers().CONFIG_MAPPING[name])
    known = (field.name for field in fields if field.init and not field.name.startswith("_"))
    return (*(name for name in known if name not in _NOT_ARCHITECTURE), SEQUENCE)


def make_config(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the configuration with these fields, and transformers' defaults for the others."""
    given = {key: value for key, value in arguments.items() if key != SEQUENCE}
    config_class = _transformers().CONFIG_MAPPING[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # defaults of special tokens beyond a small vocabulary
        config = config_class(**given)
    for token in _SPECIAL:  # a default that is meant for the vocabulary of the published models
        value = getattr(config, token, None)
        if token not in given and isinstance(value, int) and value >= config.vocab_size:
            setattr(config, token, None)
    return config


def create_language(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model with new weights."""
    config = make_config(name, arguments)
    model = cast(Any, _transformers().AutoModelForCausalLM.from_config(config))
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
    most = arguments.get("vocab_size", _SMALL_VOCABULARY)
    arguments["vocab_size"] = min(most, _SMALL_VOCABULARY)
    return dataclasses.replace(spec, arguments=arguments)


def language_widths(model: Any) -> dict[str, int]:
    """Return the fields that define the width, read from a built model."""
    known = {name: getattr(model.config, name, None) for name in _own_fields(model.config)}
    return {name: value for name, value in known.items() if type(value) is int and name in WIDTHS}


def language_depths(model: Any) -> dict[str, int]:
    """Return the field that defines the depth, read from a built model."""
    fields = _own_fields(model.config)
    return {name: getattr(model.config, name) for name in DEPTHS if name in fields}


def _own_fields(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]
