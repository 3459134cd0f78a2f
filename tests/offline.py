"""The oracle: stock transformers, offline, over a whole prompt. No line of Parley's computation is used."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

# Wide enough that the reference never cuts the waveform into chunks, each of which would lose 555 samples.
ONE_CHUNK = 1_000_000


@dataclass
class Offline:
    """What transformers' generate() made."""

    text_ids: list[int]  # including the end-of-reply token, where it came
    codes: np.ndarray  # [frames, K] int32
    samples: np.ndarray


def mel_of(audio: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Input features [1, 128, n] and their mask of one sound, by the stock feature extractor."""
    extractor = WhisperFeatureExtractor(
        feature_size=128, sampling_rate=16000, hop_length=160, n_fft=400, chunk_length=300, return_attention_mask=True
    )
    out = extractor(
        audio, sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
    )
    return out["input_features"], out["attention_mask"]


def audio_inputs(audios: list[np.ndarray], dtype: torch.dtype) -> dict[str, Any]:
    """The model's audio arguments for several sounds, each extracted alone."""
    if not audios:
        return {}
    features = [mel_of(audio) for audio in audios]
    longest = max(mask.shape[1] for _, mask in features)
    padded = [torch.nn.functional.pad(mel, (0, longest - mel.shape[2])) for mel, _ in features]
    masks = [torch.nn.functional.pad(mask, (0, longest - mask.shape[1])) for _, mask in features]
    return {"input_features": torch.cat(padded).to(dtype), "feature_attention_mask": torch.cat(masks)}


def vision_inputs(pictures: list[tuple[str, np.ndarray, np.ndarray]], seconds_per_grid: float) -> dict[str, Any]:
    """The model's picture and video arguments, from (kind, pixels, grid) in the order of the prompt."""
    out: dict[str, Any] = {}
    for kind, pixels_name, grid_name in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [(pixels, grid) for k, pixels, grid in pictures if k == kind]
        if chosen:
            out[pixels_name] = torch.from_numpy(np.concatenate([pixels for pixels, _ in chosen]))
            out[grid_name] = torch.from_numpy(np.stack([grid for _, grid in chosen]))
    if "video_grid_thw" in out:
        out["video_second_per_grid"] = torch.full((len(out["video_grid_thw"]),), seconds_per_grid)
    return out


def generate(
    model: Any,
    prompt: np.ndarray,
    *,
    audios: list[np.ndarray],
    pictures: list[tuple[str, np.ndarray, np.ndarray]] = (),  # type: ignore[assignment]
    seconds_per_grid: float = 1.0,
    use_audio_in_video: bool = False,
    window_ms: int = 8000,
    max_tokens: int = 12,
    max_frames: int = 10,
    speaker: str = "ethan",
    is_greedy: bool = True,
) -> Offline:
    """Run stock `generate()` greedily over `prompt` [T] and return its text, codes and samples."""
    # Stock 5.24 looks for it there when sound and picture meet in the Talker's prompt, and no checkpoint has it.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    model.thinker.model.audio_tower.n_window_infer = window_ms // 10
    model.thinker.generation_config.do_sample = not is_greedy
    found: dict[str, torch.Tensor] = {}
    decode = type(model.code2wav).chunked_decode

    def spy(codes: torch.Tensor, **_: Any) -> torch.Tensor:
        found["codes"] = codes
        return decode(model.code2wav, codes, chunk_size=ONE_CHUNK, left_context_size=0)

    model.code2wav.chunked_decode = spy
    quiet = warnings.catch_warnings()
    quiet.__enter__()
    warnings.simplefilter("ignore", UserWarning)  # it notes that a penalty applies to generated codes only: so it is
    try:
        ids = torch.from_numpy(prompt)[None]
        sequences, samples = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=use_audio_in_video,
            **audio_inputs(list(audios), next(model.parameters()).dtype),
            **vision_inputs(list(pictures), seconds_per_grid),
            speaker=speaker,
            return_audio=True,
            thinker_max_new_tokens=max_tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=model.config.im_end_token_id,
            # generate() samples one code more than it completes
            talker_max_new_tokens=max_frames + 1,
            talker_do_sample=False,
            talker_temperature=None,
            talker_top_k=None,
            talker_top_p=None,
        )
    finally:
        quiet.__exit__(None, None, None)
        del model.code2wav.chunked_decode
    codes = found["codes"][0].T.to(torch.int32).numpy()
    return Offline(sequences[0, len(prompt) :].tolist(), codes, samples[0, 0].numpy())
