"""Models of transformers with tiny random weights: eval, training, and a whole training step.

A model is a row: its class, and what its configuration needs in addition to the small sizes that
all of its kind share.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers

from tests.models.program import Program, Session, floats, integers, trained

VOCABULARY = 96
BATCH, LENGTH = 2, 8
LABELS = 5

Batch = dict[str, torch.Tensor]
Row = tuple[str, dict[str, Any]]

TEXT: dict[str, Any] = {
    # sizes by all the names that configurations have for them; each takes those that it knows
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim"), 64),
    **dict.fromkeys(("d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "global_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("attention_window", "sliding_window", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "rotary_dim", "laurel_rank", "time_step_rank"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads"), 2),
    **dict.fromkeys(("type_vocab_size", "altup_num_inputs", "linear_num_key_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    "linear_num_value_heads": 4, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_expand": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    **{"image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": LABELS},
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
    **{"window_size": 2, "hidden_sizes": [16, 32], "embed_dims": [16, 32]},
}

DECODERS = """
Afmoe Apertus Arcee AriaText Bart Beam BigBird BigBirdPegasus BioGpt BitNet Blenderbot
BlenderbotSmall Bloom Camembert CodeGen Cohere Cohere2 Cohere2Moe Cwm Data2VecText DeepseekV4
DiffLlama Doge Dots1 Electra Emu3 Ernie Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FalconMamba FlexOlmo
Flint Gemma Gemma2 Gemma3 Glm Glm4 Glm4Moe GPTBigCode GPTNeoX GPTNeoXJapanese GptOss GPTJ Granite
GraniteSWA GraniteMoe GraniteMoeSWA GraniteMoeShared Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HYV3
HYV4 HyperCLOVAX Inkling2 Inkling Llama Jais2 JetMoe Kolibri1 Laguna Lfm2 Llama4 Mamba Marian MBart
MegatronBert Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral Mixtral
Mllama ModernBertDecoder Moshi Mpt Mvp NanoChat Nemotron NemotronH Olmo Olmo2 Olmo3 OlmoHybrid Olmoe
OPT Pegasus Persimmon Phi Phi3 Phimoe PLBart Qwen2 Qwen2Moe Qwen3 Qwen3Moe RemBert Roberta
RobertaPreLayerNorm RoFormer Rwkv SeedOss SmolLM3 SolarOpen StableLm Starcoder2 TrOCR VaultGemma
Whisper XGLM XLMRoberta XLMRobertaXL
"""
ENCODERS = """
Albert Bert BigBird Camembert ConvBert Data2VecText Deberta DebertaV2 DistilBert Electra Ernie Esm
EuroBert FNet Gte IBert JinaEmbeddingsV3 LayoutLM Longformer MegatronBert MobileBert ModernBert
MPNet Mra NomicBert Nystromformer RemBert Roberta RobertaPreLayerNorm RoFormer SqueezeBert Tapas
Ultrabert XLMRoberta XLMRobertaXL Yoso
"""
TRANSLATORS = """
Bart BigBirdPegasus Blenderbot BlenderbotSmall FSMT LED M2M100 MBart MT5 Mvp NllbMoe Pegasus
PegasusX PLBart UMT5
"""
IMAGES = """
Beit ConvNext ConvNextV2 Data2VecVision DeiT Dinov2 Dinov2WithRegisters FocalNet IJepa MobileNetV1
MobileNetV2 RegNet ResNet SwiftFormer ViT ViTMSN
"""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LATENT = {"num_key_value_heads": 4}  # with latents, keys are not shared between heads
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
MORE_DECODERS: dict[str, dict[str, Any]] = {
    "BertLMHeadModel": {}, "BertGenerationDecoder": {}, "GPT2LMHeadModel": {},
    "OpenAIGPTLMHeadModel": {}, "CTRLLMHeadModel": {"dff": 64}, "XLMWithLMHeadModel": {},
    "XLNetLMHeadModel": {"max_position_embeddings": None},
    "DeepseekV2ForCausalLM": _LATENT, "DeepseekV3ForCausalLM": _LATENT,
    "LongcatFlashForCausalLM": _LATENT, "MiniCPM3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT, "FalconForCausalLM": {"head_dim": None},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1, "chunk_size": 4, "expand": 2},
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_chunk_size": 4},
    "JambaForCausalLM": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "Qwen3NextForCausalLM": _LINEAR_FIRST, "Qwen3_5ForCausalLM": _LINEAR_FIRST,
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], "mamba_chunk_size": 4},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
}  # fmt: skip
MORE_ENCODERS: dict[str, dict[str, Any]] = {
    "FlaubertWithLMHeadModel": {},
    "FunnelForMaskedLM": {"num_hidden_layers": None, "block_sizes": [1, 1]},
    "LukeForMaskedLM": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "RoCBertForMaskedLM": {
        **{"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
        **{"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    },
    "ReformerForMaskedLM": {
        **{"axial_pos_embds": False, "is_decoder": False},
        **{"attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    },
    "XmodForMaskedLM": {"default_language": "en_XX"},
}
MORE_TRANSLATORS: dict[str, dict[str, Any]] = {
    "MarianMTModel": {},
    "SeamlessM4TForTextToText": {},
    "SeamlessM4Tv2ForTextToText": {},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "SwitchTransformersForConditionalGeneration": {"decoder_start_token_id": 0},
    "LongT5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "ProphetNetForConditionalGeneration": {"num_hidden_layers": None},
}
_PYRAMID = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "strides": [2, 2]},
    **{"patch_sizes": [3, 3], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
}
MORE_IMAGES: dict[str, dict[str, Any]] = {
    "SwinForImageClassification": {
        **{"depths": [1, 1], "num_heads": [2, 4], "patch_size": 4, "num_attention_heads": None},
    },
    "SegformerForImageClassification": {**_PYRAMID, "sr_ratios": [2, 1]},
    "PvtForImageClassification": {
        **_PYRAMID,
        **{"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2]},
    },
    "PvtV2ForImageClassification": {**_PYRAMID, "sr_ratios": [2, 1]},
    "PoolFormerForImageClassification": {
        **{**_PYRAMID, "num_attention_heads": None},
        **{"padding": [1, 1]},
    },
    "BitForImageClassification": {
        **{"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    },
    "MobileViTForImageClassification": {
        **{"hidden_sizes": [16, 24, 32], "patch_size": 2},
        **{"neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]},
    },
}


def tiny(model_class: Any, sizes: dict[str, Any], more: dict[str, Any]) -> Any:
    """Return a model of this class with random weights; None in ``more`` leaves the default."""
    config_class = model_class.config_class
    default = config_class()
    accepted = {name: size for name, size in sizes.items() if hasattr(default, name)}
    chosen = {name: value for name, value in {**accepted, **more}.items() if value is not None}
    return model_class(config_class(**chosen))


# -- batches of each kind --------------------------------------------------------------------------


def token_ids(number: int, device: torch.device, length: int = LENGTH) -> torch.Tensor:
    """Return tokens that are not special ones."""
    return integers(number, 3, VOCABULARY, BATCH, length, device=device)


def padded(number: int, device: torch.device, *, left: bool = False) -> Batch:
    """Return tokens with a mask; the second row is shorter, by another length at each call."""
    ids = token_ids(number, device)
    mask = torch.ones_like(ids)
    short = number % 3 + 1
    if left:
        mask[1, :short] = 0
    else:
        mask[1, -short:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def decoder_batch(number: int, device: torch.device, training: bool) -> Batch:
    """Return packed text to learn, or padded prompts."""
    if not training:
        return padded(number, device, left=True)
    ids = token_ids(number, device)
    return {"input_ids": ids, "labels": ids}


def encoder_batch(number: int, device: torch.device, training: bool) -> Batch:
    """Return padded text, with every third token to guess."""
    batch = padded(number, device)
    if training:
        labels = batch["input_ids"].clone()
        labels[:, torch.arange(LENGTH) % 3 != 0] = -100
        batch["labels"] = labels
    return batch


def translator_batch(number: int, device: torch.device, training: bool) -> Batch:
    """Return padded text and its translation."""
    target = token_ids(number + 500, device)
    return {**padded(number, device), "labels" if training else "decoder_input_ids": target}


def image_batch(number: int, device: torch.device, training: bool) -> Batch:
    """Return images and classes."""
    batch = {"pixel_values": floats(number, BATCH, 3, 32, 32, device=device)}
    if training:
        batch["labels"] = integers(number, 0, LABELS, BATCH, device=device)
    return batch


# -- how the models are used -----------------------------------------------------------------------

Make = Callable[[], Any]
Batches = Callable[[int, torch.device, bool], Batch]


def _answer(output: Any) -> Any:
    """Return what a program reads of an output: the logits, or the first tensor."""
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def placed(model: Any, device: torch.device) -> Any:
    """Return a model on a device, in the numbers that it is used with there.

    In float32, torch's grouped matmul on a GPU reads the sizes of the groups on the host, and no
    graph can hold it.
    """
    experts = any(getattr(getattr(model, "config", None), name, None) for name in EXPERTS)
    grouped = experts and device.type == "cuda"
    return model.to(device, torch.bfloat16 if grouped else torch.float32)


def evaluated(make: Make, batches: Batches, device: torch.device) -> Session:
    """Set up the scoring of batches."""
    model = placed(make(), device).eval()

    @torch.no_grad()
    def score(batch: Batch) -> Any:
        return _answer(model(**batch))

    return Session(score, lambda step, number: step(batches(number, device, False)))


def learning(make: Make, batches: Batches, device: torch.device) -> Session:
    """Set up a loop whose loss is one function; backward and update follow it."""
    model = placed(make(), device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(batch: Batch) -> Any:
        return model(**batch).loss

    def turn(step: Any, number: int) -> Any:
        loss = step(batches(number, device, True))
        shown = loss.detach().clone()
        optimizer.zero_grad()
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        return shown, grads

    return Session(loss_of, turn, trained(model))


def whole_step(make: Make, batches: Batches, device: torch.device) -> Session:
    """Set up a loop whose every turn is one function: loss, backward, clip, update."""
    model = placed(make(), device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_step(batch: Batch) -> Any:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> Any:
        return step(batches(number, device, True))

    return Session(train_step, turn, trained(model, optimizer))


def whole_output(make: Make, batches: Batches, device: torch.device) -> Session:
    """Set up a model that is captured itself, and all of whose output is read, caches too."""
    model = placed(make(), device).eval()

    def turn(step: Any, number: int) -> Any:
        with torch.no_grad():
            return step(**batches(number, device, False))

    return Session(model, turn)


MODES: dict[str, Callable[[Make, Batches, torch.device], Session]] = {
    "eval": evaluated,
    "train": learning,
    "step": whole_step,
    "output": whole_output,
}
STEPS = (  # models whose whole training step is compared, and all of whose output is read
    *("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "Qwen3ForCausalLM"),
    *("MambaForCausalLM", "BertForMaskedLM", "ModernBertForMaskedLM", "DebertaV2ForMaskedLM"),
    *("T5ForConditionalGeneration", "BartForConditionalGeneration", "ViTForImageClassification"),
    *("ResNetForImageClassification", "SwinForImageClassification", "Gemma3ForCausalLM"),
    *("Wav2Vec2ForCTC", "CLIPModel"),
)


def _rows(names: str, suffix: str, more: dict[str, dict[str, Any]]) -> Iterator[Row]:
    for name in names.split():
        yield f"{name}{suffix}", {}
    yield from more.items()


def _tiny_by_name(name: str, sizes: dict[str, Any], more: dict[str, Any]) -> Any:
    return tiny(getattr(transformers, name), sizes, more)


def _models() -> Iterator[tuple[str, Make, Batches]]:
    """Yield the name, the making and the batches of every model."""
    kinds: tuple[tuple[Iterator[Row], dict[str, Any], Batches], ...] = (
        (_rows(DECODERS, "ForCausalLM", MORE_DECODERS), TEXT, decoder_batch),
        (_rows(ENCODERS, "ForMaskedLM", MORE_ENCODERS), TEXT, encoder_batch),
        (_rows(TRANSLATORS, "ForConditionalGeneration", MORE_TRANSLATORS), TEXT, translator_batch),
        (_rows(IMAGES, "ForImageClassification", MORE_IMAGES), VISION, image_batch),
    )
    for rows, sizes, batches in kinds:
        for name, more in rows:
            yield name, functools.partial(_tiny_by_name, name, sizes, more), batches


def programs_of(models: Iterable[tuple[str, Make, Batches]]) -> Iterator[Program]:
    """Yield the programs of some models, given as name, maker and batches."""
    for name, make, batches in models:
        modes = MODES if name in STEPS else ("eval", "train")
        for mode in modes:
            start = functools.partial(MODES[mode], make, batches)
            yield Program(f"transformers/{name}/{mode}", start, needs=("transformers",))


PROGRAMS = list(programs_of(_models()))
