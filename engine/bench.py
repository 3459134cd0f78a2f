"""Measures the engine, and stock transformers beside it: same weights, same input, one process, figures as ratios."""

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.bundled import locate
from engine.clock import MIC_STEP, STEP_MS, mic_seconds, speaker_seconds
from engine.config import EngineConfig, ModelConfig, SpeechConfig
from engine.conversation import Conversation
from engine.io.audio_file import read_audio
from engine.loader import LoadedModel, load_model
from engine.metrics import Metrics
from engine.models import hf
from engine.models.sampling import Sampler, SamplingParams
from engine.reply import Reply, ReplyLimits, Sound
from engine.stages import NUM_TALKER_SPECIALS, Speech, Stages, build_stages
from engine.threads import use_threads
from engine.user_turn import TurnPolicy, UserTurn

FRAMES_PER_S = 1000 / STEP_MS
TEXT_TOKENS_PER_S = 3.5  # of spoken English
NUM_ROUNDS, NUM_TURNS = 4, 10
FRAME_SPANS = ("talker_head", "code_predictor", "talker_step")
NUM_DECODE_RUNS = 4


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


@dataclass(frozen=True, slots=True)
class _Stock:
    first_audio_ms: float
    frame_ms: float
    code2wav_frame_ms: float


@dataclass(frozen=True, slots=True)
class _Round:
    """Measured close together: two runs of Parley around one of transformers, and one without speech."""

    runs: tuple[_Run, _Run]
    silent: _Run
    stock: _Stock | None

    def mean(self, name: str) -> float:
        """Mean of the field `name` of both runs."""
        return float(statistics.mean(getattr(run, name) for run in self.runs))


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
    loaded = load_model(
        locate(model, on_progress),
        device=model.device,
        dtype=model.dtype,
        on_progress=on_progress,
    )
    samples = read_audio(question).samples
    num_tokens, num_frames = max(2, round(reply_s * TEXT_TOKENS_PER_S)), round(reply_s * FRAMES_PER_S)
    limits = ReplyLimits(num_tokens, num_frames, SpeechConfig().decode_frames)
    bench = _Bench(loaded, samples, limits)
    on_progress(0.2, "measuring ten turns")
    prefills = bench.prefill_by_turn(NUM_TURNS)
    bench.warm_up(with_stock=against_transformers)
    rounds: list[_Round] = []
    for number in range(NUM_ROUNDS):
        on_progress(0.3 + 0.7 * number / NUM_ROUNDS, f"measuring, round {number + 1} of {NUM_ROUNDS}")
        rounds.append(bench.round(with_stock=against_transformers))
    return bench.report(rounds, prefills)


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

    def warm_up(self, *, with_stock: bool) -> None:
        """Leave first-touch costs behind."""
        self.converse()
        if with_stock:
            self._generate(ReplyLimits(2, 2, 1))

    def round(self, *, with_stock: bool) -> _Round:
        """Parley, transformers and Parley again, close together: what slows the machine down slows all of them."""
        before = self.converse()
        silent = self.converse(is_spoken=False)
        stock = self._stock() if with_stock else None
        return _Round((before, self.converse()), silent, stock)

    def report(self, rounds: list[_Round], prefills: list[_Prefill]) -> BenchReport:
        """Medians over the rounds; ratios are taken within each."""
        runs = [run for round_ in rounds for run in round_.runs]
        stocks = [round_.stock for round_ in rounds if round_.stock is not None]
        return BenchReport(
            model=str(self._loaded.info.folder),
            device=str(self._loaded.device),
            dtype=str(self._loaded.dtype).removeprefix("torch."),
            cpu=cpu_name(),
            threads=torch.get_num_threads(),
            question_s=mic_seconds(len(self._samples)),
            reply_frames=runs[-1].num_frames,
            first_token_ms=statistics.median(run.first_token_ms for run in runs),
            first_audio_ms=statistics.median(run.first_audio_ms for run in runs),
            frame_ms=statistics.median(run.frame_ms for run in runs),
            code2wav_frame_ms=statistics.median(run.code2wav_frame_ms for run in runs),
            rtf=statistics.median(run.reply_s / speaker_seconds(run.num_samples) for run in runs),
            reply_s=statistics.median(run.reply_s for run in runs),
            text_only_reply_s=statistics.median(round_.silent.reply_s for round_ in rounds),
            bypass_saving=statistics.median(1 - r.silent.reply_s / r.mean("reply_s") for r in rounds),
            prefill_turn_2=prefills[1].num_computed,
            prefill_turn_10=prefills[-1].num_computed,
            prefill_growth=prefills[-1].num_computed / prefills[1].num_computed,
            prompt_turn_2=prefills[1].prompt_length,
            prompt_turn_10=prefills[-1].prompt_length,
            stock_first_audio_ms=_median(stock.first_audio_ms for stock in stocks),
            stock_frame_ms=_median(stock.frame_ms for stock in stocks),
            stock_code2wav_frame_ms=_median(stock.code2wav_frame_ms for stock in stocks),
            first_audio_ratio=_median(s.first_audio_ms / r.mean("first_audio_ms") for r, s in _pairs(rounds)),
            frame_cost_ratio=_median(s.frame_ms / r.mean("frame_ms") for r, s in _pairs(rounds)),
            sounding_frame_ratio=_median(
                (s.frame_ms + s.code2wav_frame_ms) / (r.mean("frame_ms") + r.mean("code2wav_frame_ms"))
                for r, s in _pairs(rounds)
            ),
            code2wav_ratio=_median(r.mean("code2wav_frame_ms") / s.code2wav_frame_ms for r, s in _pairs(rounds)),
        )

    def _stock(self) -> _Stock:
        """What stock transformers needs for the same reply."""
        began = time.perf_counter()
        talker_ms = self._generate(self._limits)
        first_audio_ms = 1000 * (time.perf_counter() - began)
        return _Stock(first_audio_ms, talker_ms / self._limits.max_frames, self._full_decode_ms())

    def _generate(self, limits: ReplyLimits) -> float:
        """Stock `generate()` for the same prompt and a reply of the same length; returns the Talker's time in ms."""
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
        talker_ms = 0.0

        def timed(*arguments: Any, **options: Any) -> Any:
            nonlocal talker_ms
            began = time.perf_counter()
            result = generate(*arguments, **options)
            talker_ms = 1000 * (time.perf_counter() - began)
            return result

        model.talker.generate = timed
        try:
            # It notes that the penalty applies to generated codes only, which is what is wanted.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
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
                    talker_suppress_tokens=list(range(vocabulary - NUM_TALKER_SPECIALS, vocabulary)),
                )
        finally:
            del model.talker.generate
        return talker_ms

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


def _median(values: Iterable[float]) -> float | None:
    """The median, or None where nothing was measured."""
    found = list(values)
    return statistics.median(found) if found else None


def _pairs(rounds: list[_Round]) -> Iterator[tuple[_Round, _Stock]]:
    """Each round with what transformers needed in it."""
    for round_ in rounds:
        if round_.stock is not None:
            yield round_, round_.stock


def _endless(stages: Stages) -> Stages:
    """The same stages with every end token suppressed."""
    assert stages.speech is not None, "the benchmark needs a model that speaks"
    talker = stages.speech.talker
    generator = torch.Generator(stages.thinker.device)
    specials = tuple(range(talker.vocabulary - NUM_TALKER_SPECIALS, talker.vocabulary))
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
