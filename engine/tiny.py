"""Builds an untrained checkpoint in the released layout: for the tests, the benchmark and first start.

The weights are random, so what it says is noise; the layout, the topology and every code path are the real ones.
Run `python -m engine.tiny FOLDER` to make one.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.layout import CHAT_TEMPLATE
from engine.models.hf import OmniConfig, OmniModel, new_config, new_model, save_pretrained

SPECIAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
)  # fmt: skip

# A small English vocabulary: enough that text survives a round trip and the roles are single tokens.
CORPUS: Final = (
    "user assistant system user assistant system user assistant system user assistant system",
    "hello there how are you today i am fine thank you what can you do i can hear you and see you",
    "the quick brown fox jumps over the lazy dog one two three four five six seven eight nine ten",
    "what is the capital of france repeat after me open the door please my name is good morning good night",
    "is it a red circle or a blue square what colour was it when i said now you are a helpful voice assistant",
)


@dataclass(frozen=True, slots=True)
class TinySize:
    """Widths of an untrained checkpoint; the topology is always the released one."""

    hidden: int
    thinker_layers: int
    talker_hidden: int
    talker_layers: int
    predictor_layers: int
    experts: int
    encoder_width: int
    encoder_layers: int
    vision_width: int
    code2wav_width: int
    code2wav_layers: int
    codebook: int
    head_dim: int
    window_frames: int = 800
    max_picture_pixels: int = 160 * 160
    accept_layer: int = 4


# For the tests: seconds to build, milliseconds to run.
TEST: Final = TinySize(32, 6, 32, 3, 2, 8, 32, 2, 32, 32, 2, 64, 8, max_picture_pixels=64 * 96)
# The size of the model that two cores can hold a conversation with (stack.md section 6.3).
DESKTOP: Final = TinySize(256, 6, 192, 4, 2, 8, 128, 4, 128, 192, 2, 256, 32)


def _rope(theta: float, head_dim: int | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if head_dim is not None:
        half = head_dim // 2
        side = half // 3
        rope |= {"mrope_section": [half - 2 * side, side, side], "interleaved": True, "mrope_interleaved": True}
    return rope


def tiny_config(size: TinySize, tokenizer: Tokenizer) -> OmniConfig:
    """A complete configuration of `size`: every key the model reads is explicit, as in a real checkpoint."""
    token = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    shared = {
        "audio_token_id": token["<|audio_pad|>"],
        "image_token_id": token["<|image_pad|>"],
        "video_token_id": token["<|video_pad|>"],
        "audio_start_token_id": token["<|audio_start|>"],
        "audio_end_token_id": token["<|audio_end|>"],
        "vision_start_token_id": token["<|vision_start|>"],
        "vision_end_token_id": token["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    heads = max(2, size.hidden // size.head_dim // 2) * 2
    text = {
        "vocab_size": math.ceil(tokenizer.get_vocab_size() / 16) * 16,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "moe_intermediate_size": size.hidden,
        "num_hidden_layers": size.thinker_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": size.head_dim,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rope_parameters": _rope(1e6, size.head_dim),
        "max_position_embeddings": 65536,
    }
    talker_heads = max(2, size.talker_hidden // size.head_dim // 2) * 2
    talker_text = text | {
        "vocab_size": size.codebook + 1024,
        "hidden_size": size.talker_hidden,
        "intermediate_size": 2 * size.talker_hidden,
        "moe_intermediate_size": size.talker_hidden,
        "shared_expert_intermediate_size": size.talker_hidden,
        "num_hidden_layers": size.talker_layers,
        "num_attention_heads": talker_heads,
        "num_key_value_heads": talker_heads // 2,
    }
    first_special = size.codebook
    return new_config(
        thinker_config={
            "text_config": text,
            "audio_config": {
                "d_model": size.encoder_width,
                "encoder_layers": size.encoder_layers,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 2 * size.encoder_width,
                "downsample_hidden_size": max(8, size.encoder_width // 4),
                "output_dim": size.hidden,
                "n_window": 50,
                "n_window_infer": size.window_frames,
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": size.vision_width,
                "intermediate_size": 2 * size.vision_width,
                "num_heads": 4,
                "out_hidden_size": size.hidden,
                "deepstack_visual_indexes": [0, 1, 2],
            },
            "user_token_id": tokenizer.token_to_id("user"),
            **shared,
        },
        talker_config={
            "text_config": talker_text,
            "code_predictor_config": {
                "vocab_size": size.codebook,
                "hidden_size": size.talker_hidden,
                "intermediate_size": 2 * size.talker_hidden,
                "num_hidden_layers": size.predictor_layers,
                "num_attention_heads": talker_heads,
                "num_key_value_heads": talker_heads // 2,
                "head_dim": size.head_dim,
                "num_code_groups": 16,
                "rope_parameters": _rope(1e6),
            },
            "num_code_groups": 16,
            "thinker_hidden_size": size.hidden,
            "accept_hidden_layer": size.accept_layer,
            "spatial_merge_size": 2,
            "speaker_id": {"chelsie": first_special + 253, "ethan": first_special + 254, "aiden": first_special + 255},
            "codec_pad_id": first_special + 100,
            "codec_bos_id": first_special + 101,
            "codec_eos_token_id": first_special + 102,
            "codec_nothink_id": first_special + 107,
            "codec_think_bos_id": first_special + 108,
            "codec_think_eos_id": first_special + 109,
            **shared,
        },
        code2wav_config={
            "codebook_size": size.codebook,
            "hidden_size": size.code2wav_width,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 2 * size.code2wav_width,
            "num_hidden_layers": size.code2wav_layers,
            "decoder_dim": max(64, size.code2wav_width),
            "layer_scale_initial_scale": 0.5,
            "rope_parameters": _rope(1e4),
        },
        im_start_token_id=token["<|im_start|>"],
        im_end_token_id=token["<|im_end|>"],
        tts_pad_token_id=token["<tts_pad>"],
        tts_bos_token_id=token["<tts_text_bos>"],
        tts_eos_token_id=token["<tts_text_eod>"],
        system_token_id=tokenizer.token_to_id("system"),
        user_token_id=tokenizer.token_to_id("user"),
        assistant_token_id=tokenizer.token_to_id("assistant"),
    )


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of a few hundred tokens with the released special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(["user\nassistant\nsystem\n" * 50, *CORPUS], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _spread(model: OmniModel, seed: int) -> None:
    """Give every weight a scale that keeps signals alive through the depth, so that outputs vary with inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() < 2:
                # Biases, norms and activations too: a zero or a one would hide where they are forgotten.
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
                continue
            fan_in = parameter[0].numel()
            gain = 3.0 if "embed" in name else 1.0
            if ".experts." in name:
                fan_in = parameter.shape[-1]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain / math.sqrt(fan_in))
        for name, parameter in model.code2wav.named_parameters():
            last = len(model.code2wav.decoder) - 1
            if name == f"decoder.{last}.conv.weight":
                parameter.mul_(2.0)  # speech level
            elif "decoder" in name and "conv" in name and parameter.dim() == 3:
                parameter.mul_(0.5)
            elif name.endswith("gamma"):
                parameter.fill_(0.5)
        model.thinker.lm_head.weight.normal_(generator=generator)


