"""Writes a conversation as token ids: the chat template of the checkpoint, piece by piece instead of as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from engine.models import hf

# The released template without its tools and thinking: for a checkpoint that brings none.
CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- elif part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class Tokenizer(Protocol):
    """What Parley needs of the checkpoint's tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `split_special_tokens` reads special tokens as plain characters."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Fixed pieces of the chat format, as token ids."""

    user_header: tuple[int, ...]
    assistant_header: tuple[int, ...]
    message_end: tuple[int, ...]  # <|im_end|> and a newline
    audio_start: int
    audio_end: int
    vision_start: int
    vision_end: int
    audio: int
    image: int
    video: int


class Scribe:
    """Turns text into token ids of the checkpoint's chat format, and back."""

    def __init__(self, tokenizer: Tokenizer, config: hf.OmniConfig) -> None:
        self._tokenizer = tokenizer
        thinker = config.thinker_config
        newline = tuple(self._encode("\n"))
        self.end_of_reply: int = config.im_end_token_id
        self.layout = Layout(
            user_header=(config.im_start_token_id, config.user_token_id, *newline),
            assistant_header=(config.im_start_token_id, config.assistant_token_id, *newline),
            message_end=(config.im_end_token_id, *newline),
            audio_start=thinker.audio_start_token_id,
            audio_end=self._special("<|audio_end|>"),
            vision_start=thinker.vision_start_token_id,
            vision_end=self._special("<|vision_end|>"),
            audio=thinker.audio_token_id,
            image=thinker.image_token_id,
            video=thinker.video_token_id,
        )

    def system(self, prompt: str) -> list[int]:
        """The system message of `prompt`."""
        return self._encode(f"<|im_start|>system\n{prompt}<|im_end|>\n")

    def typed(self, text: str) -> list[int]:
        """What a user typed: never read as special tokens, whatever it says."""
        return self._tokenizer.encode(text.strip(), add_special_tokens=False, split_special_tokens=True)

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a reply."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _special(self, token: str) -> int:
        ids = self._encode(token)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer has no special token {token}: is this folder's tokenizer the model's own?")
        return ids[0]


class TextStream:
    """Text of a reply as it grows: characters come out whole, though a token may hold a part of one."""

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is new and complete."""
        self._ids.append(token_id)
        text = self._scribe.text(self._ids)
        if text.endswith("\ufffd"):  # the first bytes of a character whose rest is in the next token
            return ""
        delta = text[self._shown :]
        self._shown = len(text)
        return delta
