"""A model folder's template is found wherever model makers put it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prompts import PromptError, read_template
from tests.prompts.folders import write_folder


def test_a_file_of_its_own_goes_before_the_tokenizers_settings(tmp_path: Path) -> None:
    write_folder(tmp_path, "settings")
    assert read_template(tmp_path).source == "settings"
    (tmp_path / "chat_template.jinja").write_text("«own»\n", encoding="utf-8")
    assert read_template(tmp_path).source == "«own»\n"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert read_template(write_folder(tmp_path, named)).source == "plain"
    assert read_template(write_folder(tmp_path, named[:1])).source == "tools"


def test_a_processors_template_is_the_last_resort(tmp_path: Path) -> None:
    write_folder(tmp_path, None)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert read_template(tmp_path).source == "processor"


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, "x", image_token="<image>", add_bos_token=True)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "<old>"}')
    assert dict(read_template(tmp_path).special_tokens) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<image>",
        "pad_token": "<pad>",
    }


def test_a_base_model_has_none_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="choose the model's instruct or chat version") as caught:
        read_template(write_folder(tmp_path, None))
    assert caught.value.code == "no_chat_template"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, "x")
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff{")
    with pytest.raises(PromptError, match="cannot be read") as caught:
        read_template(tmp_path)
    assert caught.value.code == "model_unreadable"
