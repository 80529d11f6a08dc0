"""Tokens as bytes and text, for tokenizers of bytes, of pieces with byte fallback, and slow ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gnnlm.config import LMConfig, parse_config
from gnnlm.corpus.vocabulary import ByteVocabulary, WordVocabulary
from gnnlm.errors import CorpusError, ModelError
from gnnlm.lm.hf_model import HFModel
from gnnlm.lm.hf_tokenizer import HFTokenizer
from gnnlm.lm.load_lm import load_lm
from gnnlm.run import Run
from tests.conftest import make_tokenizer, merge, save_tiny_lm

MARKED = "\u2581"


def merged_bytes() -> Any:
    """Byte-level BPE with a token that holds a space and two bytes of a longer character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "â"), ("Ġâ", "Ĥ"), ("Ã", "©")]
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece_like() -> Any:
    """What Llama 2 has: a mark for a space, one put before the text, and a token for each byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), MARKED, "a", "b", f"{MARKED}a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[(MARKED, "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARKED), normalizers.Replace(" ", MARKED)])
    steps = [decoders.Replace(MARKED, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Slow(transformers.PreTrainedTokenizer):
    """A tokenizer in Python, with the tokens of `sentencepiece_like` and no offsets of its own."""

    sp_model = None  # such tokenizers have one

    def __init__(self, **options: Any) -> None:
        words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), MARKED, "a", "b"]
        self.words = {word: number for number, word in enumerate(words)}
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {**self.words, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        marked = MARKED + text.replace(" ", MARKED)
        pieces = ([c] if c in self.words else [f"<0x{value:02X}>" for value in c.encode()] for c in marked)
        return [piece for group in pieces for piece in group]

    def _convert_token_to_id(self, token: str) -> int:
        return self.words.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return next(word for word, number in self.words.items() if number == index)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bytes_come_back(text: str) -> None:
    tokens = HFTokenizer(merged_bytes(), 1000)
    ids, starts = tokens.tokenize(text)
    assert b"".join(tokens.bytes_of(token) for token in ids) == text.encode()
    assert tokens.detokenize(ids) == text
    assert starts == sorted(starts)
    ends = [*starts, len(text)][1:]
    assert "".join(text[start:end] for start, end in zip(starts, ends, strict=True)) == text


def test_parts_of_characters_are_shown() -> None:
    tokens = HFTokenizer(merged_bytes(), 1000)
    ids, starts = tokens.tokenize("a €é")
    assert [tokens.piece(token) for token in ids] == ["a", " <0xE2><0x82>", "<0xAC>", "é"]
    assert [tokens.bytes_of(token) for token in ids] == [b"a", b" \xe2\x82", b"\xac", "é".encode()]
    assert starts == [0, 1, 2, 3]
    assert tokens.detokenize(ids[:2]) == "a \ufffd"
    assert tokens.piece(tokens.tokenizer.bos_token_id) == "<s>"
    assert tokens.bytes_of(999) == b""  # a row of the model that no token has


def test_pieces_with_byte_fallback() -> None:
    tokens = HFTokenizer(sentencepiece_like(), 1000)
    ids, starts = tokens.tokenize("ab a€\nb")
    pieces = [" a", "b", " a", "<0xE2>", "<0x82>", "<0xAC>", "\n", "b"]
    assert [tokens.piece(token) for token in ids] == pieces
    assert starts == [0, 1, 2, 4, 4, 4, 5, 6]
    assert tokens.detokenize(ids) == "ab a€\nb"


def test_a_slow_tokenizer_gets_offsets() -> None:
    tokens = HFTokenizer(Slow(), 1000)
    assert not tokens.tokenizer.is_fast
    ids, starts = tokens.tokenize("ab €b")
    assert [tokens.piece(token) for token in ids] == [" ", "a", "b", " ", "<0xE2>", "<0x82>", "<0xAC>", "b"]
    assert starts == [0, 0, 1, 2, 3, 3, 3, 4]


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(CorpusError, match="character 2 of the text is half of a surrogate pair"):
        HFTokenizer(make_tokenizer(), 258).tokenize("ab\ud800")


def test_words_and_bytes_come_back() -> None:
    words = WordVocabulary(["<eos>", "a", "é", "<unk>"])
    for text in ("", "a é", "a\n\né", "a\n"):
        assert words.detokenize(words.tokenize(text)[0]) == text
    assert [words.bytes_of(token) for token in (0, 2)] == [b"\n", "é".encode()]
    values = ByteVocabulary.count(["aé\n"])
    ids = values.tokenize("aé")[0]
    assert values.detokenize(ids) == "aé"
    assert [values.piece(token) for token in ids] == ["a", "<0xC3>", "<0xA9>"]
    assert values.detokenize(ids[:2]) == "a\ufffd"
    assert values.bytes_of(ids[1]) == b"\xc3"


# -- ids beyond the model's vocabulary -----------------------------------------------------------------------------


def test_a_tokenizer_of_a_larger_model_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"has 56 tokens beyond the model's vocabulary of 200 \(the first is 'Č', id 200"
    ):
        HFTokenizer(make_tokenizer(), 200)


@pytest.fixture(scope="module")
def with_added_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer got a token that its vocabulary has no room for."""
    folder = save_tiny_lm(tmp_path_factory.mktemp("added"))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    return folder


def test_an_added_token_is_refused_where_it_occurs(with_added_token: Path) -> None:
    config = LMConfig(model=str(with_added_token), window=32, context=8)
    lm = load_lm(config)
    assert lm.tokenize("new") == ([77, 68, 86], [0, 1, 2])
    with pytest.raises(ModelError, match="the token '<new>', id 258, beyond the model's vocabulary of 258"):
        lm.tokenize("a <new> thing")
    with pytest.raises(ModelError, match="'<new>' is not a token of this model"):
        load_lm(config.model_copy(update={"start": "<new>"}))


def test_an_added_token_in_a_corpus(with_added_token: Path, tiny_values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in "abcd":
        (tmp_path / "text" / f"{name}.txt").write_text(f"Some {name} text with a <new> token.\n")
    changes = {"corpus": {"source": str(tmp_path / "text")}, "lm": {"model": str(with_added_token)}}
    run = Run(parse_config({"run": str(tmp_path / "run"), **merge(tiny_values, changes)}))
    with pytest.raises(ModelError, match="the token '<new>'"):
        run.build("corpus")


@pytest.mark.parametrize("ids", [[3, 258], [-1, 3]])
def test_ids_are_checked_when_read(ids: list[int], tiny_lm_dir: Path) -> None:
    lm = load_lm(LMConfig(model=str(tiny_lm_dir), window=32, context=8))
    assert isinstance(lm, HFModel)
    for read in (lm.encode, lm.encode_keys, lm.stream):
        with pytest.raises(ModelError, match=f"expected token ids from 0 to 257, got {min(ids)} to {max(ids)}"):
            read(torch.tensor([ids]))
