"""A transformers tokenizer: the bytes and the text of tokens, and where each token starts in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gnnlm.corpus.vocabulary import byte_offsets, visible
from gnnlm.errors import CorpusError, ModelError

SPACE = "▁"  # what sentencepiece writes for a space
FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # what sentencepiece writes for a byte of an unknown character
LOOK_AHEAD = 16  # bytes in which a piece is searched, if a slow tokenizer has changed the text


class HFTokenizer:
    """A tokenizer of a model; tokens beyond the model's vocabulary are refused."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        vocabulary = tokenizer.get_vocab()
        ordinary = vocabulary.keys() - set(self._added.values()) - set(tokenizer.all_special_tokens)
        if len(ordinary) < 2:  # without its files, a tokenizer may load with special tokens alone
            raise ModelError(
                f"the tokenizer has no ordinary token among its {len(vocabulary)}: its files are missing; put "
                "tokenizer.json, or the vocabulary that the model came with, beside the weights"
            )
        beyond = sorted((number, token) for token, number in vocabulary.items() if number >= vocab_size)
        foreign = [(number, token) for number, token in beyond if number not in self._added]
        if foreign:
            raise ModelError(
                f"the tokenizer has {len(foreign)} tokens beyond the model's vocabulary of {vocab_size} (the first is "
                f"{foreign[0][1]!r}, id {foreign[0][0]}): it belongs to another model; use the one this model came with"
            )

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Return token ids without special tokens, and the character at which each starts; see `TokenText`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"character {error.start} of the text is half of a surrogate pair, which no tokenizer reads; remove it"
            ) from error
        if self.tokenizer.is_fast:
            out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids, offsets = list(out["input_ids"]), [start for start, _ in out["offset_mapping"]]
        else:
            ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            offsets = align([self.bytes_of(token) for token in ids], text)
        if ids and max(ids) >= self.vocab_size:
            raise ModelError(
                f"the text has the token {self.piece(max(ids))!r}, id {max(ids)}, beyond the model's vocabulary of "
                f"{self.vocab_size}: it was added to the tokenizer, and the model has not learned it; take it out of "
                "the text"
            )
        return ids, offsets

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        return visible(self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none for an id that the tokenizer does not have."""
        if token in self._added:
            return self._added[token].encode()
        written = self.tokenizer.convert_ids_to_tokens(int(token))
        if written is None:
            return b""
        if self._byte_level and all(symbol in BYTES for symbol in written):
            return bytes(BYTES[symbol] for symbol in written)
        if self._falls_back and (match := FALLBACK.fullmatch(written)):
            return bytes.fromhex(match.group(1))
        if self._spaced:
            return str(written).replace(SPACE, " ").encode()
        return str(self.tokenizer.decode([int(token)])).encode()

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """The steps by which a fast tokenizer turns tokens back into text; empty for a slow tokenizer."""
        decoder = self.tokenizer.backend_tokenizer.decoder if self.tokenizer.is_fast else None
        if decoder is None:
            return []
        described = json.loads(decoder.__getstate__())
        steps: list[dict[str, Any]] = described.get("decoders", [described])
        return steps

    @cached_property
    def _byte_level(self) -> bool:
        return hasattr(self.tokenizer, "byte_decoder") or any(step["type"] == "ByteLevel" for step in self._decoders)

    @cached_property
    def _falls_back(self) -> bool:
        return hasattr(self.tokenizer, "sp_model") or any(step["type"] == "ByteFallback" for step in self._decoders)

    @cached_property
    def _spaced(self) -> bool:
        return hasattr(self.tokenizer, "sp_model") or any(
            step["type"] == "Metaspace" or (step["type"] == "Replace" and step["pattern"].get("String") == SPACE)
            for step in self._decoders
        )


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character that byte-level tokenizers write.

    A visible byte is written as itself, the others as the characters from 256 on.
    """
    seen = [value for value in range(256) if 33 <= value <= 126 or (value >= 161 and value != 173)]
    hidden = [value for value in range(256) if value not in seen]
    return {chr(value): value for value in seen} | {chr(256 + place): value for place, value in enumerate(hidden)}


BYTES = _byte_alphabet()


def align(pieces: Sequence[bytes], text: str) -> list[int]:
    """Return the character at which each piece starts.

    If the tokenizer has changed the text, a piece is searched in the next bytes, with and without its spaces.

    >>> align([b" a", b"b", b"\\xe2\\x82", b"\\xac", b" c"], "ab\\u20ac  c")
    [0, 1, 2, 2, 4]
    """
    data, at, starts = text.encode(), 0, []
    for piece in pieces:
        tries = ((wanted, ahead) for ahead in (0, LOOK_AHEAD) for wanted in (piece, piece.strip()))
        found = ((wanted, data.find(wanted, at, at + len(wanted) + ahead)) for wanted, ahead in tries)
        taken, start = next((match for match in found if match[1] >= 0), (b"", at))
        starts.append(start)
        at = start + len(taken)
    characters = np.append(byte_offsets(text), len(text))
    return [int(start) for start in characters[starts]]
