"""What part of a reply's text was heard when its speech was cut: the history must not hold words nobody heard.

The Talker takes one text token a frame, far ahead of the words it speaks, so the text that was *read* says little.
What was heard is estimated from time: by proportion where the whole length of the speech is known, by the voice's
measured rate where it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# English speech at 150 words a minute; replaced by the voice's own rate after its first whole reply.
TYPICAL_CHARACTERS_PER_S = 14.0


@dataclass(frozen=True, slots=True)
class SpeechRate:
    """How fast the voice speaks, measured over whole replies of this conversation."""

    characters: int = 0
    seconds: float = 0.0

    @property
    def characters_per_s(self) -> float:
        """Measured rate, or the typical one before anything was measured."""
        return self.characters / self.seconds if self.seconds > 0 else TYPICAL_CHARACTERS_PER_S

    def after(self, characters: int, seconds: float) -> "SpeechRate":
        """The rate with one more whole reply counted."""
        return SpeechRate(self.characters + characters, self.seconds + seconds)


def num_heard_tokens(lengths: Sequence[int], heard_s: float, spoken_s: float | None, rate: SpeechRate) -> int:
    """How many tokens of a reply were heard in `heard_s`, given the characters each token added.

    `spoken_s` is the length of the whole speech, None while it is not known.
    """
    total = sum(lengths)
    if heard_s <= 0 or total == 0:
        return 0
    share = heard_s / spoken_s if spoken_s else heard_s * rate.characters_per_s / total
    reached = min(1.0, share) * total
    before = 0
    for index, length in enumerate(lengths):
        if before + length / 2 > reached:  # a token counts once more than half of it was heard
            return index
        before += length
    return len(lengths)
