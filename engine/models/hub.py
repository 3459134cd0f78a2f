"""The only module that talks to the model hub, and its local cache."""

from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

# What a checkpoint consists of; pickled weights are not even fetched.
_FILES: Final = ["*.json", "*.jinja", "*.safetensors", "merges.txt"]


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of model `name` in the hub's local cache, or None; never uses the network."""
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def download_snapshot(name: str) -> Path:
    """Fetch model `name` into the local cache and return its folder; raises OSError when that fails."""
    return Path(snapshot_download(name, allow_patterns=_FILES))
