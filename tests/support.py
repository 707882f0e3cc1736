"""What several tests need: small models with telling weights."""

from typing import Any

import torch
from torch import Tensor, nn

import rbdc

SMALL_VIT: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_classes": 5,
}
SMALL_RESNET: dict[str, Any] = {
    "img_size": 32,
    "channels": [8, 16, 16, 32],
    "stem_width": 4,
    "num_classes": 5,
}
SMALL: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": SMALL_VIT,
    "deit_tiny_distilled_patch16_224": SMALL_VIT,
    "deit3_large_patch16_224": SMALL_VIT,
    "resnet18": {"img_size": 32, "channels": [8, 16, 16, 32], "num_classes": 5},
    "resnet18d": SMALL_RESNET,
    "resnet50d": SMALL_RESNET,
}


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """Every tensor random and none small, so that nothing wrong hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.fill_(seed)
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            elif tensor.ndim == 1:
                tensor.copy_(0.3 * noise + (0.0 if "bias" in name or "mean" in name else 1.0))
            elif tensor.ndim == 3:  # tokens, position embedding
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * 1.5 / tensor[0].numel() ** 0.5)
    return model


def parents(name: str, width: float = 0.5, **arguments: Any) -> tuple[Any, Any]:
    first, second = (
        randomized(rbdc.build(name, width, **(arguments or SMALL[name])), seed) for seed in (1, 2)
    )
    return first, second


def images(model: Any, count: int = 3) -> Tensor:
    size = model.pretrained_cfg["input_size"]
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(7))


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(x)
    return result
