"""RBDC in a minute: plan, train two half-width models, couple them, go on training.

    python examples/couple_two_models.py                 # a small ResNet-D
    python examples/couple_two_models.py --family deit   # a small DeiT

Trains on the 10,000 embedded images (Fashion-MNIST, 28 px) with the plainest loop there is. The
two narrow models and the wide one are written to demo/FAMILY, where timm loads them.
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rbdc
from rbdc.coupling import set_class_names
from rbdc.data import embedded
from rbdc.models import couple_folders
from rbdc.report import plan_table, save_plan_plot

COMMON = {"img_size": 28, "in_chans": 1, "num_classes": 10}
TARGETS = {
    "resnet": rbdc.ModelSpec(
        name="resnet18d", arguments={**COMMON, "channels": [16, 32, 64, 128], "stem_width": 8}
    ),
    "deit": rbdc.ModelSpec(
        name="deit_tiny_patch16_224",
        arguments={**COMMON, "patch_size": 4, "embed_dim": 64, "num_heads": 4, "depth": 4},
    ),
}
BATCH = 100


def normalized(images: Tensor) -> Tensor:
    return images.float().div(255).sub(0.286).div(0.353)  # Fashion-MNIST's mean and deviation


def train(model: nn.Module, epochs: float, seed: int) -> None:
    """AdamW, one cycle of the learning rate, random flips; `epochs` may be a fraction."""
    data, generator = embedded("train"), torch.Generator().manual_seed(seed)
    images = normalized(data.images)
    steps = round(epochs * len(images) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        x = images[batch]
        if torch.rand((), generator=generator) < 0.5:
            x = x.flip(-1)
        cross_entropy(model(x), data.labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    data = embedded("test")
    model.eval()
    correct = [
        (model(normalized(x)).argmax(1) == y).sum()
        for x, y in zip(data.images.split(500), data.labels.split(500), strict=True)
    ]
    return float(sum(correct)) / len(data.labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=TARGETS, default="resnet")
    parser.add_argument("--baseline-epochs", type=float, default=7, help="of standard training")
    options = parser.parse_args()
    folder = Path("demo") / options.family
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    plan = rbdc.make_plan(
        TARGETS[options.family],
        steps=1,
        budget=0.7,
        baseline_epochs=options.baseline_epochs,
        warmup_epochs=0,
        images=len(embedded("train").labels),
    )
    Console().print(plan_table(plan))
    save_plan_plot(plan, folder / "plan.png")

    for seed, side in enumerate(("narrow-0", "narrow-1")):
        torch.manual_seed(seed)
        narrow = rbdc.build(plan.spec(plan.leaves))
        set_class_names(narrow, embedded("train").class_names)
        train(narrow, plan.leaves.epochs, seed)
        print(f"{side}: test accuracy {accuracy(narrow):.2%}")
        rbdc.export(narrow, folder / side, force=True)

    record = couple_folders(folder / "narrow-0", folder / "narrow-1", folder / "wide", force=True)
    wide = rbdc.load(folder / "wide")
    proof = record["coupling"]
    print(
        f"coupled:  test accuracy {accuracy(wide):.2%} before any training "
        f"(proof {proof['proof_error']:.0e}, drift of the norms {proof['norm_drift']:.0e})"
    )
    train(wide, plan.target.epochs, seed=2)
    print(f"wide:     test accuracy {accuracy(wide):.2%} after {plan.target.epochs:g} epochs")
    rbdc.export(wide, folder / "wide", record=record, force=True)
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Look at {folder / 'plan.png'}; load with"
    )
    print(f'    timm.create_model("local-dir:{folder / "wide"}", pretrained=True)')


if __name__ == "__main__":
    main()
