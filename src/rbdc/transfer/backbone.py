"""Turn a classifier, trained by rbdc or with timm, into the backbone of a detector.

A ViT becomes ViTDet's backbone: the same blocks on a map of patches of any size, most of them with
window attention, and a simple feature pyramid. A ResNet keeps its four stages and gets
torchvision's FPN.
"""

import copy
from collections import OrderedDict
from functools import partial
from math import log2
from typing import Any

from timm.layers import Format, PatchEmbed, freeze_batch_norm_2d
from timm.models.resnet import ResNet
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN

from rbdc.errors import ModelError
from rbdc.models.families import family_of
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.pyramid import STRIDES, SimpleFPN
from rbdc.transfer.weights import WeightReport, fill_vit, report_weights


class ViTBackbone(nn.Sequential):
    """A transformer and its pyramid, which return five feature maps by name."""

    def __init__(self, body: nn.Module, fpn: SimpleFPN) -> None:
        super().__init__(OrderedDict(body=body, fpn=fpn))
        self.out_channels = fpn.out_channels


def backbone_of(classifier: nn.Module, recipe: DetectionRecipe) -> tuple[nn.Module, WeightReport]:
    """Return the classifier's feature extractor with a pyramid, and a report on its weights.

    The classifier's weights are copied, and the pyramid's are new. The recipe's `window`,
    `drop_path` and `pyramid_norm` are for ViTs. Its `frozen_norms` is for ResNets: a detector's
    batches are too small to estimate the statistics of batch norms.
    """
    if family_of(classifier).widths is None:
        raise ModelError(
            f"{type(classifier).__name__} is not an architecture that detectors are made of",
            "Use a VisionTransformer or a ResNet of timm.",
        )
    record: Any = classifier.pretrained_cfg
    if record["input_size"][0] != 3:
        raise ModelError(
            f"the classifier takes images of {record['input_size'][0]} channels",
            "A detector needs three: use a classifier of colour images.",
        )
    if isinstance(classifier, ResNet):
        return _resnet_backbone(classifier, recipe)
    body, report = vit_body(classifier, recipe)
    stride = body.patch_embed.patch_size[0]
    pyramid = SimpleFPN(body.embed_dim, stride, recipe.channels, recipe.pyramid_norm)
    return ViTBackbone(body, pyramid), report


def vit_body(classifier: VisionTransformer, recipe: DetectionRecipe) -> tuple[Any, WeightReport]:
    """Build a ViT's blocks on a map of patches: (images, 3, H, W) -> (images, C, H/p, W/p).

    H and W are arbitrary: the image is padded to a multiple of the patch size, and the position
    embedding is resampled to its grid. As in ViTDet, there is no class token, and no norm after the
    last block. If the patch size is not a power of two (14), patches are resampled to 16 pixels,
    because torchvision's heads need strides that are powers of two.
    """
    _check_standard(classifier)
    block: Any = classifier.blocks[0]
    norm: type[nn.Module] = type(block.norm1)
    patch = classifier.patch_embed.patch_size[0]
    if not log2(patch).is_integer():
        patch = 16
    body: Any = VisionTransformerSAM(
        img_size=tuple(side * patch for side in classifier.patch_embed.grid_size),
        patch_size=patch,
        num_classes=0,
        embed_dim=classifier.embed_dim,
        depth=len(classifier.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / classifier.embed_dim,
        qkv_bias=block.attn.qkv.bias is not None,
        qk_norm=not isinstance(block.attn.q_norm, nn.Identity),
        init_values=None if isinstance(block.ls1, nn.Identity) else 1.0,  # overwritten below
        pre_norm=not isinstance(classifier.norm_pre, nn.Identity),
        norm_layer=partial(norm, eps=block.norm1.eps),
        act_layer=type(block.mlp.act),
        embed_layer=partial(
            PatchEmbed, output_fmt=Format.NHWC, strict_img_size=False, dynamic_img_pad=True
        ),
        use_abs_pos=classifier.pos_embed is not None,
        window_size=recipe.window,
        global_attn_indexes=tuple(range(2, len(classifier.blocks), 3)),  # 2, 5, 8, 11 of twelve
        drop_path_rate=recipe.drop_path,
        neck_chans=0,
    )
    body.neck = body.head = nn.Identity()  # in timm these are the final norm and the classifier
    return body, fill_vit(body, classifier)


def _check_standard(classifier: VisionTransformer) -> None:
    """Refuse a model whose blocks are not all timm's `Block` with `Mlp`.

    Other blocks can have the same keys and compute a different function.
    """
    patches = classifier.patch_embed
    if type(patches) is not PatchEmbed or len(set(patches.patch_size)) > 1:
        raise ModelError(
            f"the patch embedding of the classifier is {type(patches).__name__}, "
            "one convolution of square patches was expected",
            "Use a standard ViT or DeiT.",
        )
    for number, block in enumerate(classifier.blocks):
        mlp = getattr(block, "mlp", None)
        if type(block) is not Block or not hasattr(mlp, "fc1"):
            raise ModelError(
                f"block {number} of the classifier is {type(block).__name__} with "
                f"{type(mlp).__name__}, Block with Mlp was expected",
                "Use a standard ViT or DeiT, whose blocks support window attention.",
            )


def _resnet_backbone(classifier: ResNet, recipe: DetectionRecipe) -> tuple[nn.Module, WeightReport]:
    stages = classifier.feature_info[1:]
    strides = tuple(info["reduction"] for info in stages)
    if strides != STRIDES:
        raise ModelError(
            f"the stages of the classifier have strides {strides}, {STRIDES} was expected",
            "Build it without output_stride.",
        )
    network = copy.deepcopy(classifier)
    backbone = BackboneWithFPN(
        freeze_batch_norm_2d(network) if recipe.frozen_norms else network,
        {info["module"]: str(number) for number, info in enumerate(stages)},
        [info["num_chs"] for info in stages],
        recipe.channels,
    )
    return backbone, report_weights(backbone.body.state_dict(), classifier.state_dict())
