"""A checkpoint becomes a model that is ready, or an error that says which weight, device or amount is at fault."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import loader
from engine.checkpoint import CheckpointError
from engine.layout import CHAT_TEMPLATE
from engine.loader import CudaProbe, DeviceError, choose_device, load_model, probe_cuda
from engine.tiny import build_tiny_checkpoint


def ignore(share: float, doing: str) -> None: ...


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.mark.usefixtures("no_network")
def test_a_loaded_model_is_ready_to_run(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(tiny_folder, device="cpu", on_progress=ignore)
    assert loaded.device == torch.device("cpu")
    assert loaded.dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.info.num_parameters == sum(parameter.numel() for parameter in loaded.model.parameters())
    assert loaded.preprocessor["sampling_rate"] == 16000
    assert loaded.generation["eos_token_id"] == loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello there")) == "hello there"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert capfd.readouterr() == ("", "")


def test_every_weight_is_the_checkpoints(tiny_folder: Path) -> None:
    loaded = load_model(tiny_folder, device="cpu", on_progress=ignore)
    stored = load_file(tiny_folder / "model.safetensors")
    parameters = dict(loaded.model.named_parameters())
    same_name = parameters.keys() & stored.keys()
    assert len(same_name) > 200  # experts are fused and parts renamed on their way in
    assert all(torch.equal(parameters[name], stored[name]) for name in same_name)


def test_progress_rises_from_nothing_to_all(tiny_folder: Path) -> None:
    shares: list[float] = []
    load_model(tiny_folder, device="cpu", on_progress=lambda share, _: shares.append(share))
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert len(set(shares)) > 20


@pytest.mark.parametrize(
    ("name", "dtype"), [("float64", torch.float64), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_the_dtype_is_the_one_asked_for(tiny_folder: Path, name: str, dtype: torch.dtype) -> None:
    loaded = load_model(tiny_folder, device="cpu", dtype=name, on_progress=ignore)
    assert loaded.dtype == dtype
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}


def test_float64_runs_through_the_experts(tiny_folder: Path) -> None:
    loaded = load_model(tiny_folder, device="cpu", dtype="float64", on_progress=ignore)
    tokens = torch.tensor([loaded.tokenizer.encode("hello there")])
    logits = loaded.model.thinker(input_ids=tokens).logits
    assert logits.dtype == torch.float64
    assert torch.isfinite(logits).all()


def test_shards_load_like_one_file(tiny_folder: Path, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, shard="500KB")
    one = load_model(tiny_folder, device="cpu", on_progress=ignore).model.state_dict()
    many = load_model(tmp_path, device="cpu", on_progress=ignore).model.state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_wrong_choices_are_named_with_the_right_ones(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'int3'.*auto, float32, bfloat16, float16, float64"):
        load_model(tiny_folder, dtype="int3", on_progress=ignore)
    with pytest.raises(ValueError, match=r"'tpu'.*auto, cpu, cuda"):
        load_model(tiny_folder, device="tpu", on_progress=ignore)


def test_too_little_memory_is_stated_before_loading(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 << 20))
    monkeypatch.setattr(loader, "load_pretrained", lambda *_: pytest.fail("it was loaded all the same"))
    with pytest.raises(CheckpointError, match=r"take 6\.6 MiB in float64, and the computer has 2\.0 MiB free"):
        load_model(tiny_folder, device="cpu", dtype="float64", on_progress=ignore)


def test_weights_that_do_not_fit_are_all_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    del weights["thinker.lm_head.weight"]
    weights["thinker.visitor.weight"] = torch.zeros(2)
    weights["thinker.model.norm.weight"] = torch.zeros(7)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_model(copy, device="cpu", on_progress=ignore)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "thinker.lm_head.weight is missing" in lines[0]
    assert "thinker.visitor.weight is not a part" in lines[1]
    assert "norm.weight is [7], and the architecture wants [32]" in lines[2]


def test_a_model_that_only_writes_loads_without_its_voice(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    assert not load_model(copy, device="cpu", on_progress=ignore).info.has_speech


@pytest.mark.parametrize("place", ["chat_template.json", "chat_template.jinja", "tokenizer_config.json", None])
def test_the_chat_template_may_lie_in_three_places_or_nowhere(copy: Path, place: str | None) -> None:
    (copy / "chat_template.json").unlink()
    template = "{{ messages }} from here"
    if place == "chat_template.jinja":
        (copy / place).write_text(template)
    elif place is not None:
        content = json.loads((copy / place).read_text()) if (copy / place).exists() else {}
        (copy / place).write_text(json.dumps(content | {"chat_template": template}))
    loaded = load_model(copy, device="cpu", on_progress=ignore)
    assert loaded.tokenizer.chat_template == (CHAT_TEMPLATE if place is None else template)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashes .*signal 11"),
        ("import sys; sys.exit('no kernel image is available')", "no kernel image is available"),
        ("import sys; sys.exit(3)", "ended with code 3"),
        ("import threading; threading.Event().wait()", "did not answer within 0.5 s"),
    ],
)
def test_a_gpu_that_cannot_compute_leaves_the_cpu_and_a_reason(code: str, says: str) -> None:
    probe = probe_cuda([sys.executable, "-S", "-c", code], timeout_s=0.5 if "wait" in code else 30.0)
    assert not probe.is_usable
    device, reason = choose_device("auto", lambda: probe)
    assert device == torch.device("cpu")
    pytest.raises(DeviceError, choose_device, "cuda", lambda: probe).match(says)
    assert reason == probe.reason


def test_a_gpu_that_computes_is_described() -> None:
    answer = json.dumps({"name": "Card", "free_bytes": 7 << 30, "total_bytes": 8 << 30})
    assert probe_cuda([sys.executable, "-S", "-c", f"print('noise'); print('{answer}')"]) == CudaProbe(
        True, "Card, 8.0 GiB", "Card", 7 << 30, 8 << 30
    )


def test_no_probe_is_made_for_the_cpu() -> None:
    device, reason = choose_device("cpu", lambda: pytest.fail("the GPU was touched"))
    assert device == torch.device("cpu")
    assert "asked for" in reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_real_gpu_is_taken(tiny_folder: Path) -> None:
    loaded = load_model(tiny_folder, on_progress=ignore)
    assert loaded.device.type == "cuda"
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cuda"}
