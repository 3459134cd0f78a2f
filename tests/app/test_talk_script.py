from argparse import Namespace
from pathlib import Path

import pytest

from app.__main__ import _parser
from app.talk import script
from engine import ScriptTurn

A, B, CLIP, CLIP_2, PICTURE = Path("a.wav"), Path("b.wav"), Path("clip.mp4"), Path("clip-2.mp4"), Path("p.png")


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ([], []),
        ([("mic", A)], [ScriptTurn(mic=A)]),
        ([("text", "hello")], [ScriptTurn(text="hello")]),
        ([("camera", CLIP)], [ScriptTurn(camera=CLIP)]),
        # in the order in which they stand
        (
            [("text", "one"), ("mic", A), ("text", "two")],
            [ScriptTurn(text="one"), ScriptTurn(A), ScriptTurn(text="two")],
        ),
        ([("mic", A), ("mic", B)], [ScriptTurn(A), ScriptTurn(B)]),
        # a camera beside a message, on either side
        ([("camera", CLIP), ("mic", A)], [ScriptTurn(A, CLIP)]),
        ([("mic", A), ("camera", CLIP)], [ScriptTurn(A, CLIP)]),
        ([("text", "what?"), ("camera", PICTURE)], [ScriptTurn(camera=PICTURE, text="what?")]),
        ([("camera", PICTURE), ("text", "what?")], [ScriptTurn(camera=PICTURE, text="what?")]),
        ([("camera", CLIP), ("mic", A), ("mic", B)], [ScriptTurn(A, CLIP), ScriptTurn(B)]),
        ([("mic", A), ("camera", CLIP), ("mic", B)], [ScriptTurn(A, CLIP), ScriptTurn(B)]),
        (
            [("camera", CLIP), ("mic", A), ("camera", CLIP_2), ("mic", B)],
            [ScriptTurn(A, CLIP), ScriptTurn(B, CLIP_2)],
        ),
        (
            [("mic", A), ("camera", CLIP), ("mic", B), ("camera", CLIP_2)],
            [ScriptTurn(A, CLIP), ScriptTurn(B, CLIP_2)],
        ),
        # a camera with nothing beside it is a message of its own
        ([("camera", CLIP), ("camera", CLIP_2)], [ScriptTurn(camera=CLIP), ScriptTurn(camera=CLIP_2)]),
        ([("mic", A), ("camera", CLIP), ("camera", CLIP_2)], [ScriptTurn(A, CLIP), ScriptTurn(camera=CLIP_2)]),
        (
            [("camera", CLIP), ("camera", CLIP_2), ("mic", A)],
            [ScriptTurn(camera=CLIP), ScriptTurn(A, CLIP_2)],
        ),
        # an interruption belongs to the message before
        ([("mic", A), ("interrupt_after", 1.5)], [ScriptTurn(A, interrupts_after_s=1.5)]),
        (
            [("mic", A), ("camera", CLIP), ("interrupt_after", 1.0), ("mic", B)],
            [ScriptTurn(A, CLIP, interrupts_after_s=1.0), ScriptTurn(B)],
        ),
        (
            [("camera", CLIP), ("interrupt_after", 2.0), ("mic", A)],
            [ScriptTurn(camera=CLIP, interrupts_after_s=2.0), ScriptTurn(A)],
        ),
        (
            [("mic", A), ("interrupt_after", 1.0), ("text", "stop"), ("interrupt_after", 2.0)],
            [ScriptTurn(A, interrupts_after_s=1.0), ScriptTurn(text="stop", interrupts_after_s=2.0)],
        ),
        ([("mic", A), ("interrupt_after", 1.0), ("interrupt_after", 2.0)], [ScriptTurn(A, interrupts_after_s=2.0)]),
        # what stands behind an interruption is beside the next message
        (
            [("mic", A), ("interrupt_after", 1.0), ("camera", CLIP), ("mic", B)],
            [ScriptTurn(A, interrupts_after_s=1.0), ScriptTurn(B, CLIP)],
        ),
    ],
)
def test_options_become_turns(given, turns):
    assert script(given) == turns


def test_an_interruption_before_any_message_says_where_it_goes():
    with pytest.raises(ValueError, match="--interrupt-after stands before any message: put it after"):
        script([("interrupt_after", 1.0), ("mic", A)])


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_text_is_refused(text):
    with pytest.raises(ValueError, match="--text is empty"):
        script([("mic", A), ("text", text)])


def parsed(*arguments: str) -> Namespace:
    return _parser().parse_args(["talk", *arguments])


def test_the_command_line_keeps_the_order_of_its_options():
    options = parsed("--text", "hi", "--mic", "a.wav", "--interrupt-after", "1.5", "--camera=clip.mp4", "--seed", "7")
    assert options.script == [("text", "hi"), ("mic", A), ("interrupt_after", 1.5), ("camera", CLIP)]


def test_two_command_lines_do_not_share_their_options():
    assert parsed("--text", "one").script == [("text", "one")]
    assert parsed("--text", "two").script == [("text", "two")]
    assert parsed().script is None


def test_text_may_look_like_an_option_or_a_path():
    assert parsed("--text=--mic").script == [("text", "--mic")]
    assert parsed("--text", "a.wav").script == [("text", "a.wav")]
