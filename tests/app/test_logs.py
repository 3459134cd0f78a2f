"""Details go to the log file, a sentence to the user."""

import logging
from pathlib import Path

import pytest

from app import logs
from app.__main__ import main
from engine.models.thinker import Thinker


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(logs.platformdirs, "user_log_path", lambda name: tmp_path / "logs")
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    for handler in before:
        root.removeHandler(handler)
    yield tmp_path / "logs" / "parley.log"
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)


def test_a_fault_of_ours_is_a_sentence_for_the_user_and_a_traceback_in_the_log(log, tiny_folder, monkeypatch, capfd):
    monkeypatch.setattr(Thinker, "logits", lambda self, hidden: 1 / 0)
    logs.start_log()
    assert main(["talk", "--text", "hello", "--model", str(tiny_folder)]) == 1
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "ZeroDivisionError" in shown.err
    assert str(log) in shown.err
    assert "Traceback" in log.read_text()


def test_starting_twice_logs_once(log):
    logs.start_log()
    logs.start_log()
    logging.getLogger("somebody").warning("once")
    assert log.read_text().count("once") == 1


def test_a_home_that_cannot_be_written_to_keeps_nobody_from_talking(tmp_path, monkeypatch, log):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr(logs.platformdirs, "user_log_path", lambda name: Path(blocked / "logs"))
    logs.start_log()
    logging.getLogger("somebody").warning("lost")
