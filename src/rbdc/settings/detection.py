"""How a detector is trained on a classifier's features; the defaults are the paper's."""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from rbdc.settings.recipe import Optimization, check_names, check_range, read_settings

_PLACE = files("rbdc.settings") / "recipes" / "transfer"


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(Optimization):
    """Mask R-CNN's training. Where a name is timm's, so is its meaning."""

    epochs: float = 36.0
    """passes over the training images"""
    lr: float = 1e-4
    """peak learning rate"""
    weight_decay: float = 0.1
    """weight decay; norms, biases and the position embedding have none"""
    layer_decay: float | None = None
    """rate of a layer over that of the next; by default 0.7 for a ViT, 1 for a ResNet"""
    warmup_steps: int = 500
    """updates of linear warm-up before the cosine, half of all at most"""
    warmup_lr: float = 0.0
    """learning rate that warm-up starts from"""
    min_lr: float = 0.0
    """learning rate that the cosine ends at"""
    batch_size: int = 16
    """images of an update, over all processes and accumulation steps"""
    min_size: int = 800
    """pixels of an image's short side"""
    max_size: int = 1333
    """pixels that the long side may have at most"""
    train_sizes: tuple[int, ...] = ()
    """short sides to draw from in training; by default min-size alone"""
    flip: float = 0.5
    """probability of a mirror image"""
    jitter: tuple[float, float] | None = None
    """large-scale jitter: range of the scale, such as 0.1 2.0; by default none"""
    jitter_size: int = 1024
    """side of the square that jittered images are cut to"""
    window: int = 14
    """a ViT's windows, in patches; 0: every block sees the whole image"""
    pyramid_norm: Literal["layer", "batch", "none"] = "layer"
    """norms in the pyramid on a ViT"""
    frozen_norms: bool = True
    """a ResNet's batch norms keep the statistics they came with"""
    channels: int = 256
    """of the pyramid and the mask head; the box head has four times as many"""
    regions: int = 512
    """proposals of an image that the heads learn from"""
    proposals: int = 1000
    """proposals of an image in evaluation; twice as many in training"""

    def __post_init__(self) -> None:
        Optimization.__post_init__(self)
        check_range(self, ("epochs", "lr"), above=0)
        check_range(self, ("min_size", "max_size", "train_sizes", "jitter_size"), at_least=1)
        check_range(self, ("channels", "regions", "proposals"), at_least=1)
        check_range(self, ("warmup_steps", "window"), at_least=0)
        check_range(self, ("flip",), at_least=0, at_most=1)
        check_range(self, ("layer_decay",), above=0, at_most=1)
        check_range(self, ("jitter",), above=0)

    @property
    def learning_rate(self) -> float:
        return self.lr

    def steps(self, steps_per_epoch: int) -> int:
        """Updates in all; an epoch may be a fraction."""
        return max(1, round(self.epochs * steps_per_epoch))


def read_detection_recipe(name: str, given: dict[str, Any]) -> DetectionRecipe:
    """`paper`, `small` or a YAML file, with what is given over it."""
    settings = {**read_settings(name, _PLACE), **given}
    check_names(settings, list(DetectionRecipe.__dataclass_fields__))
    return DetectionRecipe(**settings)
