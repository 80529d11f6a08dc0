"""A token stream in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.corpus.document import Document, TokenizedDocument
from gnnlm.corpus.stream import END, TokenStream


class MemoryStream(TokenStream):
    """Tokens, texts and offsets of a few documents.

    >>> text = MemoryStream([TokenizedDocument("a", "xyz", [7, 8], [0, 2])])
    >>> text.tokens.tolist(), text.passage(1, 1, 1)
    ([7, 8, -1], Passage(document='a', before='xy', token='z', after=''))
    """

    def __init__(self, documents: Sequence[TokenizedDocument]) -> None:
        self._documents = tuple(documents)
        self.tokens: npt.NDArray[np.int64] = np.array(
            [token for document in documents for token in (*document.tokens, END)], dtype=np.int64
        )
        sizes = [len(document.tokens) + 1 for document in documents]
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.bases = self.starts[[0, -1]]

    @property
    def segments(self) -> tuple[MemoryStream]:
        return (self,)

    @cached_property
    def names(self) -> list[str]:
        return [document.name for document in self._documents]

    @cached_property
    def documents(self) -> list[Document]:
        return [Document(document.name, document.text) for document in self._documents]

    @cached_property
    def offsets(self) -> npt.NDArray[Any]:
        ends = ((*document.offsets, len(document.text)) for document in self._documents)
        return np.array([offset for each in ends for offset in each], dtype=np.int64)
