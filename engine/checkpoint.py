"""Says whether a folder is a model Parley can load, and names every file that is missing or broken.

Only names, sizes, JSON files and the headers of the safetensors files are read, never a tensor, and torch is not
imported: 15 shards of 5 GB take well under two seconds.
"""

import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL_TYPE: Final = "qwen3_omni_moe"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_LFS_MAGIC: Final = b"version https://git-lfs"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_COPY: Final = "copy it from the checkpoint's source"
_AGAIN: Final = "fetch the file again"

# What the weights consist of: the prefix of its tensors, its name, whether it belongs to speech.
_COMPONENTS: Final = (
    ("thinker.model.", "the Thinker", False),
    ("thinker.audio_tower.", "the audio encoder", False),
    ("thinker.visual.", "the vision encoder", False),
    ("talker.model.", "the Talker", True),
    ("talker.code_predictor.", "the code predictor", True),
    ("code2wav.", "Code2Wav", True),
)

# Stacks of layers: the prefix before the layer's number, and the configuration key that counts them.
_STACKS: Final = (
    ("thinker.model.layers.", "thinker_config.text_config.num_hidden_layers"),
    ("thinker.audio_tower.layers.", "thinker_config.audio_config.encoder_layers"),
    ("thinker.visual.blocks.", "thinker_config.vision_config.depth"),
    ("talker.model.layers.", "talker_config.text_config.num_hidden_layers"),
    ("talker.code_predictor.model.layers.", "talker_config.code_predictor_config.num_hidden_layers"),
    ("code2wav.pre_transformer.layers.", "code2wav_config.num_hidden_layers"),
)

