"""The benchmark measures what it says; no time is asserted here."""

import json

import pytest
import soundfile

from app.bench import table
from app.report import write_json
from engine.bench import run_bench
from engine.config import ModelConfig
from tests.harness import noise

RATIOS = ("first_audio_ratio", "frame_cost_ratio", "code2wav_ratio", "sounding_frame_ratio")


@pytest.fixture(scope="module")
def measured(tiny_folder, tmp_path_factory):
    question = tmp_path_factory.mktemp("bench") / "question.wav"
    soundfile.write(question, noise(1.2), 16000)
    said: list[tuple[float, str]] = []

    def bench(*, against: bool):
        return run_bench(
            ModelConfig(str(tiny_folder)),
            question,
            reply_s=0.4,
            against_transformers=against,
            threads=1,
            on_progress=lambda fraction, what: said.append((fraction, what)),
        )

    return bench(against=False), bench(against=True), said


def test_alone_it_measures_parley_and_leaves_the_rest_open(measured):
    alone = measured[0]
    assert alone.reply_frames == 5
    assert alone.question_s == pytest.approx(1.2)
    assert all(getattr(alone, name) is None for name in RATIOS)
    assert "n/a" in table(alone)
    assert alone.prefill_growth == 1.0
    assert alone.prompt_turn_10 > 4 * alone.prompt_turn_2


def test_against_transformers_it_measures_both_in_one_run(measured, tmp_path):
    report = measured[1]
    assert all(getattr(report, name) > 0 for name in RATIOS)
    write_json(tmp_path / "bench.json", report.as_dict())
    written = json.loads((tmp_path / "bench.json").read_text())
    wanted = {"first_audio_ratio", "frame_cost_ratio", "code2wav_ratio", "prefill_growth", "rtf", "first_audio_ms"}
    assert wanted | {"threads", "cpu"} <= set(written)
    assert "n/a" not in table(report).splitlines()[5]


def test_it_says_what_it_is_doing(measured):
    assert any("round" in what for _, what in measured[2])
