import re
import signal
import subprocess
import sys

import pytest

from app.__main__ import _parser, main
from app.talk import engine_config
from engine import Bypass, EngineConfig


@pytest.fixture(autouse=True)
def _signals_as_before():
    """`main` sets what a broken pipe does to the process; the next test must not inherit it."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)


def exit_code(*arguments):
    """What the shell would see."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_no_arguments_print_the_help(capsys):
    assert exit_code() == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: parley")
    assert err == ""
    for command in ("talk", "demo", "bench", "doctor"):
        assert re.search(rf"^ +{command} +\w", out, re.MULTILINE), f"{command} is not explained"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("talk", ["Hold a conversation from files", "--mic", "--camera", "--text", "--interrupt-after", "examples:"]),
        ("demo", ["come with Parley", "--realtime", "--out"]),
        ("bench", ["Measure the engine", "--against", "--json", "--seconds"]),
        ("doctor", ["Check Python", "remedy", "--model"]),
    ],
)
def test_the_help_of_a_command_says_what_it_does(capsys, command, words):
    assert exit_code(command, "--help") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in words:
        assert word in out


@pytest.mark.parametrize("command", ["talk", "demo", "bench", "doctor"])
def test_every_option_is_explained(command):
    commands = next(action for action in _parser()._actions if action.dest == "command")
    for action in commands.choices[command]._actions:
        assert action.help, f"{command} {action.option_strings} has no help"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sing"], "'sing'"),
        (["talk", "--volume", "3"], "--volume"),
        (["talk", "--threads", "0"], "'0' is not a count"),
        (["talk", "--threads", "-2"], "'-2' is not a count"),
        (["talk", "--threads", "many"], "'many'"),
        (["talk", "--max-tokens", "0"], "--max-tokens"),
        (["talk", "--max-frames", "1.5"], "'1.5'"),
        (["talk", "--interrupt-after", "0"], "'0' is not a time: give seconds above 0"),
        (["talk", "--interrupt-after", "-1"], "'-1' is not a time"),
        (["talk", "--interrupt-after", "nan"], "'nan' is not a time"),
        (["talk", "--interrupt-after", "soon"], "'soon'"),
        (["talk", "--device", "tpu"], "'tpu'"),
        (["talk", "--dtype", "int8"], "'int8'"),
        (["talk", "--speech", "loud"], "'loud'"),
        (["talk", "--seed", "x"], "'x'"),
        (["talk", "--window-ms", "3000"], "3000"),
        (["talk", "--text", "hi", "--fps", "0"], "video_fps is 0.0"),
        (["talk", "--text", "hi", "--fps", "-2"], "video_fps is -2.0"),
        (["demo", "--fps", "0"], "video_fps is 0.0"),
        (["bench", "--against", "everything"], "'everything'"),
        (["bench", "--seconds", "0"], "'0' is not a time"),
        (["talk", "--text", " "], "--text is empty"),
        (["talk", "--interrupt-after", "1", "--text", "hi"], "--interrupt-after stands before any message"),
        (["talk"], "nothing to say"),
        (["talk", "--greedy"], "nothing to say"),
    ],
)
def test_a_value_that_does_not_do_is_named_and_ends_with_2(capsys, arguments, named):
    assert exit_code(*arguments) == 2
    out, err = capsys.readouterr()
    assert named in err
    assert out == ""


@pytest.mark.parametrize("value", ["many", "1.5"])
def test_a_message_about_a_value_is_written_for_users(capsys, value):
    """argparse names the function that failed; a user has never heard of it."""
    for option in ("--threads", "--max-tokens", "--max-frames"):
        assert exit_code("talk", option, value) == 2
        assert "_positive" not in capsys.readouterr().err
    assert exit_code("talk", "--interrupt-after", "soon") == 2
    assert "_seconds" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--mic", "--camera"])
def test_a_missing_file_is_named_before_a_model_is_loaded(capsys, tmp_path, option):
    assert exit_code("talk", "--text", "hi", option, str(tmp_path / "gone.wav")) == 2
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'gone.wav'}: there is no such file" in err
    assert out == ""


def config_of(*arguments):
    return engine_config(_parser().parse_args(["talk", *arguments]))


def test_the_defaults_of_the_command_line_are_those_of_the_engine():
    config, default = config_of(), EngineConfig()
    assert (config.model, config.speech, config.input) == (default.model, default.speech, default.input)
    assert config.system_prompt == default.system_prompt
    assert not config.is_realtime


def test_every_option_reaches_the_engine(tmp_path):
    config = config_of(
        *("--model", "folder", "--hub", "--device", "cpu", "--dtype", "float64", "--threads", "3"),
        *("--voice", "chelsie", "--system", " Be brief. ", "--greedy", "--seed", "7", "--speech", "never"),
        *("--max-tokens", "11", "--max-frames", "12", "--window-ms", "1000", "--fps", "3", "--realtime"),
        *("--out", str(tmp_path / "o.wav"), "--trace", str(tmp_path / "t.npz")),
    )
    model, speech = config.model, config.speech
    assert (model.name_or_path, model.allow_hub, model.device, model.dtype) == ("folder", True, "cpu", "float64")
    assert (speech.voice, speech.is_greedy, speech.seed, speech.bypass) == ("chelsie", True, 7, Bypass.ALWAYS)
    assert (speech.max_text_tokens, speech.max_frames) == (11, 12)
    assert (config.input.window_ms, config.input.video_fps) == (1000, 3.0)
    assert (config.is_realtime, config.threads, config.system_prompt) == (True, 3, "Be brief.")
    assert (config.speech_file, config.trace) == (tmp_path / "o.wav", tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("speech", "bypass"), [("auto", Bypass.AUTO), ("always", Bypass.NEVER), ("never", Bypass.ALWAYS)]
)
def test_to_speak_always_is_never_to_bypass(speech, bypass):
    assert config_of("--speech", speech).speech.bypass is bypass


def test_an_empty_system_prompt_is_left_out():
    assert config_of("--system", "").system_prompt == ""


def test_the_help_does_not_wait_for_torch():
    """`import torch` takes seconds; a help that is late looks like a hang."""
    code = (
        "import sys; from app.__main__ import main; main([]); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: parley")


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "app", "talk", "--threads", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "'0' is not a count" in done.stderr
