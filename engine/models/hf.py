"""The only module that knows where `transformers` keeps things.

transformers moves names between minor versions, so its version is pinned in pyproject.toml and every name
that has moved before (module paths, keyword arguments, position helpers) is reached through this file.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
    vision_utils,
)
from transformers import modeling_rope_utils as rope_utils
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling
from transformers.utils import loading_report
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

_T = TypeVar("_T")

if TYPE_CHECKING:
    # Every part and every setting of the model is reached by a name that its types do not know.
    OmniConfig: TypeAlias = Any
    OmniModel: TypeAlias = Any
else:
    OmniConfig = Qwen3OmniMoeConfig
    OmniModel = Qwen3OmniMoeForConditionalGeneration


def audio_tower(model: OmniModel) -> Any:
    """The audio encoder (AuT)."""
    return model.thinker.model.audio_tower


def vision_tower(model: OmniModel) -> Any:
    """The vision encoder."""
    return model.thinker.model.visual


def thinker_decoder(model: OmniModel) -> Any:
    """The Thinker's decoder stack, without `lm_head`."""
    return model.thinker.model.language_model


def audio_token_count(num_mel_frames: int, n_window: int = 50) -> int:
    """Tokens the audio encoder makes of `num_mel_frames` frames: 13 per full second, fewer for the tail."""
    if num_mel_frames <= 0:
        return 0
    return int(modeling._get_feat_extract_output_lengths(torch.tensor(num_mel_frames), n_window))


def mel_filters(num_mel: int, n_fft: int, rate_hz: int) -> Tensor:
    """WhisperFeatureExtractor's mel filter bank, [n_fft / 2 + 1, num_mel], float32."""
    filters = mel_filter_bank(
        num_frequency_bins=1 + n_fft // 2,
        num_mel_filters=num_mel,
        min_frequency=0.0,
        max_frequency=8000.0,  # fixed there too, whatever the rate
        sampling_rate=rate_hz,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters).float()


def use_eager_experts(model: OmniModel) -> None:
    """Run experts one by one: the only implementation that takes float64, and the fastest on a CPU."""
    model.set_experts_implementation("eager")


def vision_layout(tower: Any, grid_thw: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What the vision encoder derives from `grid_thw` (on the CPU) alone; pass it to `encode_vision`.

    Left to itself the encoder makes it again in every call, and on a GPU copies parts of it back to the CPU.
    """
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid_thw,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    position_ids = vision_utils.get_vision_position_ids(grid_thw, tower.spatial_merge_size)
    return {
        "interp_indices": indices.to(device),
        "interp_weights": weights.to(device),
        "position_ids": position_ids.to(device),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),  # on the CPU: the encoder wants it as a list
    }


def encode_vision(tower: nn.Module, patches: Tensor, grid_thw: Tensor, **layout: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Run the vision encoder on `patches` [N, C*T*P*P] and return tokens [N/4, D] and deepstack features."""
    out = tower(patches, grid_thw=grid_thw, **layout)
    return out.pooler_output, list(out.deepstack_features)


def load_pretrained(
    folder: Path, dtype: torch.dtype, on_progress: Callable[[float], None]
) -> tuple[OmniModel, tuple[str, ...]]:
    """Load the checkpoint in `folder` onto the CPU; `on_progress` gets the share of the weights that is in.

    Returns the model and what did not fit, one sentence each. Never uses the network and never unpickles.
    """
    with _quiet(), _weights_progress(on_progress):
        model, info = OmniModel.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they come back in `info`, all of them, instead of as one error
            output_loading_info=True,
        )
    unexpected = set(info["unexpected_keys"])
    if not model.config.enable_audio_output:  # a model that only writes may leave its voice on the disk
        unexpected = {name for name in unexpected if not name.startswith(("talker.", "code2wav."))}
    misfits = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    misfits += [f"{name} is not a part of this architecture" for name in sorted(unexpected)]
    misfits += [
        f"{name} is {list(found)}, and the architecture wants {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    return model, (*misfits, *info["error_msgs"])


def save_pretrained(model: OmniModel, folder: Path, max_shard_size: str) -> None:
    """Write `model` to `folder` with the released names, one expert a tensor."""
    with _quiet(), _weights_progress(lambda share: None):
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def new_config(**parts: Any) -> OmniConfig:
    """A configuration made of `parts`; what is left out has the class defaults, which are not the released values."""
    with _quiet():
        return OmniConfig(**parts)


def new_model(config: OmniConfig) -> OmniModel:
    """A model of `config` with fresh weights."""
    with _quiet():
        return OmniModel(config)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`; never uses the network."""
    with _quiet():
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, local_files_only=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back two messages: rope keys that the model does use, and a report that our caller makes."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Unrecognized keys in `rope_parameters`")

    rope, report = logging.getLogger(rope_utils.__name__), logging.getLogger(loading_report.__name__)
    rope.addFilter(keep)
    was_disabled, report.disabled = report.disabled, True
    try:
        yield
    finally:
        rope.removeFilter(keep)
        report.disabled = was_disabled


@contextmanager
def _weights_progress(on_progress: Callable[[float], None]) -> Iterator[None]:
    """Report the progress bar "Loading weights" to `on_progress` instead of printing it."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == "Loading weights":
            return _reported(args[0], on_progress)
        return EmptyTqdm(*args, **kwargs)

    before = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _reported(items: Collection[_T], on_progress: Callable[[float], None]) -> Iterator[_T]:
    for done, item in enumerate(items):
        on_progress(done / len(items))
        yield item


def stock_features(samples: NDArray[np.float32], preprocessor: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What transformers' own feature extractor makes of 16 kHz `samples` [T]: [1, num_mel, n] and its mask [1, n]."""
    names = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
    settings = {name: preprocessor[name] for name in names if name in preprocessor}
    extractor = WhisperFeatureExtractor(**settings, return_attention_mask=True)
    out = extractor(
        samples,
        sampling_rate=extractor.sampling_rate,
        padding="longest",
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return out["input_features"], out["attention_mask"]
