"""Build models of Hugging Face transformers from their own configuration classes.

A `model_type` (llama, gpt2, vit, ...) names the configuration; its fields are the arguments, and
nothing else: no code of a folder is run, nothing is downloaded. At a width, hidden and intermediate
sizes and the numbers of heads are scaled. `transformers` is imported only when it is needed.
"""

import dataclasses
import importlib
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from rbdc.errors import ModelError

WIDTHS = (
    "hidden_size", "hidden_sizes", "n_embd", "d_model", "embed_dim", "embedding_size",
    "word_embed_proj_dim", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size",
    "moe_intermediate_size", "num_attention_heads", "num_heads", "n_head", "n_heads",
    "num_key_value_heads", "num_kv_heads",
)  # fmt: skip
"""Fields that scale with the width."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "depths")
NOT_ARCHITECTURE = frozenset({
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype",
    "id2label", "label2id", "problem_type", "is_encoder_decoder", "use_cache", "auto_map",
})  # fmt: skip


@cache
def transformers() -> Any:
    """Import transformers, quietly; refuse with the extra that installs it."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"this model needs transformers, which cannot be imported: {error}",
            "Install it with: pip install 'rbdc[language]'",
        ) from None
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def version() -> str:
    """Return the version of transformers."""
    return str(transformers().__version__)


@cache
def config_fields(model_type: str) -> tuple[str, ...]:
    """Return the fields of a configuration that describe the architecture."""
    known = _fields(transformers().CONFIG_MAPPING[model_type])
    return tuple(name for name in known if name not in NOT_ARCHITECTURE)


def make_config(model_type: str, given: Mapping[str, Any]) -> Any:
    """Return the configuration with these fields, and transformers' defaults for the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # defaults of special tokens beyond a small vocabulary
        return transformers().CONFIG_MAPPING[model_type](**given)


def widths_of(model: Any) -> dict[str, int | tuple[int, ...]]:
    """Return the fields that define the width, read from a built model."""
    return _sizes(model.config, WIDTHS)


def depths_of(model: Any) -> dict[str, int | tuple[int, ...]]:
    """Return the field that defines the depth, read from a built model."""
    return _sizes(model.config, DEPTHS)


def _sizes(config: Any, names: tuple[str, ...]) -> dict[str, int | tuple[int, ...]]:
    found = {name: getattr(config, name) for name in _fields(config) if name in names}
    lists = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return {name: v for name, v in lists.items() if type(v) is int or isinstance(v, tuple)}


def _fields(config: Any) -> list[str]:
    fields = dataclasses.fields(config)
    return [field.name for field in fields if field.init and not field.name.startswith("_")]