def _files(size: TinySize, tokenizer: Tokenizer) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_size": 128, "hop_length": 160, "n_fft": 400, "chunk_length": 300, "n_samples": 4800000,
        "nb_max_frames": 30000, "sampling_rate": 16000, "padding_side": "right", "padding_value": 0.0,
        "return_attention_mask": True, "dither": 0.0,
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 32 * 32, "max_pixels": size.max_picture_pixels,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    yield "generation_config.json", {"eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    yield "chat_template.json", {"chat_template": CHAT_TEMPLATE}
    yield "tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 32768,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(name)): {
                "content": name, "special": True, "lstrip": False, "rstrip": False, "single_word": False,
                "normalized": False,
            }
            for name in SPECIAL_TOKENS
        },
        "image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
    }  # fmt: skip


def build_tiny_checkpoint(
    folder: Path, size: TinySize = TEST, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str = "200MB"
) -> Path:
    """Write an untrained checkpoint to `folder` and return it.

    The same `size` and `seed` give the same files. `shard` bounds one safetensors file ("2MB" makes several).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    model = new_model(tiny_config(size, tokenizer))
    _spread(model, seed)
    save_pretrained(model.to(dtype), folder, shard)
    for name, content in _files(size, tokenizer):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    return folder


def main() -> None:
    """Build the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--size", choices=("test", "desktop"), default="test")
    arguments = parser.parse_args()
    build_tiny_checkpoint(arguments.folder, TEST if arguments.size == "test" else DESKTOP)


if __name__ == "__main__":
    main()
