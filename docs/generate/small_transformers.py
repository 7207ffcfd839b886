"""Small detectors and segmentation models of transformers with random weights, for tests and the architecture table.

Each is built from a configuration, so that nothing is fetched, and saved with its image processor.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

LABELS = {index: f"thing {index}" for index in range(5)}
QUERIES = 12
STAGES = ["stage1", "stage2", "stage3", "stage4"]
FEW_PIXELS = {"shortest_edge": 96, "longest_edge": 160}
SQUARE = {"height": 64, "width": 64}
WIDER_SQUARE = {"height": 96, "width": 96}

_WIDTHS = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_LAYERS = {
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "num_queries": QUERIES, "id2label": LABELS,
}  # fmt: skip
_DETR = {"encoder_layers": 2, "use_timm_backbone": False, **_LAYERS}
_SCALES = {
    "encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32], "d_model": 32, "decoder_in_channels": [32, 32, 32],
    "num_denoising": 0, **_LAYERS,
}  # fmt: skip
_VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_DEEP_VIT = {**_VIT, "num_hidden_layers": 4, "intermediate_size": 32, "image_size": 64, "patch_size": 16}
_WINDOWED_VIT = {**_VIT, "image_size": 96, "patch_size": 16, "num_windows": 4, "out_features": ["stage1", "stage3"]}
_LIGHT = {
    "num_queries": QUERIES, "d_model": 32, "decoder_layers": 2, "decoder_self_attention_heads": 4,
    "decoder_cross_attention_heads": 4, "decoder_ffn_dim": 32, "group_detr": 1, "hidden_expansion": 0.5,
    "id2label": LABELS,
}  # fmt: skip

Built = tuple[nn.Module, Any]
"""A network and its image processor."""


def _resnet() -> Any:
    return hf.ResNetConfig(**_WIDTHS, out_features=STAGES)


def _detr() -> Built:
    config = hf.DetrConfig(backbone_config=_resnet(), d_model=32, **_DETR)
    return hf.DetrForObjectDetection(config), hf.DetrImageProcessor(size=FEW_PIXELS)


def _table_transformer() -> Built:
    config = hf.TableTransformerConfig(backbone_config=_resnet(), d_model=32, **_DETR)
    return hf.TableTransformerForObjectDetection(config), hf.DetrImageProcessor(size=FEW_PIXELS)


def _conditional_detr() -> Built:
    config = hf.ConditionalDetrConfig(backbone_config=_resnet(), d_model=32, **_DETR)
    return hf.ConditionalDetrForObjectDetection(config), hf.ConditionalDetrImageProcessor(size=FEW_PIXELS)


def _dab_detr() -> Built:
    config = hf.DabDetrConfig(backbone_config=_resnet(), hidden_size=32, **_DETR)
    return hf.DabDetrForObjectDetection(config), hf.ConditionalDetrImageProcessor(size=FEW_PIXELS)


def _deformable_detr() -> Built:
    config = hf.DeformableDetrConfig(backbone_config=_resnet(), d_model=32, num_feature_levels=4, **_DETR)
    return hf.DeformableDetrForObjectDetection(config), hf.DeformableDetrImageProcessor(size=FEW_PIXELS)


def _rt_detr() -> Built:
    backbone = hf.RTDetrResNetConfig(**_WIDTHS, out_features=STAGES[1:])
    config = hf.RTDetrConfig(backbone_config=backbone, hidden_expansion=0.5, **_SCALES)
    return hf.RTDetrForObjectDetection(config), hf.RTDetrImageProcessor(size=WIDER_SQUARE)


def _rt_detr_v2() -> Built:
    backbone = hf.RTDetrResNetConfig(**_WIDTHS, out_features=STAGES[1:])
    config = hf.RTDetrV2Config(backbone_config=backbone, **_SCALES)
    return hf.RTDetrV2ForObjectDetection(config), hf.RTDetrImageProcessor(size=WIDER_SQUARE)


def _d_fine() -> Built:
    backbone = hf.HGNetV2Config(
        stem_channels=[3, 8, 8], hidden_sizes=[8, 16, 24, 32], stage_in_channels=[8, 8, 16, 24],
        stage_mid_channels=[8] * 4, stage_out_channels=[8, 16, 24, 32], stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[2] * 4, embedding_size=8, depths=[1] * 4, out_features=STAGES[1:],
    )  # fmt: skip
    config = hf.DFineConfig(backbone_config=backbone, **_SCALES)
    return hf.DFineForObjectDetection(config), hf.RTDetrImageProcessor(size=WIDER_SQUARE)


def _yolos() -> Built:
    config = hf.YolosConfig(
        **_VIT, intermediate_size=32, image_size=[96, 160], patch_size=16, num_detection_tokens=QUERIES,
        use_mid_position_embeddings=True, id2label=LABELS,
    )  # fmt: skip
    return hf.YolosForObjectDetection(config), hf.YolosImageProcessor(size=FEW_PIXELS)


def _lw_detr() -> Built:
    backbone = hf.LwDetrViTConfig(**_WINDOWED_VIT, pretrain_image_size=96, window_block_indices=[0, 1])
    config = hf.LwDetrConfig(backbone_config=backbone, projector_scale_factors=[1.0], **_LIGHT)
    return hf.LwDetrForObjectDetection(config), hf.DeformableDetrImageProcessor(size=WIDER_SQUARE)


def _rf_detr() -> Built:
    backbone = hf.RfDetrDinov2Config(**(_WINDOWED_VIT | {"num_windows": 2}), mlp_ratio=2, window_block_indexes=[0, 1])
    config = hf.RfDetrConfig(backbone_config=backbone, **_LIGHT)
    return hf.RfDetrForObjectDetection(config), hf.RfDetrImageProcessor(size=WIDER_SQUARE)


def _segformer() -> Built:
    config = hf.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
        id2label=LABELS,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config), hf.SegformerImageProcessor(size=SQUARE)


def _upernet() -> Built:
    backbone = hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, out_features=STAGES)
    config = hf.UperNetConfig(
        backbone_config=backbone, hidden_size=16, auxiliary_in_channels=24, auxiliary_channels=16, id2label=LABELS
    )
    return hf.UperNetForSemanticSegmentation(config), hf.SegformerImageProcessor(size=SQUARE)


def _mobilevit() -> Built:
    config = hf.MobileViTConfig(
        image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32], num_attention_heads=2,
        aspp_out_channels=16, id2label=LABELS,
    )  # fmt: skip
    processor = hf.MobileViTImageProcessor(size={"shortest_edge": 72}, crop_size=SQUARE)
    return hf.MobileViTForSemanticSegmentation(config), processor


def _mobilevit_v2() -> Built:
    config = hf.MobileViTV2Config(image_size=64, width_multiplier=0.25, aspp_out_channels=16, id2label=LABELS)
    processor = hf.MobileViTImageProcessor(size={"shortest_edge": 72}, crop_size=SQUARE)
    return hf.MobileViTV2ForSemanticSegmentation(config), processor


def _mobilenet_v2() -> Built:
    config = hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35, id2label=LABELS)
    processor = hf.MobileNetV2ImageProcessor(size={"shortest_edge": 72}, crop_size=SQUARE)
    return hf.MobileNetV2ForSemanticSegmentation(config), processor


def _dpt() -> Built:
    config = hf.DPTConfig(
        **_DEEP_VIT, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
        reassemble_factors=[4, 2, 1, 0.5], id2label=LABELS,
    )  # fmt: skip
    return hf.DPTForSemanticSegmentation(config), hf.DPTImageProcessor(size=SQUARE)


def _beit() -> Built:
    config = hf.BeitConfig(**_DEEP_VIT, out_indices=[1, 2, 3, 4], use_auxiliary_head=False, id2label=LABELS)
    return hf.BeitForSemanticSegmentation(config), hf.BeitImageProcessor(size=SQUARE, do_center_crop=False)


def _data2vec() -> Built:
    config = hf.Data2VecVisionConfig(**_DEEP_VIT, out_indices=[1, 2, 3, 4], use_auxiliary_head=False, id2label=LABELS)
    return hf.Data2VecVisionForSemanticSegmentation(config), hf.BeitImageProcessor(size=SQUARE, do_center_crop=False)


def _swin() -> Any:
    return hf.SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1, 2, 2, 4], window_size=4,
        out_features=STAGES,
    )  # fmt: skip


def _mask2former() -> Built:
    config = hf.Mask2FormerConfig(
        backbone_config=_swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=QUERIES,
        id2label=LABELS,
    )  # fmt: skip
    return hf.Mask2FormerForUniversalSegmentation(config), hf.Mask2FormerImageProcessor(size=FEW_PIXELS)


def _maskformer() -> Built:
    decoder = hf.DetrConfig(**_DETR, d_model=32, backbone_config=_resnet())
    config = hf.MaskFormerConfig(
        backbone_config=_swin(), fpn_feature_size=32, mask_feature_size=32, decoder_config=decoder, id2label=LABELS
    )
    return hf.MaskFormerForInstanceSegmentation(config), hf.MaskFormerImageProcessor(size=FEW_PIXELS)


DETECTORS: Mapping[str, Callable[[], Built]] = {
    "detr": _detr, "conditional_detr": _conditional_detr, "deformable_detr": _deformable_detr, "dab_detr": _dab_detr,
    "table_transformer": _table_transformer, "rt_detr": _rt_detr, "rt_detr_v2": _rt_detr_v2, "d_fine": _d_fine,
    "yolos": _yolos, "lw_detr": _lw_detr, "rf_detr": _rf_detr,
}  # fmt: skip
SEGMENTERS: Mapping[str, Callable[[], Built]] = {
    "segformer": _segformer, "upernet": _upernet, "mobilevit": _mobilevit, "mobilevit_v2": _mobilevit_v2,
    "mobilenet_v2": _mobilenet_v2, "dpt": _dpt, "beit": _beit, "data2vec": _data2vec,
}  # fmt: skip
UNIVERSAL: Mapping[str, Callable[[], Built]] = {"mask2former": _mask2former, "maskformer": _maskformer}


def save(name: str, folder: Path) -> Path:
    """Save a model with its processor in a folder below `folder`, always with the same weights, and return that."""
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network, processor = ({**DETECTORS, **SEGMENTERS, **UNIVERSAL})[name]()
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)  # so that no bias and no embedding is zero
    network.save_pretrained(folder / name)
    processor.save_pretrained(folder / name)
    return folder / name