# Tensors whose shape the configuration states: rows (keys to multiply) and columns.
_SHAPES: Final = (
    (
        "thinker.model.embed_tokens.weight",
        ("thinker_config.text_config.vocab_size",),
        "thinker_config.text_config.hidden_size",
    ),
    (
        "talker.model.codec_embedding.weight",
        ("talker_config.text_config.vocab_size",),
        "talker_config.text_config.hidden_size",
    ),
    (
        "code2wav.code_embedding.weight",
        ("code2wav_config.codebook_size", "code2wav_config.num_quantizers"),
        "code2wav_config.hidden_size",
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that keeps a checkpoint from loading, and what to do about it."""

    file: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.remedy}"


class CheckpointError(Exception):
    """A checkpoint cannot be used; `problems` is the whole list, and the message has one of them per line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of one safetensors file; `digest` is the hash of its bytes."""

    file: str
    size_bytes: int
    digest: str
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What is known of a sound checkpoint before it is loaded.

    `dtypes` counts the parameters of each type, the commonest first. `speakers` is empty where there is no Talker.
    `fingerprint` tells checkpoints apart by their headers and sizes; it does not see the values.
    """

    folder: Path
    config: Mapping[str, Any]
    num_parameters: int
    weight_bytes: int
    dtypes: Mapping[str, int]
    shards: tuple[str, ...]
    speakers: tuple[str, ...]
    has_speech: bool
    fingerprint: str


def find_checkpoint(name_or_path: str | Path, *, allow_hub: bool) -> Path:
    """Return the folder that `name_or_path` means: a folder, or the id of a model on the hub.

    Without `allow_hub` only this machine is looked at, the hub's local cache included; the network is never used.
    """
    folder = Path(name_or_path).expanduser()
    if folder.exists():
        return folder.resolve()
    name = str(name_or_path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise CheckpointError([Problem(name, "there is no such folder", "check the path")])
    from engine.models import hub  # not at the top: most starts need no hub

    if (cached := hub.cached_snapshot(name)) is not None:
        return cached
    if not allow_hub:
        remedy = "download it first and give its folder, or allow the download (--hub)"
        raise CheckpointError([Problem(name, "not on this machine, and Parley is not allowed to download it", remedy)])
    try:
        return hub.download_snapshot(name)
    except OSError as error:
        raise CheckpointError([Problem(name, f"the download failed: {error}", "check the name and the network")]) from (
            error
        )


def check_checkpoint(folder: Path) -> CheckpointInfo:
    """Return what `folder` holds, or raise `CheckpointError` with everything that is wrong with it."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "there is no such folder"
        raise CheckpointError([Problem(str(folder), what, "give the folder that holds config.json")])
    problems: list[Problem] = []
    documents = _read_documents(folder, problems)
    config = documents.get("config.json") or {}
    problems += _config_problems(config)
    problems += _tokenizer_problems(folder)
    names, promised = _weight_files(folder, documents, problems)
    shards = [shard for name in names if (shard := _read_shard(folder / name, problems))]
    problems += _promise_problems(shards, promised)
    tensors = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    known = promised.keys() | tensors.keys()
    # With a file missing that nothing lists, what is absent cannot be told from what was not copied.
    if config and known and (promised or len(shards) == len(names)):
        problems += _component_problems(known, config)
        problems += _stack_problems(known, config)
    if config:
        problems += _shape_problems(tensors, config)
    if problems:
        raise CheckpointError(dict.fromkeys(problems))
    return _describe(folder, config, shards)


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one where there is no such file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _describe(folder: Path, config: Mapping[str, Any], shards: list[Shard]) -> CheckpointInfo:
    counts: Counter[str] = Counter()
    weight_bytes = 0
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for shard in sorted(shards, key=lambda shard: shard.file):
        digest.update(f"{shard.file}\0{shard.size_bytes}\0{shard.digest}\0".encode())
        for entry in shard.tensors.values():
            counts[entry.dtype] += entry.num_elements
            weight_bytes += entry.num_elements * DTYPE_BYTES[entry.dtype]
    has_speech = _speaks(config)
    return CheckpointInfo(
        folder=folder,
        config=config,
        num_parameters=counts.total(),
        weight_bytes=weight_bytes,
        dtypes=dict(counts.most_common()),
        shards=tuple(sorted(shard.file for shard in shards)),
        speakers=tuple(_value(config, "talker_config.speaker_id") or ()) if has_speech else (),
        has_speech=has_speech,
        fingerprint=digest.hexdigest(),
    )


# --- the small files ---------------------------------------------------------------------------------------------


def _small_files(folder: Path) -> Iterator[str]:
    for pattern in ("*.json", "*.jinja", "merges.txt"):
        yield from (path.name for path in folder.glob(pattern))


def _read_documents(folder: Path, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Parse every JSON file of the folder; report those that are missing, empty or broken."""
    documents: dict[str, dict[str, Any]] = {}
    needed = ("config.json", "tokenizer_config.json", "preprocessor_config.json")
    problems += [Problem(name, "missing", _COPY) for name in needed if not (folder / name).is_file()]
    for name in sorted(set(_small_files(folder))):
        data = (folder / name).read_bytes()
        if not data.strip():
            problems.append(Problem(name, "empty (0 bytes)" if not data else "empty", _AGAIN))
        elif data.startswith(_LFS_MAGIC):
            problems.append(_lfs_problem(name))
        elif name.endswith(".json"):
            try:
                content = json.loads(data)
            except ValueError as error:
                problems.append(Problem(name, f"not valid JSON ({error})", _AGAIN))
                continue
            if isinstance(content, dict):
                documents[name] = content
            elif name in needed or name == INDEX:
                problems.append(Problem(name, "not a JSON object", _AGAIN))
    return documents


def _config_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    if not config:
        return
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        remedy = f"choose a checkpoint of the Qwen3-Omni architecture ({MODEL_TYPE})"
        yield Problem("config.json", f"model_type is {model_type!r}, which Parley does not run", remedy)
        return
    keys = [key for _, key in _STACKS] + [key for _, rows, columns in _SHAPES for key in (*rows, columns)]
    for key in dict.fromkeys(keys):
        if (_speaks(config) or key.startswith("thinker")) and not isinstance(_value(config, key), int):
            yield Problem("config.json", f"{key} is missing or not an integer", _COPY)


def _tokenizer_problems(folder: Path) -> Iterator[Problem]:
    pair = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    if (folder / "tokenizer.json").is_file() or not pair:
        return
    if len(pair) == 1:
        yield Problem(pair[0], "missing", _COPY)
    else:
        yield Problem("tokenizer.json", "missing, and so are vocab.json and merges.txt", "copy it or both of them")


# --- the weights -------------------------------------------------------------------------------------------------


def _weight_files(
    folder: Path, documents: Mapping[str, Mapping[str, Any]], problems: list[Problem]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the weight files that exist, and which of them the index promises for each tensor."""
    if (folder / SINGLE).is_file():
        return [SINGLE], {}
    if (folder / INDEX).is_file():
        promised = documents.get(INDEX, {}).get("weight_map")
        if isinstance(promised, dict) and promised and all(isinstance(name, str) for name in promised.values()):
            named = sorted(set(promised.values()))
            outside = [name for name in named if Path(name).name != name]
            problems += [Problem(INDEX, f"names a file outside the folder: {name}", _COPY) for name in outside]
            absent = [name for name in named if name not in outside and not (folder / name).is_file()]
            problems += [Problem(name, "missing, and the index needs it", _COPY) for name in absent]
            return [name for name in named if name not in outside and name not in absent], promised
        if INDEX in documents:
            problems.append(Problem(INDEX, "has no weight_map from tensors to files", _COPY))
        return sorted(path.name for path in folder.glob("*.safetensors")), {}
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    problems += _without_index(folder, found)
    return found, {}


def _without_index(folder: Path, found: list[str]) -> Iterator[Problem]:
    if found:
        yield Problem(INDEX, "missing, and the weights are in several files", _COPY)
        numbered = [match for name in found if (match := re.fullmatch(r"(.+)-(\d+)-of-(\d+)\.safetensors", name))]
        if numbered:
            stem, digits, total = numbered[0].groups()
            expected = (f"{stem}-{n:0{len(digits)}}-of-{total}.safetensors" for n in range(1, int(total) + 1))
            yield from (Problem(name, "missing", _COPY) for name in expected if name not in found)
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        remedy = "fetch the checkpoint's safetensors files, or convert it on a machine you trust with it"
        yield from (Problem(name, "pickled weights: Parley never unpickles a model", remedy) for name in pickles)
    else:
        yield Problem(SINGLE, f"missing, and there is no {INDEX} either: no weights", _COPY)


def _lfs_problem(name: str) -> Problem:
    return Problem(name, "a Git LFS pointer, not the file itself", "run `git lfs pull` in the folder")


def _read_shard(path: Path, problems: list[Problem]) -> Shard | None:
    """Read the header of one safetensors file and hold it against the file's size."""
    size = path.stat().st_size
    if size == 0:
        problems.append(Problem(path.name, "empty (0 bytes)", _AGAIN))
        return None
    with path.open("rb") as file:
        start = file.read(len(_LFS_MAGIC))
        if start == _LFS_MAGIC:
            problems.append(_lfs_problem(path.name))
            return None
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            problems.append(Problem(path.name, "not a safetensors file", _AGAIN))
            return None
        if 8 + length > size:
            what = f"cut off inside its header: {size} bytes, the header alone needs {8 + length}"
            problems.append(Problem(path.name, what, _AGAIN))
            return None
        file.seek(8)
        header = file.read(length)
    try:
        tensors, data_bytes = _parse_header(header)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(Problem(path.name, f"its header is broken ({error})", _AGAIN))
        return None
    expected = 8 + length + data_bytes
    if size != expected:
        state = "cut off" if size < expected else "longer than its header says"
        problems.append(Problem(path.name, f"{state}: {size} bytes, and there should be {expected}", _AGAIN))
    return Shard(path.name, size, hashlib.sha256(header).hexdigest(), tensors)


def _parse_header(header: bytes) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors and the bytes of their data; raises where the entries do not fit together."""
    content = json.loads(header)
    content.pop("__metadata__", None)
    tensors: dict[str, TensorEntry] = {}
    spans: list[tuple[int, int]] = []
    for name, raw in content.items():
        entry = TensorEntry(raw["dtype"], tuple(int(side) for side in raw["shape"]))
        begin, end = raw["data_offsets"]
        if entry.dtype not in DTYPE_BYTES:
            raise ValueError(f"{name} has the unknown type {entry.dtype!r}")
        if min(entry.shape, default=0) < 0 or end - begin != entry.num_elements * DTYPE_BYTES[entry.dtype]:
            raise ValueError(f"{name} does not have the size of its shape")
        tensors[name] = entry
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError(f"a gap or an overlap at byte {position} of the data")
        position = end
    return tensors, position


# --- what the weights must be made of ----------------------------------------------------------------------------


def _promise_problems(shards: list[Shard], promised: Mapping[str, str]) -> Iterator[Problem]:
    for shard in shards:
        lacking = sorted(name for name, file in promised.items() if file == shard.file and name not in shard.tensors)
        if lacking:
            some = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
            what = f"lacks {len(lacking)} tensors that the index promises: {some}"
            yield Problem(shard.file, what, "fetch the file and the index again, both of the same version")


def _component_problems(names: Iterable[str], config: Mapping[str, Any]) -> Iterator[Problem]:
    for prefix, component, is_speech in _COMPONENTS:
        if any(name.startswith(prefix) for name in names) or (is_speech and not _speaks(config)):
            continue
        remedy = _COPY.replace("it", "all its files")
        if is_speech:
            remedy += ', or set "enable_audio_output": false in config.json for a model that only writes'
        yield Problem("weights", f"{component} is missing (no {prefix}* tensor)", remedy)


def _stack_problems(names: Iterable[str], config: Mapping[str, Any]) -> Iterator[Problem]:
    for prefix, key in _STACKS:
        layers = {name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)}
        expected = _value(config, key)
        if layers and isinstance(expected, int) and layers != {str(n) for n in range(expected)}:
            what = f"{len(layers)} layers under {prefix}*, and config.json says {expected} ({key})"
            yield Problem("weights", what, "fetch config.json and the weights again, both of the same version")


def _shape_problems(tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> Iterator[Problem]:
    for name, rows, columns in _SHAPES:
        sides = [_value(config, key) for key in (*rows, columns)]
        if name not in tensors or not all(isinstance(side, int) for side in sides):
            continue
        expected = (math.prod(sides[:-1]), sides[-1])
        if tensors[name].shape != expected:
            what = f"{name} is {list(tensors[name].shape)}, and config.json says {list(expected)}"
            yield Problem("weights", what, "fetch config.json and the weights again, both of the same version")


def _speaks(config: Mapping[str, Any]) -> bool:
    return bool(config.get("enable_audio_output", True))


def _value(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted path, or None where a part of the path is absent."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
