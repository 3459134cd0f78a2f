import pytest

from engine.config import InputConfig, SpeechConfig


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (InputConfig, "window_ms", 3000),
        (InputConfig, "window_ms", 0),
        (InputConfig, "video_fps", 0.0),
        (InputConfig, "video_fps", -1.0),
        (InputConfig, "video_fps", float("nan")),
        (InputConfig, "video_fps", float("inf")),  # a tick every 0 s: PictureSampler would never end
        (InputConfig, "provisional_chunks", 0),
        (InputConfig, "stride_chunks", 0),
        (InputConfig, "prefill_rows", 0),
        (InputConfig, "max_tokens", 0),
        (SpeechConfig, "max_text_tokens", 0),
        (SpeechConfig, "max_frames", -3),
        (SpeechConfig, "decode_frames", 0),
        (SpeechConfig, "max_ahead_ms", 0),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        kind(**{name: value})


@pytest.mark.parametrize("window_ms", [None, 1000, 2000, 4000, 8000])
def test_every_encoder_window_can_be_chosen(window_ms):
    assert InputConfig(window_ms=window_ms).window_ms == window_ms
