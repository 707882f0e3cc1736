"""Image classifiers of Hugging Face transformers, which speak as timm's models do.

A name is `transformers:` and a `model_type` (transformers:vit). Images, channels and classes are
the arguments that timm calls them by, and a forward pass returns the logits.
"""

from collections.abc import Mapping
from typing import Any, cast

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from rbdc.errors import CheckpointError
from rbdc.models.hugging_face import config_fields, make_config, transformers

TRANSFORMERS = "transformers:"
"""Prefix of the names of these models."""
TYPES = (
    "beit", "convnext", "convnextv2", "deit", "dinov2", "dinov2_with_registers", "regnet", "resnet",
    "swin", "vit", "vit_msn",
)  # fmt: skip
"""The architectures that were tried (tests/models/test_vision.py)."""
_THEIRS = {"img_size": "image_size", "in_chans": "num_channels", "num_classes": "num_labels"}
_NEVER_FIELDS = ("num_labels",)  # kept as a list of their names


def is_vision(name: str) -> bool:
    """Return whether a name is that of an image classifier of transformers."""
    return name.startswith(TRANSFORMERS)


def vision_arguments(name: str) -> tuple[str, ...]:
    """Return the arguments of a spec: fields of the configuration, some by timm's names."""
    fields = config_fields(name.removeprefix(TRANSFORMERS))
    ours = [key for key, theirs in _THEIRS.items() if theirs in (*fields, *_NEVER_FIELDS)]
    return (*(field for field in fields if field not in _THEIRS.values()), *ours)


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the spec that a config.json describes."""
    names = vision_arguments(TRANSFORMERS + config["model_type"])
    found = {name: config.get(_THEIRS.get(name, name)) for name in names}
    found["num_classes"] = len(class_labels(config)) or 2  # transformers' default
    return {name: value for name, value in found.items() if value is not None}


def class_labels(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a config.json's classes, in the order of the logits."""
    names = config.get("id2label") or {}
    return [str(names[key]) for key in sorted(names, key=int)]


def create_vision(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model with new weights."""
    given = {_THEIRS.get(key, key): value for key, value in arguments.items() if value is not None}
    given.setdefault("num_labels", 1000)
    config = make_config(name.removeprefix(TRANSFORMERS), given)
    classes = transformers().MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    model = (classes[0] if isinstance(classes, tuple) else classes)(config)  # of DeiT, two
    layers = [path for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    side = getattr(config, "image_size", None) or arguments.get("img_size") or 224
    height, width = side if isinstance(side, list | tuple) else (side, side)
    model.num_classes = config.num_labels
    model.pretrained_cfg = {  # as timm describes its models
        "architecture": name,
        "input_size": (config.num_channels, height, width),
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": layers[-1],
    }
    model.register_forward_hook(_only_logits)
    return cast(nn.Module, model)


def loaded_state(model: Any, state: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return a file's tensors by the names of the state dict that a model like `model` has.

    transformers writes many models with the names of its older versions, and knows both.
    """
    name = model.pretrained_cfg["architecture"]
    floating = {key: t for key, t in state.items() if t.is_floating_point() or t.ndim == 0}
    try:
        loaded, found = type(model).from_pretrained(
            None, config=model.config, state_dict=floating, output_loading_info=True
        )
    except Exception as error:  # the library's errors of damaged files have many types
        raise CheckpointError(
            f"the weights in {where} do not fit {name}: {error}", _REMEDY
        ) from None
    for kind in ("missing", "unexpected", "mismatched"):
        for key in sorted(map(str, found[f"{kind}_keys"])):
            raise CheckpointError(f"{key} is {kind} in {where}, as a {name}", _REMEDY)
    return {key: tensor.clone() for key, tensor in loaded.state_dict().items()}


_REMEDY = "Save the model again, with save_pretrained of transformers' own class."


def _only_logits(_model: nn.Module, _inputs: Any, output: Any) -> Any:
    return output.logits
