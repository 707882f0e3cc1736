"""Model the training speed on one device and on several. This is an estimate, not a measurement.

A step of data-parallel training on d devices, each with batch / d images, takes:

    compute     = max(batch / d / images per second of one device, least step)
    all-reduce  = 2 (d - 1) / d x bytes of gradients / bandwidth      (nccl-tests, PERFORMANCE.md)
    step        = compute / 3 + max(2/3 compute, all-reduce) + latency x log2 d

One third of the compute is the forward pass. DDP overlaps the all-reduce with the backward pass
(Li et al., 2020, "PyTorch Distributed"); the model assumes full overlap. Groups within a node have
the node's bandwidth, larger groups the network's. Reading images, evaluation and checkpoints are
not included.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, log2

from rbdc.errors import PlanError
from rbdc.models import build_meta
from rbdc.plan.plan import Plan
from rbdc.plan.schedule import TRAINING_PASSES
from rbdc.plan.speeds import assumed_speeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Speed of a cluster's devices and network.

    The defaults are assumptions for nodes of eight A100-class GPUs: measure your own. The ratio of
    two trainings on the same hardware depends on them much less than the hours do.
    """

    flops_per_second: float = 100e12
    """FLOPs per second of one device that trains the target: a third of an A100's bfloat16 peak."""
    narrow_efficiency: float = 0.65
    """FLOPs per second of a model divided by those of a model twice as wide, on one device.

    timm's benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv has 391, 1054 and 2291 images/s for
    DeiT-Base, Small and Tiny: 0.71 from Base to Small, 0.59 from Small to Tiny.
    """
    devices_per_node: int = 8
    node_bytes_per_second: float = 200e9
    """Bus bandwidth of an all-reduce within a node, as nccl-tests print it (NVLink, NVSwitch)."""
    network_bytes_per_second: float = 50e9
    """Bus bandwidth of an all-reduce between nodes: four links of 100 Gb/s per node."""
    latency_seconds: float = 100e-6
    """Latency of an all-reduce per doubling of the devices, the depth of NCCL's trees."""
    least_step_seconds: float = 0.02
    """Shortest time of a step, for any number of images: the time to launch its kernels."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            may_be_zero = name.endswith("_seconds")
            if not (isfinite(value) and (value > 0 or (value == 0 and may_be_zero))):
                expected = "0 or more" if may_be_zero else "more than 0"
                raise PlanError(
                    f"{name.replace('_', ' ')} is {value:g}, expected {expected}",
                    "Give the speed of your hardware.",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Training speed of each level's models on a number of devices; level 0 is the target."""

    batch_size: int
    """Images per step of a training, over all its devices."""
    images_per_second: tuple[float, ...]
    """Images per second of one device, by level, target first."""
    gradient_bytes: tuple[int, ...]
    """Bytes of one model's gradients, by level, target first."""
    max_images_per_device: int | None = None
    """Images per step that fit in one device's memory; None if unknown."""
    hardware: Hardware = field(default_factory=Hardware)

    def group_sizes(self, devices: int) -> list[int]:
        """Return the numbers of devices that can train one model together."""
        # as data.batches.check_batch_size: micro-batches are equal and consist of pairs, for mixup
        most = min(devices, self.batch_size // 2)
        sizes = [1, *(d for d in range(2, most + 1) if self.batch_size % (2 * d) == 0)]
        room = self.max_images_per_device or self.batch_size
        return [d for d in sizes if self.batch_size / d <= room] or sizes[-1:]

    def step_seconds(self, level: int, devices: int) -> float:
        """Return the seconds of one step with the full batch."""
        hardware = self.hardware
        images = self.batch_size / devices
        compute = max(images / self.images_per_second[level], hardware.least_step_seconds)
        if devices == 1:
            return compute
        forward = compute / TRAINING_PASSES
        within = devices <= hardware.devices_per_node
        bandwidth = hardware.node_bytes_per_second if within else hardware.network_bytes_per_second
        exchange = 2 * (devices - 1) / devices * self.gradient_bytes[level] / bandwidth
        latency = hardware.latency_seconds * log2(devices)
        return forward + max(compute - forward, exchange) + latency

    def training_seconds(self, level: int, images: float, devices: int) -> float:
        """Return the seconds to train one model on `images` images, repeated ones included."""
        return images / self.batch_size * self.step_seconds(level, devices)

    def efficiency(self, level: int, devices: int) -> float:
        """Return the speed of a device in a group divided by that of a device alone."""
        return self.step_seconds(level, 1) / self.step_seconds(level, devices) / devices


def scaling_of(
    plan: Plan,
    *,
    batch_size: int = 1024,
    images_per_second: Sequence[float] = (),
    hardware: Hardware | None = None,
) -> Scaling:
    """Return the training speed of the plan's models.

    `images_per_second` are measured on one device: one number for each level, target first, or
    only the target's. Speeds that were not measured are computed from FLOPs: the target runs at
    `flops_per_second`, and each model at `narrow_efficiency` times the FLOPs per second of the
    next wider model.
    """
    hardware = hardware or Hardware()
    if not 0 < batch_size <= plan.images:
        raise PlanError(
            f"the batch size is {batch_size}, and there are {plan.images} training images",
            "Choose a batch size between 1 and the number of images (--images).",
        )
    levels = plan.stages[::-1]
    speeds = assumed_speeds(
        [stage.model for stage in levels],
        [stage.forward_flops for stage in levels],
        images_per_second,
        flops_per_second=hardware.flops_per_second,
        narrow_efficiency=hardware.narrow_efficiency,
    )
    return Scaling(
        batch_size=batch_size,
        images_per_second=speeds.images_per_second,
        gradient_bytes=tuple(
            sum(4 * weight.numel() for weight in build_meta(stage.model).parameters())
            for stage in levels
        ),  # float32, also with autocast
        hardware=hardware,
    )
