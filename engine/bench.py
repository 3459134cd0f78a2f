"""Measures the engine, and stock transformers beside it: same weights, same input, one process, figures as ratios."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.bundled import bundled_checkpoint
from engine.checkpoint import find_checkpoint
from engine.clock import MIC_STEP, STEP_MS, mic_seconds, speaker_seconds
from engine.config import EngineConfig, ModelConfig, SpeechConfig
from engine.conversation import Conversation
from engine.io.audio_file import read_audio
from engine.loader import LoadedModel, load_model
from engine.metrics import Metrics
from engine.models import hf
from engine.models.sampling import Sampler, SamplingParams
from engine.reply import Reply, ReplyLimits, Sound
from engine.stages import Speech, Stages, build_stages
from engine.threads import use_threads
from engine.user_turn import TurnPolicy, UserTurn

FRAMES_PER_S = 1000 / STEP_MS
TEXT_TOKENS_PER_S = 3.5  # of spoken English
NUM_RUNS, NUM_STOCK_RUNS, NUM_TURNS = 5, 2, 10
FRAME_SPANS = ("talker_head", "code_predictor", "talker_step")
NUM_DECODE_RUNS = 5


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured in this run; None where it was not asked for."""

    model: str
    device: str
    dtype: str
    cpu: str
    threads: int
    question_s: float
    reply_frames: int
    first_token_ms: float
    first_audio_ms: float
    frame_ms: float
    code2wav_frame_ms: float
    rtf: float
    reply_s: float
    text_only_reply_s: float
    bypass_saving: float
    prefill_turn_2: int
    prefill_turn_10: int
    prefill_growth: float
    prompt_turn_2: int  # the whole prompt of the turn: what a run without a cache computes
    prompt_turn_10: int
    stock_first_audio_ms: float | None = None
    stock_frame_ms: float | None = None
    stock_code2wav_frame_ms: float | None = None
    first_audio_ratio: float | None = None
    frame_cost_ratio: float | None = None
    sounding_frame_ratio: float | None = None
    code2wav_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Prefill:
    num_computed: int
    prompt_length: int


@dataclass(frozen=True, slots=True)
class _Run:
    first_token_ms: float
    first_audio_ms: float
    reply_s: float
    frame_ms: float
    code2wav_frame_ms: float
    num_frames: int
    num_samples: int


def run_bench(
    model: ModelConfig,
    question: Path,
    *,
    reply_s: float,
    against_transformers: bool,
    threads: int | None,
    on_progress: Callable[[float, str], None],
) -> BenchReport:
    """Measure with the spoken `question` and a reply that is made to last `reply_s` seconds."""
    use_threads(threads)
    folder = (
        bundled_checkpoint(on_progress)
        if model.name_or_path is None
        else find_checkpoint(model.name_or_path, allow_hub=model.allow_hub)
    )
    loaded = load_model(folder, device=model.device, dtype=model.dtype, on_progress=on_progress)
    samples = read_audio(question).samples
    num_tokens, num_frames = max(2, round(reply_s * TEXT_TOKENS_PER_S)), round(reply_s * FRAMES_PER_S)
    limits = ReplyLimits(num_tokens, num_frames, SpeechConfig().decode_frames)
    bench = _Bench(loaded, samples, limits)
    on_progress(0.2, "measuring Parley")
    runs = [bench.converse() for _ in range(NUM_RUNS + 1)][1:]  # the first warms up
    silent_runs = [bench.converse(is_spoken=False) for _ in range(NUM_RUNS)]
    on_progress(0.4, "measuring ten turns")
    prefills = bench.prefill_by_turn(NUM_TURNS)
    report = bench.report(runs, silent_runs, prefills)
    if not against_transformers:
        return report
    on_progress(0.5, "measuring transformers")
    return bench.against_transformers(report, on_progress)


