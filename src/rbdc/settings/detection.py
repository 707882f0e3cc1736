"""How a detector is trained on a classifier's features; the defaults are the paper's."""

from collections.abc import Mapping
from typing import Any, Literal

from rbdc.errors import RecipeError
from rbdc.settings.duration import Extent, with_unit
from rbdc.settings.files import RECIPES, read_recipe
from rbdc.settings.recipe import Optimization
from rbdc.settings.schema import (
    Amount,
    Count,
    Pair,
    Positive,
    PositiveEpochs,
    PositiveShare,
    Several,
    Share,
    Steps,
    Whole,
    settings,
)


@settings
class DetectionRecipe(Optimization):
    """How Mask R-CNN is trained. Where a name is timm's, so is its meaning."""

    epochs: PositiveEpochs = 36.0
    """length of the training, in epochs or with a unit: '5000 steps', '1e6 images'"""
    lr: Positive = 1e-4
    """peak learning rate"""
    weight_decay: Amount = 0.1
    """weight decay; norms, biases and the position embedding have none"""
    layer_decay: PositiveShare | None = None
    """learning rate of a layer divided by that of the next; by default 0.7 for a ViT, 1 for a
    ResNet"""
    warmup_steps: Steps = 500
    """linear warm-up, in updates or with a unit: '1 epochs', '10%'; at most half of the training"""
    warmup_lr: Amount = 0.0
    """learning rate at the start of the warm-up"""
    min_lr: Amount = 0.0
    """learning rate at the end of the cosine"""
    batch_size: Count = 16
    """images per update, over all processes and micro-batches"""
    min_size: Count = 800
    """short side of an image, in pixels"""
    max_size: Count = 1333
    """largest long side of an image, in pixels"""
    train_sizes: Several[Count] = ()
    """short sides to draw from in training, in pixels; by default min-size alone"""
    flip: Share = 0.5
    """probability of a horizontal flip"""
    jitter: Pair[Positive] | None = None
    """large-scale jitter: smallest and largest scale, such as 0.1 2.0; by default none"""
    jitter_size: Count = 1024
    """side of the square that jittered images are cropped to, in pixels"""
    window: Whole = 14
    """side of a ViT's attention windows, in patches; 0: every block attends to the whole image"""
    pyramid_norm: Literal["layer", "batch", "none"] = "layer"
    """norms in the feature pyramid of a ViT"""
    frozen_norms: bool = True
    """freeze the statistics of a ResNet's batch norms"""
    channels: Count = 256
    """channels of the feature pyramid and the mask head; the box head has four times as many"""
    regions: Count = 512
    """proposals per image that the heads are trained on"""
    proposals: Count = 1000
    """proposals per image in evaluation; training uses twice as many"""

    def __post_init__(self) -> None:
        """Refuse a length that is nothing, or a share of itself."""
        length = with_unit(self.epochs)
        if length.unit == "%" or length.amount <= 0:
            raise RecipeError(
                f"epochs is {length}, expected the length of the whole training",
                "Give more than 0 epochs, steps or images.",
            )

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate."""
        return self.lr

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates; the last epoch may be a part of one."""
        extent = Extent(steps_per_epoch=steps_per_epoch, batch_size=self.batch_size)
        return max(1, extent.updates(self.epochs))

    def warmup_updates(self, steps_per_epoch: int) -> int:
        """Return the number of updates of the warm-up."""
        extent = Extent(
            steps_per_epoch=steps_per_epoch,
            batch_size=self.batch_size,
            total=self.steps(steps_per_epoch),
        )
        return extent.updates(self.warmup_steps, "steps")


def read_detection_recipe(name: str, given: Mapping[str, Any]) -> DetectionRecipe:
    """Return a recipe of `rbdc transfer`, shipped or in a YAML file; `given` overrides it."""
    return DetectionRecipe(**{**read_recipe(name, RECIPES / "transfer"), **given})
