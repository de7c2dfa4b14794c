"""The model's tokenizer, as files that transformers and `tokenizers` load: one token a word of ours.

WordPiece over `words.WORDS`: what isn't among them falls into letters, so any ASCII text has tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.needle import words
from bench.needle.batches import CONTEXT_TOKENS

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    model = models.WordPiece(
        vocab=words.ID_OF,
        unk_token=words.UNKNOWN,
        max_input_chars_per_word=100,
        continuing_subword_prefix="##",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in words.SPECIAL]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    make_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    configs = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS,
            "eos_token": words.END,
            "pad_token": words.END,
            "unk_token": words.UNKNOWN,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {
            "eos_token_id": words.ID_OF[words.END],
            "pad_token_id": words.ID_OF[words.END],
        },
    }
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