class _Bench:
    """A loaded model and a question; replies never end by themselves, so that all runs make the same amount."""

    def __init__(self, loaded: LoadedModel, samples: NDArray[np.float32], limits: ReplyLimits) -> None:
        self._loaded, self._samples, self._limits = loaded, samples, limits
        config = EngineConfig(speech=SpeechConfig(is_greedy=True), system_prompt="")
        self._stages = _endless(build_stages(loaded, config, Metrics()))
        self._codes: NDArray[np.int32] | None = None

    def converse(self, *, is_spoken: bool = True) -> _Run:
        """One conversation of one turn, timed from the end of the user's turn."""
        stages = replace(self._stages, metrics=Metrics())
        conversation = self._new_conversation(stages)
        conversation.eager_talker = is_spoken
        turn = UserTurn(conversation, stages, TurnPolicy(), has_audio=True, has_video=False)
        for piece in self._pieces():
            turn.hear(piece)
            turn.update(MIC_STEP)
        asked_at = time.perf_counter()
        turn.end()
        reply = Reply(conversation, stages, self._limits, lambda: None, is_spoken=is_spoken)
        first_token_ms = first_audio_ms = 0.0
        num_samples = 0
        for part in reply.run():
            elapsed_ms = 1000 * (time.perf_counter() - asked_at)
            first_token_ms = first_token_ms or elapsed_ms
            if isinstance(part, Sound):
                first_audio_ms = first_audio_ms or elapsed_ms
                num_samples += len(part.samples)
        reply_s = time.perf_counter() - asked_at
        if not is_spoken:
            return _Run(first_token_ms, first_audio_ms, reply_s, 0.0, 0.0, 0, 0)
        self._codes = reply.codes()
        times = stages.metrics.stages()
        frame_ms = sum(times[name].total_ms for name in FRAME_SPANS) / reply.num_frames
        code2wav_ms = times["code2wav"].total_ms / reply.num_frames
        return _Run(first_token_ms, first_audio_ms, reply_s, frame_ms, code2wav_ms, reply.num_frames, num_samples)

    def prefill_by_turn(self, num_turns: int) -> list[_Prefill]:
        """Thinker rows computed for each turn of a conversation, the provisional ones left out."""
        stages = self._stages
        conversation = self._new_conversation(stages)
        limits = ReplyLimits(4, 2, 1)
        prefills: list[_Prefill] = []
        for _ in range(num_turns):
            before = stages.metrics.counter("thinker_prefill_tokens")
            turn = UserTurn(conversation, stages, TurnPolicy(is_provisional=False), has_audio=True, has_video=False)
            for piece in self._pieces():
                turn.hear(piece)
            turn.end()
            reply = Reply(conversation, stages, limits, lambda: None, is_spoken=True)
            for _ in reply.run():
                pass
            computed = stages.metrics.counter("thinker_prefill_tokens") - before
            prefills.append(_Prefill(computed, conversation.reply_start))
            conversation.end_reply(reply.token_ids)
        return prefills

    def report(self, runs: list[_Run], silent_runs: list[_Run], prefills: list[_Prefill]) -> BenchReport:
        """The figures of Parley alone."""
        last = runs[-1]
        spoken_s = statistics.median(run.reply_s for run in runs)
        silent_s = statistics.median(run.reply_s for run in silent_runs)
        return BenchReport(
            model=str(self._loaded.info.folder),
            device=str(self._loaded.device),
            dtype=str(self._loaded.dtype).removeprefix("torch."),
            cpu=cpu_name(),
            threads=torch.get_num_threads(),
            question_s=mic_seconds(len(self._samples)),
            reply_frames=last.num_frames,
            first_token_ms=statistics.median(run.first_token_ms for run in runs),
            first_audio_ms=statistics.median(run.first_audio_ms for run in runs),
            frame_ms=statistics.median(run.frame_ms for run in runs),
            code2wav_frame_ms=statistics.median(run.code2wav_frame_ms for run in runs),
            rtf=statistics.median(run.reply_s / speaker_seconds(run.num_samples) for run in runs),
            reply_s=spoken_s,
            text_only_reply_s=silent_s,
            bypass_saving=1 - silent_s / spoken_s,
            prefill_turn_2=prefills[1].num_computed,
            prefill_turn_10=prefills[-1].num_computed,
            prefill_growth=prefills[-1].num_computed / prefills[1].num_computed,
            prompt_turn_2=prefills[1].prompt_length,
            prompt_turn_10=prefills[-1].prompt_length,
        )

    def against_transformers(self, report: BenchReport, on_progress: Callable[[float, str], None]) -> BenchReport:
        """Add what stock transformers needs for the same reply, and the ratios."""
        totals: list[float] = []
        frames: list[float] = []
        self._generate(frames, ReplyLimits(2, 2, 1))  # warms up
        frames.clear()
        for run in range(NUM_STOCK_RUNS):
            on_progress(0.5 + 0.4 * run / NUM_STOCK_RUNS, f"measuring transformers, run {run + 1} of {NUM_STOCK_RUNS}")
            began = time.perf_counter()
            self._generate(frames, self._limits)
            totals.append(1000 * (time.perf_counter() - began))
        decode_ms = self._full_decode_ms()
        stock_frame_ms = statistics.median(frames) / report.reply_frames
        stock_first_ms = statistics.median(totals)
        return replace(
            report,
            stock_first_audio_ms=stock_first_ms,
            stock_frame_ms=stock_frame_ms,
            stock_code2wav_frame_ms=decode_ms,
            first_audio_ratio=stock_first_ms / report.first_audio_ms,
            frame_cost_ratio=stock_frame_ms / report.frame_ms,
            sounding_frame_ratio=(stock_frame_ms + decode_ms) / (report.frame_ms + report.code2wav_frame_ms),
            code2wav_ratio=report.code2wav_frame_ms / decode_ms,
        )

    def _generate(self, talker_ms: list[float], limits: ReplyLimits) -> None:
        """Stock `generate()` for the same prompt and a reply of the same length; appends the Talker's time."""
        model, config = self._loaded.model, self._loaded.model.config
        layout = self._stages.scribe.layout
        features, mask = hf.stock_features(self._samples, self._loaded.preprocessor)
        num_tokens = hf.audio_token_count(int(mask.sum()))
        ids = [
            *layout.user_header,
            layout.audio_start,
            *[layout.audio] * num_tokens,
            layout.audio_end,
            *layout.message_end,
            *layout.assistant_header,
        ]
        prompt = torch.tensor([ids], device=self._loaded.device)
        vocabulary = config.talker_config.text_config.vocab_size
        generate = model.talker.generate

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = generate(*arguments, **options)
            talker_ms.append(1000 * (time.perf_counter() - began))
            return result

        model.talker.generate = timed
        try:
            model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                input_features=features.to(self._loaded.device, self._loaded.dtype),
                feature_attention_mask=mask.to(self._loaded.device),
                speaker=self._speech.voice,
                thinker_max_new_tokens=limits.max_text_tokens,
                thinker_min_new_tokens=limits.max_text_tokens,
                thinker_do_sample=False,
                thinker_eos_token_id=config.im_end_token_id,
                talker_max_new_tokens=limits.max_frames + 1,
                talker_do_sample=False,
                talker_temperature=None,
                talker_top_k=None,
                talker_top_p=None,
                talker_suppress_tokens=list(range(vocabulary - 1024, vocabulary)),
            )
        finally:
            del model.talker.generate

    def _full_decode_ms(self) -> float:
        """One call of the stock Code2Wav over all frames, per frame."""
        assert self._codes is not None, "nothing was spoken yet"
        codes = torch.from_numpy(self._codes.T.astype(np.int64))[None].to(self._loaded.device)
        times: list[float] = []
        with torch.no_grad():
            for _ in range(NUM_DECODE_RUNS + 1):
                began = time.perf_counter()
                self._loaded.model.code2wav(codes).cpu()
                times.append(1000 * (time.perf_counter() - began) / codes.shape[-1])
        return statistics.median(times[1:])

    @property
    def _speech(self) -> Speech:
        assert self._stages.speech is not None, "the benchmark needs a model that speaks"
        return self._stages.speech

    def _new_conversation(self, stages: Stages) -> Conversation:
        return Conversation(
            stages.thinker,
            self._speech.talker,
            stages.scribe,
            stages.metrics,
            max_tokens=stages.max_tokens,
            prefill_rows=256,
        )

    def _pieces(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self._samples), MIC_STEP):
            yield torch.from_numpy(self._samples[start : start + MIC_STEP])


def _endless(stages: Stages) -> Stages:
    """The same stages with every end token suppressed."""
    assert stages.speech is not None, "the benchmark needs a model that speaks"
    talker = stages.speech.talker
    generator = torch.Generator(stages.thinker.device)
    specials = tuple(range(talker.vocabulary - 1024, talker.vocabulary))
    codes = SamplingParams(do_sample=False, repetition_penalty=1.05, suppressed=specials)
    text = SamplingParams(do_sample=False, suppressed=(stages.scribe.end_of_reply,))
    speech = replace(stages.speech, talker_sampler=Sampler(codes, talker.vocabulary, generator))
    return replace(stages, speech=speech, thinker_sampler=Sampler(text, stages.thinker.vocabulary, generator))


def cpu_name() -> str:
    """The processor's name, as the machine gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {os.cpu_count()} cores" if names else platform.machine()
