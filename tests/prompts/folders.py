"""Small model folders as far as prompts need them: a tokenizer of bytes and words, and any template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>", "<tool_call>", "  ")
"""Added tokens that their tokenizer does not call special, as Qwen3's tags and others' runs of spaces."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(bos: bool = False, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """A token for each byte, and the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = ["".join(pair) for pair in merges]
    vocab = {token: number for number, token in enumerate([*alphabet, *joined])}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    if bos:
        number = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", number)]
        )
    return tokenizer


def write_folder(folder: Path, template: object, tokenizer: Tokenizer | None = None, **config: Any) -> Path:
    """Write what a `PromptBuilder` reads; a template of None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
