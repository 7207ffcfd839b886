"""A transformer for the simulated GPU, where each operation takes as long as a hundred on the CPU."""

import torch
from timm.models.vision_transformer import VisionTransformer


def vit():
    """Return a transformer of two blocks that sees 4x4 patches of 16 pixels."""
    torch.manual_seed(0)
    return VisionTransformer(img_size=64, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=12)
