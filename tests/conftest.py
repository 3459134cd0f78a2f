"""What every test shares: a tiny checkpoint, no screen, no network, no thread left behind."""

import os

# Set before anything reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# One thread: with two, another busy process makes every small parallel region wait for its time slice.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained checkpoint of the smallest size, in one file; copy it before changing it."""
    from engine.tiny import build_tiny_checkpoint

    logging.getLogger("transformers").setLevel(logging.ERROR)
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that looks up a name or opens a connection, even where the caller hides the error."""
    calls: list[str] = []

    def refuse(*args: object, **kwargs: object) -> None:
        calls.append(repr(args))
        raise OSError("the network is out of bounds in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    yield
    assert not calls, f"the network was used: {calls}"


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread which would keep the program from ending."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(timeout=2.0)
    alive = [thread.name for thread in left if thread.is_alive()]
    if alive:
        pytest.fail(f"threads left behind: {', '.join(alive)}")
