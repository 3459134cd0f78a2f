"""Builds the streaming stages of a loaded checkpoint, once, for all conversations."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config import Bypass, EngineConfig, SettingError
from engine.layout import Scribe
from engine.loader import LoadedModel
from engine.metrics import Metrics
from engine.models import hf
from engine.models.audio_encoder import AudioEncoder
from engine.models.code2wav import Code2Wav
from engine.models.log_mel import LogMel
from engine.models.pictures import PictureConfig
from engine.models.sampling import Sampler, SamplingParams
from engine.models.talker import Talker
from engine.models.thinker import Thinker
from engine.models.vision_encoder import VisionEncoder

# transformers' generate() defaults for this model (facts.md section 2.2); a checkpoint's own values go before them.
THINKER_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
TALKER_DEFAULTS = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05}
PREDICTOR_TOP_K, PREDICTOR_TOP_P = 50, 0.8
NUM_TALKER_SPECIALS = 1024  # the last ids of the Talker's vocabulary are no codes
MS_PER_MEL_FRAME = 10


@dataclass(frozen=True)
class Speech:
    """The stages that only a spoken reply needs."""

    talker: Talker
    code2wav: Code2Wav
    talker_sampler: Sampler
    predictor_sampler: Sampler
    end_of_speech: int
    speakers: dict[str, int]
    speaker_id: int
    voice: str


@dataclass(frozen=True)
class Stages:
    """All stages and the numbers of the checkpoint that the pipeline needs."""

    scribe: Scribe
    audio: AudioEncoder
    vision: VisionEncoder
    thinker: Thinker
    thinker_sampler: Sampler
    speech: Speech | None
    metrics: Metrics
    window_ms: int
    seconds_per_grid: float
    positions_per_second: float
    spatial_merge: int
    max_tokens: int
    keeps_media: bool


def build_stages(loaded: LoadedModel, config: EngineConfig, metrics: Metrics) -> Stages:
    """Wrap the modules of `loaded` as `config` asks."""
    model = loaded.model
    thinker_config = model.config.thinker_config
    scribe = Scribe(loaded.tokenizer, model.config)
    generator = torch.Generator(loaded.device).manual_seed(config.speech.seed)
    window_ms = config.input.window_ms or thinker_config.audio_config.n_window_infer * MS_PER_MEL_FRAME
    pictures = PictureConfig.from_checkpoint(loaded.preprocessor)
    thinker = Thinker(model)
    speaks = model.has_talker and config.speech.bypass is not Bypass.ALWAYS
    sampling = _thinker_sampling(loaded.generation, config.speech.is_greedy)
    preprocessor = loaded.preprocessor
    mel = LogMel(
        preprocessor.get("feature_size", 128), preprocessor.get("n_fft", 400), preprocessor.get("hop_length", 160)
    )
    return Stages(
        scribe=scribe,
        audio=AudioEncoder(hf.audio_tower(model), mel, window_ms),
        vision=VisionEncoder(hf.vision_tower(model), pictures),
        thinker=thinker,
        thinker_sampler=Sampler(sampling, thinker.vocabulary, generator),
        speech=_build_speech(loaded, scribe, config, generator) if speaks else None,
        metrics=metrics,
        window_ms=window_ms,
        seconds_per_grid=pictures.temporal_patch_size / config.input.video_fps,
        positions_per_second=thinker_config.position_id_per_seconds,
        spatial_merge=pictures.merge_size,
        max_tokens=min(config.input.max_tokens, thinker_config.text_config.max_position_embeddings),
        keeps_media=config.trace is not None,
    )


def _build_speech(loaded: LoadedModel, scribe: Scribe, config: EngineConfig, generator: torch.Generator) -> Speech:
    speech = config.speech
    talker_config = loaded.model.config.talker_config
    talker = Talker(loaded.model, scribe.layout.assistant_header)
    if config.use_graphs or (config.use_graphs is None and loaded.device.type == "cuda"):
        talker.use_graphs()
    end = talker_config.codec_eos_token_id
    specials = range(talker.vocabulary - NUM_TALKER_SPECIALS, talker.vocabulary)
    suppressed = tuple(token for token in specials if token != end)
    params = _talker_sampling(loaded.generation, speech.is_greedy, suppressed)
    # The predictor samples when the Talker does (modeling_qwen3_omni_moe.py, `_prepare_generation_config`).
    predictor = SamplingParams(params.do_sample, top_k=PREDICTOR_TOP_K, top_p=PREDICTOR_TOP_P)
    speakers = {name.lower(): number for name, number in (talker_config.speaker_id or {}).items()}
    voice = choose_voice(speech.voice, speakers)
    return Speech(
        talker=talker,
        code2wav=Code2Wav(loaded.model.code2wav),
        talker_sampler=Sampler(params, talker.vocabulary, generator),
        predictor_sampler=Sampler(predictor, talker.predictor.vocabulary, generator),
        end_of_speech=end,
        speakers=speakers,
        speaker_id=speakers[voice],
        voice=voice,
    )


def choose_voice(asked: str | None, speakers: dict[str, int]) -> str:
    """The voice to speak with: the one asked for, else Ethan (the released default), else the table's first."""
    if not speakers:
        raise SettingError("this model has no voice (its talker_config.speaker_id is empty): ask for text only")
    if asked is None:
        return "ethan" if "ethan" in speakers else next(iter(speakers))
    if asked.lower() not in speakers:
        raise SettingError(f"this model has no voice {asked!r}; choose one of {', '.join(sorted(speakers))}")
    return asked.lower()


def _thinker_sampling(generation: dict[str, Any], is_greedy: bool) -> SamplingParams:
    """The checkpoint's rules for text: greedy unless its generation configuration samples, as transformers has it."""
    values = {key: generation.get(f"thinker_{key}", generation.get(key)) for key in (*THINKER_DEFAULTS, "do_sample")}
    return _sampling(values, THINKER_DEFAULTS, is_greedy, samples_by_default=False)


def _talker_sampling(generation: dict[str, Any], is_greedy: bool, suppressed: tuple[int, ...]) -> SamplingParams:
    """The checkpoint's rules for code 0 of a frame."""
    values = {key: generation.get(f"talker_{key}") for key in (*TALKER_DEFAULTS, "do_sample")}
    return replace(_sampling(values, TALKER_DEFAULTS, is_greedy, samples_by_default=True), suppressed=suppressed)


def _sampling(
    values: dict[str, Any], defaults: dict[str, float], is_greedy: bool, *, samples_by_default: bool
) -> SamplingParams:
    known = defaults | {key: values[key] for key in defaults if values[key] is not None}
    does_sample = samples_by_default if values["do_sample"] is None else bool(values["do_sample"])
    return SamplingParams(
        do_sample=does_sample and not is_greedy,
        temperature=float(known["temperature"]),
        top_k=int(known["top_k"]),
        top_p=float(known["top_p"]),
        repetition_penalty=float(known["repetition_penalty"]),
    )
