"""Models of transformers with several or other kinds of input: images, speech, video, series."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from tests.models.program import floats, integers
from tests.models.transformers_models import (
    BATCH,
    LABELS,
    VOCABULARY,
    Batch,
    Batches,
    Make,
    image_batch,
    padded,
    programs_of,
    token_ids,
)

# -- models of several or other kinds of input -----------------------------------------------------

_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_TOWER = {**_LAYERS, "num_attention_heads": 4}
_TEXT_TOWER = {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
_IMAGE_TOWER = {**_TOWER, "image_size": 32, "patch_size": 8}
_SPEECH = {
    **{**_TOWER, "vocab_size": VOCABULARY, "conv_dim": (16, 16), "conv_kernel": (10, 3)},
    **{"conv_stride": (5, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4},
    **{"num_conv_pos_embedding_groups": 2, "mask_time_length": 2},
}
SAMPLES = 400


def pairs(number: int, device: torch.device, training: bool) -> Batch:
    """Return images and their captions."""
    captions = padded(number, device)
    captions["input_ids"][:, -1] = VOCABULARY - 1  # the end of the text, by which towers pool
    images = image_batch(number, device, False)
    return {**captions, **images}


def speech(number: int, device: torch.device, training: bool) -> Batch:
    """Return recordings and transcripts."""
    batch = {"input_values": floats(number, BATCH, SAMPLES, device=device)}
    if training:
        batch["labels"] = integers(number, 1, VOCABULARY, BATCH, 4, device=device)
    return batch


def spectrograms(number: int, device: torch.device, training: bool) -> Batch:
    """Return spectrograms and transcripts."""
    batch = {"input_features": floats(number, BATCH, 16, 32, device=device)}
    batch["labels" if training else "decoder_input_ids"] = token_ids(number, device)
    return batch


def pictures(number: int, device: torch.device, training: bool) -> Batch:
    """Return images alone."""
    return image_batch(number, device, False)


def clips(number: int, device: torch.device, training: bool) -> Batch:
    """Return short films and classes."""
    batch = {"pixel_values": floats(number, BATCH, 4, 3, 16, 16, device=device)}
    if training:
        batch["labels"] = integers(number, 0, LABELS, BATCH, device=device)
    return batch


def series(number: int, device: torch.device, training: bool) -> Batch:
    """Return the past of several quantities, and their future."""
    batch = {"past_values": floats(number, BATCH, 32, 2, device=device)}
    if training:
        batch["future_values"] = floats(number + 500, BATCH, 8, 2, device=device)
    return batch


def illustrated(number: int, device: torch.device, training: bool) -> Batch:
    """Return text in which sixteen tokens are those of an image."""
    ids = integers(number, 3, VOCABULARY - 1, BATCH, 24, device=device)
    ids[:, 2:18] = VOCABULARY - 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch |= image_batch(number, device, False)
    return {**batch, "labels": ids} if training else batch


def _towers(name: str) -> Any:
    kind = getattr(transformers, name)
    more = {"eos_token_id": VOCABULARY - 1} if name == "CLIPModel" else {}
    config = kind.config_class(
        text_config={**_TEXT_TOWER, **more}, vision_config=_IMAGE_TOWER, projection_dim=16
    )
    return kind(config)


def _of(name: str, **config: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def _llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_IMAGE_TOWER),
        text_config=transformers.LlamaConfig(**_TEXT_TOWER | {"max_position_embeddings": 64}),
        image_token_id=VOCABULARY - 1,
        image_token_index=VOCABULARY - 1,
    )
    return transformers.LlavaForConditionalGeneration(config)


class Contrastive(torch.nn.Module):
    """Two towers that are trained on pairs, as their users call them."""

    def __init__(self, towers: Any) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, **batch: torch.Tensor) -> Any:
        """Return the towers' output with the loss."""
        return self.towers(**batch, return_loss=True)


def _contrastive(name: str) -> Any:
    return Contrastive(_towers(name))


_WHISPER: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16},
    **{"max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1},
}
_FILM: dict[str, Any] = {
    **_TOWER,
    **{"image_size": 16, "patch_size": 8, "num_frames": 4, "num_labels": LABELS},
}
_PAST = {"context_length": 32, "prediction_length": 8, "num_input_channels": 2, "d_model": 16}


def _others() -> Iterator[tuple[str, Make, Batches]]:
    of = functools.partial
    yield "CLIPModel", of(_contrastive, "CLIPModel"), pairs
    yield "SiglipModel", of(_contrastive, "SiglipModel"), pairs
    yield "Wav2Vec2ForCTC", of(_of, "Wav2Vec2ForCTC", **_SPEECH), speech
    yield "HubertForCTC", of(_of, "HubertForCTC", **_SPEECH), speech
    yield "WavLMForCTC", of(_of, "WavLMForCTC", **_SPEECH), speech
    yield (
        "WhisperForConditionalGeneration",
        of(_of, "WhisperForConditionalGeneration", **_WHISPER),
        spectrograms,
    )
    yield (
        "ViTMAEForPreTraining",
        of(
            _of,
            "ViTMAEForPreTraining",
            **_IMAGE_TOWER,
            **{"decoder_hidden_size": 16, "decoder_intermediate_size": 32},
            **{"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        ),
        pictures,
    )
    for name in ("TimesformerForVideoClassification", "VivitForVideoClassification"):
        more: dict[str, Any] = {"tubelet_size": [2, 8, 8]} if name.startswith("Vivit") else {}
        yield name, of(_of, name, **_FILM, **more), clips
    video = "VideoMAEForVideoClassification"
    yield video, of(_of, video, **_FILM), clips
    yield (
        "PatchTSTForPrediction",
        of(
            _of, "PatchTSTForPrediction",
            **_PAST, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        ),
        series,
    )  # fmt: skip
    yield "PatchTSMixerForPrediction", of(_of, "PatchTSMixerForPrediction", **_PAST), series
    yield "LlavaForConditionalGeneration", _llava, illustrated


PROGRAMS = list(programs_of(_others()))
