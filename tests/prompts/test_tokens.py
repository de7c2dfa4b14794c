"""No text of anybody's becomes a control token, and every text comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prompts import PromptError, tokens
from prompts.tokens import Tokens
from tests.prompts.folders import CHATML, PLAIN, SPECIAL, byte_tokenizer, write_folder

CONTROL = (*SPECIAL, *PLAIN[:3])


def make(folder: Path, tokenizer: Tokenizer | None = None) -> tuple[Tokens, Tokenizer]:
    tokenizer = tokenizer or byte_tokenizer()
    return Tokens(write_folder(folder, CHATML, tokenizer)), tokenizer


def control_ids(tokenizer: Tokenizer) -> set[int | None]:
    return {tokenizer.token_to_id(token) for token in CONTROL}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokens, Tokenizer]:
    return make(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("token", CONTROL)
def test_an_added_token_in_a_text_is_text_whether_it_is_special_or_not(
    made: tuple[Tokens, Tokenizer], token: str
) -> None:
    ours, tokenizer = made
    for text in (token, f"He wrote {token} here.", token * 3, f"{token[:-1]}{token}>"):
        ids = ours.text(text).tolist()
        assert not control_ids(tokenizer) & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id(token) in ours.template(f"x{token}y")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*CONTROL, "  ", "<|", "|>", "im_end", " ", "\n", "a", "é", "</"]), max_size=12)
)
def test_any_mixture_of_them_is_text(made: tuple[Tokens, Tokenizer], parts: list[str]) -> None:
    ours, tokenizer = made
    text = "".join(parts)
    ids = ours.text(text).tolist()
    assert not control_ids(tokenizer) & set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_white_space_that_was_added_stays_one_token(made: tuple[Tokens, Tokenizer]) -> None:
    ours, tokenizer = made
    assert tokenizer.token_to_id("  ") in ours.text("a  b").tolist()


def test_a_control_token_that_the_vocabulary_itself_can_spell_is_cut(tmp_path: Path) -> None:
    """In such a model the letters alone would be joined into the control token."""
    merges = (("<", "/"), ("</", "s"), ("</s", ">"))
    tokenizer = byte_tokenizer(merges=merges)
    ours, _ = make(tmp_path, tokenizer)
    number = tokenizer.token_to_id("</s>")
    # The joined piece of the vocabulary and the added token are one id.
    assert number < 300
    ids = ours.text("an </s> and </s></s>").tolist()
    assert number not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "an </s> and </s></s>"


def test_a_long_text_has_the_tokens_of_its_pieces(
    made: tuple[Tokens, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, tokenizer = made
    text = "one line\nand another\n" * 40 + "x" * 200
    whole = ours.text(text).tolist()
    monkeypatch.setattr(tokens, "PIECE_CHARS", 50)
    assert ours.text(text).tolist() == whole
    assert tokenizer.decode(whole) == text


def test_a_sentencepiece_tokenizer_puts_no_space_of_its_own_into_a_prompt(tmp_path: Path) -> None:
    vocab = {piece: number for number, piece in enumerate(["<unk>", "▁", "a", "b", "\n", "▁a"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace()
    ours, _ = make(tmp_path, tokenizer)
    assert ours.text("ab").tolist() == [2, 3]
    assert ours.text("\n\nb").tolist() == [4, 4, 3]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [5, 3]


@pytest.mark.parametrize(("bos", "leading"), [(False, []), (True, ["<s>"])])
def test_what_a_tokenizer_puts_first_is_known(tmp_path: Path, bos: bool, leading: list[str]) -> None:
    ours, tokenizer = make(tmp_path, byte_tokenizer(bos))
    assert ours.leading() == [tokenizer.token_to_id(token) for token in leading]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"has no tokenizer\.json") as caught:
        Tokens(tmp_path)
    assert caught.value.code == "model_unreadable"
    for broken in ("{", "[]", json.dumps({"model": 1})):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(PromptError, match="is no tokenizer"):
            Tokens(tmp_path)


def test_unknown_characters_are_text_though_their_token_is_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>"])
    ours, _ = make(tmp_path, tokenizer)
    assert ours.text("a ж a <unk>").tolist() == [1, 0, 1, 0]
    assert ours.text("ж" * 5000).tolist() == [0]
