"""A checkpoint is refused with the whole list of what is wrong with it, quickly and without the network."""

import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import INDEX, CheckpointError, check_checkpoint, find_checkpoint
from engine.tiny import build_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FIRST_SHARD = "model-00001-of-00008.safetensors"
LAST_SHARD = "model-00008-of-00008.safetensors"


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("sharded"), shard="500KB")


@pytest.fixture
def sharded(sharded_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_folder, tmp_path / "sharded"))


@pytest.fixture
def single(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "single"))


def problems(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    return lines


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def save_without(folder: Path, prefix: str) -> None:
    """Write the single file again without the tensors under `prefix`."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if not name.startswith(prefix)}, path)


def test_a_sound_checkpoint_is_described(tiny_folder: Path, sharded_folder: Path) -> None:
    one, many = check_checkpoint(tiny_folder), check_checkpoint(sharded_folder)
    assert one.shards == ("model.safetensors",)
    assert len(many.shards) == 8
    assert one.num_parameters == many.num_parameters == sum(one.dtypes.values())
    assert one.weight_bytes == 4 * one.num_parameters
    assert one.dtypes == {"F32": one.num_parameters}
    assert set(one.speakers) == {"chelsie", "ethan", "aiden"}
    assert one.has_speech
    assert one.config["model_type"] == "qwen3_omni_moe"


def test_the_fingerprint_sees_headers_and_sizes(single: Path) -> None:
    before = check_checkpoint(single)
    assert check_checkpoint(single).fingerprint == before.fingerprint
    path = single / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert check_checkpoint(single).fingerprint == before.fingerprint
    (single / "config.json").write_text((single / "config.json").read_text() + "\n")
    assert check_checkpoint(single).fingerprint != before.fingerprint


def test_a_missing_folder_and_a_file_are_named(tmp_path: Path) -> None:
    assert "there is no such folder" in problems(tmp_path / "nowhere")[0]
    (tmp_path / "file").touch()
    assert "not a folder" in problems(tmp_path / "file")[0]


def test_an_empty_folder_lists_all_that_it_needs(tmp_path: Path) -> None:
    files = {line.partition(":")[0] for line in problems(tmp_path)}
    assert files == {
        "config.json", "tokenizer_config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip


def test_the_list_is_complete_and_takes_less_than_two_seconds(sharded: Path) -> None:
    (sharded / "preprocessor_config.json").unlink()
    (sharded / "merges.txt").unlink()
    (sharded / "tokenizer_config.json").write_bytes(b"")
    (sharded / "generation_config.json").write_text("{")
    (sharded / FIRST_SHARD).unlink()
    (sharded / "model-00002-of-00008.safetensors").write_bytes(b"")
    cut = sharded / "model-00003-of-00008.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    (sharded / "model-00004-of-00008.safetensors").write_bytes(b"\xff" * 100)
    edit_json(sharded / "config.json", lambda config: config["thinker_config"]["text_config"].pop("vocab_size"))
    start = time.perf_counter()
    lines = problems(sharded)
    assert time.perf_counter() - start < 2.0
    assert {line.partition(":")[0] for line in lines} == {
        "preprocessor_config.json", "merges.txt", "tokenizer_config.json", "generation_config.json", FIRST_SHARD,
        "model-00002-of-00008.safetensors", "model-00003-of-00008.safetensors", "model-00004-of-00008.safetensors",
        "config.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.json"])
def test_files_with_defaults_may_be_absent(single: Path, name: str) -> None:
    (single / name).unlink()
    assert check_checkpoint(single).num_parameters > 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(
    ("content", "says"), [(None, "missing"), (b"", "empty"), (b"{]", "not valid JSON"), (b"[]", "not a JSON object")]
)
def test_a_bad_json_file_is_named(single: Path, name: str, content: bytes | None, says: str) -> None:
    if content is None:
        (single / name).unlink()
    else:
        (single / name).write_bytes(content)
    lines = problems(single)
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}: ")
    assert says in lines[0]


def test_a_foreign_model_is_refused(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(model_type="llama"))
    assert "model_type is 'llama'" in problems(single)[0]


def test_a_tokenizer_is_one_file_or_two(single: Path) -> None:
    (single / "vocab.json").unlink()
    assert [line.partition(":")[0] for line in problems(single)] == ["vocab.json"]
    (single / "merges.txt").unlink()
    assert [line.partition(":")[0] for line in problems(single)] == ["tokenizer.json"]
    (single / "tokenizer.json").write_text("{}")
    check_checkpoint(single)


def truncate_data(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def truncate_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def leave_an_lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def write_text(path: Path) -> None:
    path.write_text("<html>404</html>")


def break_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = b"oops"
    path.write_bytes(data)


def misstate_a_shape(path: Path) -> None:
    edit_header(path, lambda header: header["thinker.lm_head.weight"].update(shape=[1, 1]))


def invent_a_type(path: Path) -> None:
    edit_header(path, lambda header: header["thinker.lm_head.weight"].update(dtype="Q4"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate_data, "cut off: "),
        (truncate_header, "cut off inside its header"),
        (append, "longer than its header says"),
        (empty, "empty (0 bytes)"),
        (leave_an_lfs_pointer, "Git LFS pointer"),
        (write_text, "not a safetensors file"),
        (break_header, "its header is broken"),
        (misstate_a_shape, "does not have the size of its shape"),
        (invent_a_type, "unknown type 'Q4'"),
    ],
)
def test_a_broken_weight_file_is_named(single: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(single / "model.safetensors")
    lines = problems(single)
    assert len(lines) == 1
    assert lines[0].startswith("model.safetensors: ")
    assert says in lines[0]


def test_missing_shards_are_all_named(sharded: Path) -> None:
    (sharded / FIRST_SHARD).unlink()
    (sharded / LAST_SHARD).unlink()
    assert [line.partition(",")[0] for line in problems(sharded)] == [
        f"{FIRST_SHARD}: missing",
        f"{LAST_SHARD}: missing",
    ]


def test_a_missing_index_is_named_with_the_missing_shards(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / LAST_SHARD).unlink()
    assert {line.partition(":")[0] for line in problems(sharded)} == {INDEX, LAST_SHARD}


def test_a_tensor_that_the_index_promises_is_missed(sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"thinker.invented": FIRST_SHARD}))
    (line,) = problems(sharded)
    assert "lacks 1 tensors" in line
    assert "thinker.invented" in line


def test_an_index_cannot_reach_out_of_the_folder(sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"thinker.invented": "../secret.safetensors"}))
    (line,) = problems(sharded)
    assert "outside the folder" in line


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    (line,) = problems(single)
    assert line.startswith(f"{name}: ")
    assert "Parley never unpickles a model" in line


@pytest.mark.parametrize(
    ("prefix", "component"),
    [("talker.model.", "the Talker"), ("code2wav.", "Code2Wav"), ("thinker.audio_tower.", "the audio encoder")],
)
def test_a_missing_component_is_named(single: Path, prefix: str, component: str) -> None:
    save_without(single, prefix)
    (line,) = problems(single)
    assert f"{component} is missing" in line


def test_a_model_that_only_writes_needs_no_voice(single: Path) -> None:
    save_without(single, "talker.")
    save_without(single, "code2wav.")
    edit_json(single / "config.json", lambda config: config.update(enable_audio_output=False))
    info = check_checkpoint(single)
    assert not info.has_speech
    assert info.speakers == ()


def test_weights_of_another_size_are_refused(single: Path) -> None:
    def grow(config: dict[str, Any]) -> None:
        config["thinker_config"]["text_config"] |= {"vocab_size": 99, "num_hidden_layers": 7}

    edit_json(single / "config.json", grow)
    lines = problems(single)
    assert len(lines) == 2
    assert "6 layers under thinker.model.layers.*, and config.json says 7" in lines[0]
    assert "config.json says [99, 32]" in lines[1]


def test_fifteen_shards_of_five_gigabytes_are_checked_in_two_seconds(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    data = (tiny_folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    real = json.loads(data[8 : 8 + length])
    real.pop("__metadata__")
    weight_map = {}
    for number in range(1, 16):
        # A sparse file: the tensors of the tiny model in the first, then 2,000 that fill it up.
        header, position = (dict(real), len(data) - 8 - length) if number == 1 else ({}, 0)
        for n in range(2000):
            end = position + 2 * 1250 * 1000
            header[f"thinker.extra.{number}.{n}"] = {
                "dtype": "BF16", "shape": [1250, 1000], "data_offsets": [position, end],
            }  # fmt: skip
            position = end
        name = f"model-{number:05}-of-00015.safetensors"
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + position)
        weight_map |= dict.fromkeys(header, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    start = time.perf_counter()
    info = check_checkpoint(folder)
    assert time.perf_counter() - start < 2.0
    assert info.weight_bytes > 15 * 5 * 10**9 * 0.99


def test_checking_imports_neither_torch_nor_transformers(tiny_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.checkpoint import check_checkpoint;"
        "check_checkpoint(Path(sys.argv[1]));"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_folder)], check=True, cwd=ROOT)


@pytest.mark.usefixtures("no_network")
def test_a_folder_is_found_and_a_hub_name_is_not_downloaded(tiny_folder: Path) -> None:
    assert find_checkpoint(str(tiny_folder), allow_hub=False) == tiny_folder
    with pytest.raises(CheckpointError, match="not allowed to download"):
        find_checkpoint("somebody/some-model", allow_hub=False)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find_checkpoint("/not/here", allow_hub=True)


@pytest.mark.usefixtures("no_network")
def test_a_model_in_the_hubs_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert find_checkpoint("somebody/some-model", allow_hub=False) == snapshot
