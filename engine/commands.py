"""What the application asks of the engine. Plain frozen data: a command may cross a process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop speaking now and listen: the user barged in."""


@dataclass(frozen=True, slots=True)
class SendText:
    """A typed message. During a reply it interrupts; during a spoken turn it ends that turn and goes with it."""

    text: str


@dataclass(frozen=True, slots=True)
class EndTurn:
    """The user's spoken turn is over: answer now (push-to-talk released)."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget the conversation and start a new one with the same settings."""


Command = Interrupt | SendText | EndTurn | Reset
