"""The state of a streaming stage: a value that is made, passed, reset and measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors held by `value`, through dataclasses, mappings and sequences."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if is_dataclass(value) and not isinstance(value, type):
        return sum(tensor_bytes(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sum(tensor_bytes(item) for item in value)
    return 0


@dataclass
class StreamState:
    """Base of every stage's state: its size, and a way back to the start."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors the state holds."""
        return tensor_bytes(self)

    def reset(self) -> None:
        """Return to the state that `init_state` made."""
        raise NotImplementedError
