"""An open-book model that reads step by step: tokens in, predictions and a new past out.

Prefill is one long read, a generation step a short one; both predict what scoring the whole text at once predicts. No
run directory is needed.

Shapes: B texts, T tokens, K neighbours, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.errors import ConfigError, ModelError
from gnnlm.gnn.carry import Carry
from gnnlm.gnn.model import LayerAttention
from gnnlm.graph.batch import Context
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.window_reader import LMPast, WindowReader
from gnnlm.predict.own_past import OwnPast, OwnText, merged_with_own, over_texts
from gnnlm.predict.predictor import STATE_OF, Prediction, Predictor
from gnnlm.retrieval.index import Allowed, Index
from gnnlm.retrieval.neighbours import Neighbours

BLOCK = 256  # tokens of a long text that are read at once
ROLLBACK = 64  # tokens that can be dropped from a past without reading its text again
Filter = Allowed | Sequence[Allowed | None] | None  # for all texts, or for each


@dataclass(frozen=True)
class Past:
    """What was read of each text of a batch. Immutable: reading, cropping, selecting and joining return a new past.

    A past holds the base model's cache, bounded by its window; the graph network's keys and values, bounded by its
    context and `ROLLBACK`; the token ids of the whole text; and, of texts that look up their own past, all states.
    """

    lm: LMPast
    carry: Carry | None
    spare: tuple[int, ...]  # tokens of each text that can still be dropped from the carry
    own: tuple[OwnText | None, ...] = ()  # each text's own rows; none where they are not looked up

    def __len__(self) -> int:
        return len(self.lm)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens read of each text, without the start token."""
        return self.lm.lengths

    def crop(self, n: int | Sequence[int]) -> Past:
        """Return a past without the last n tokens of each text, or n[b] of text b.

        After dropping more than `ROLLBACK` tokens, the next read processes the whole text again.
        """
        drops = [n] * len(self) if isinstance(n, int) else list(n)
        lm = self.lm.crop(drops)
        if not any(drops):
            return self
        spare = tuple(left - drop for left, drop in zip(self.spare, drops, strict=True))
        carry = self.carry
        if carry is not None:
            carry = None if min(spare) < 0 else carry.dropping(torch.tensor(drops))
        own = tuple(text and text.crop(drop) for text, drop in zip(self.own, drops, strict=True))
        return Past(lm, carry, spare, own)

    def select(self, rows: Sequence[int]) -> Past:
        """Return the texts with these numbers, in this order; a number may occur several times."""
        picked = torch.tensor(list(rows), dtype=torch.long)
        return Past(
            self.lm.select(rows),
            None if self.carry is None else self.carry.select(picked),
            tuple(self.spare[row] for row in rows),
            tuple(self.own[row] for row in rows),
        )

    def join(self, others: Sequence[Past]) -> Past:
        """Return the texts of all pasts, one after the other. All must have been read with the same predictors."""
        pasts = [self, *others]
        carries = [past.carry for past in pasts if past.carry is not None]
        return Past(
            self.lm.join([past.lm for past in others]),
            carries[0].join(carries[1:]) if len(carries) == len(pasts) else None,
            tuple(left for past in pasts for left in past.spare),
            tuple(text for past in pasts for text in past.own),
        )


@dataclass(frozen=True)
class ReadingRule:
    """How texts are read, the same as for the store: see `lm.window`, `lm.context`, `store.key` and `store.dtype`.

    `lm.whole_lines` holds for attached documents only: a text that is being read has no known line ends yet.
    """

    window: int
    context: int
    key: str = "state"
    dtype: str = "fp16"
    whole_lines: bool = False


@dataclass(frozen=True)
class OpenBook:
    """A frozen language model with a store, an index over it, and a predictor."""

    lm: BaseLM
    store: Store
    index: Index
    predictor: Predictor
    reading: ReadingRule

    @cached_property
    def reader(self) -> WindowReader:
        return WindowReader(self.lm, self.reading.window, self.reading.context, self.reading.key)

    @torch.inference_mode()
    def read(
        self,
        tokens: Sequence[Sequence[int]],
        past: Past | None = None,
        wanted: Collection[str] | None = None,
        allowed: Filter = None,
        k: int = 0,
        watch: list[LayerAttention] | None = None,
        own_past: bool | Sequence[bool] = False,
    ) -> tuple[Prediction, Past]:
        """Return what is predicted after each new token of each text, [B, T], and the new past.

        Without a past, the texts start here, and the first prediction of each is for its first token: [B, T + 1]. Texts
        may get different numbers of tokens; they are padded on the right, and `Prediction.real` is false at padding.

        `wanted` names the predictors whose states are computed; by default the book's best. At least `k` neighbours
        are looked up among those that `allowed` permits. With `own_past`, a text also looks up its own tokens that the
        base model no longer sees (`own_past.py`). `allowed` and `own_past` hold for all texts, or are lists with an
        entry for each text. The attention of the graph network's layers is appended to `watch`: see `Predictor.step`.
        """
        wanted = self.predictor.names[-1:] if wanted is None else wanted
        self.predictor.check(wanted)
        self.check_tokens(tokens)
        gnn = any(STATE_OF[name] == "gnn" for name in wanted)
        owning = [bool(own) for own in for_each(own_past, len(tokens))]
        if past is not None and (
            (gnn and past.carry is None)  # cropped too far, or read without the network
            or any(own and text is None for own, text in zip(owning, past.own, strict=True))
        ):
            texts = [text.tolist() for text in past.lm.texts]
            _, past = self.read_to_end(texts, None, wanted, allowed, owning)
        read, lm = self.reader.read(tokens, None if past is None else past.lm)
        read_before = [0] * len(tokens) if past is None else [length + 1 for length in past.lengths]
        states_BTD = self.rounded(read.states_BTD)
        keys_BTD = states_BTD if read.keys_BTD is None else self.rounded(read.keys_BTD)
        k = max(k, self.predictor.neighbours_needed(wanted))
        counts = read.real_BT.sum(1).tolist()
        neighbours = self.search(keys_BTD, read.real_BT, k, allowed)
        own_texts = self._own_texts(owning, None if past is None else past.own, lm, states_BTD, keys_BTD, counts)
        neighbours = merged_with_own(neighbours, own_texts, keys_BTD, counts, k, len(self.store))
        predictor, found = over_texts(self.predictor, neighbours, own_texts)
        offsets_BT = torch.tensor(read_before)[:, None] + torch.arange(states_BTD.shape[1])
        document_BT = torch.where(read.real_BT.cpu(), 0, -1)
        carry = None if past is None else past.carry
        prediction, carry = predictor.step(
            Context(states_BTD, offsets_BT, document_BT), found, wanted, carry, ROLLBACK, watch
        )
        prediction = replace(prediction, neighbours=neighbours.to(prediction.neighbours.positions.device))
        spare = [0] * len(tokens) if past is None else past.spare
        return prediction, Past(
            lm,
            carry if gnn else None,
            tuple(min(ROLLBACK, max(0, left) + count) for left, count in zip(spare, counts, strict=True)),
            own_texts,
        )

    def read_blocks(
        self,
        tokens: Sequence[Sequence[int]],
        past: Past | None = None,
        wanted: Collection[str] | None = None,
        allowed: Filter = None,
        k: int = 0,
        own_past: bool | Sequence[bool] = False,
    ) -> Iterator[tuple[Prediction, Past]]:
        """Read texts of any length, `BLOCK` tokens at a time; yield what `read` returns for each block, at least one.

        `Prediction.read` says which token of its text each prediction is for.
        """
        for start in range(0, max(1, *map(len, tokens)), BLOCK):
            block = [text[start : start + BLOCK] for text in tokens]
            prediction, past = self.read(block, past, wanted, allowed, k, own_past=own_past)
            yield prediction, past

    def read_to_end(
        self,
        tokens: Sequence[Sequence[int]],
        past: Past | None = None,
        wanted: Collection[str] | None = None,
        allowed: Filter = None,
        own_past: bool | Sequence[bool] = False,
    ) -> tuple[Prediction, Past]:
        """Read texts of any length; return what `read` returns for the last block."""
        return deque(self.read_blocks(tokens, past, wanted, allowed, own_past=own_past), maxlen=1).pop()

    @cached_property
    def own_past(self) -> OwnPast:
        """How the text being read becomes rows."""
        dtype = torch.float16 if self.reading.dtype == "fp16" else torch.float32
        return OwnPast(self.predictor, self.reading.window, self.reading.context, self.index.metric, dtype)

    def _own_texts(
        self,
        owning: Sequence[bool],
        before: Sequence[OwnText | None] | None,
        lm: LMPast,
        states_BTD: Tensor,
        keys_BTD: Tensor,
        counts: Sequence[int],
    ) -> tuple[OwnText | None, ...]:
        """Return the own rows of the texts that look them up, those just read included."""
        texts: list[OwnText | None] = []
        for line, (own, count) in enumerate(zip(owning, counts, strict=True)):
            text = (self.own_past.begin() if before is None else before[line]) if own else None
            if text is not None and count:
                text = text.grown(lm.texts[line], states_BTD[line, :count], keys_BTD[line, :count])
            texts.append(text)
        return tuple(texts)

    def rounded(self, states: Tensor) -> Tensor:
        """Round states to the precision of the store, so that queries match the stored keys."""
        if self.reading.dtype != "fp16":
            return states
        rounded = states.half().float()
        if not bool(torch.isfinite(rounded).all()):
            raise ModelError("the model's states do not fit in fp16; build the run with store.dtype: fp32")
        return rounded

    def search(self, keys_BTD: Tensor, real_BT: Tensor, k: int, allowed: Filter = None) -> Neighbours:
        """Return the k nearest allowed neighbours of every real token, [B, T, k]."""
        batch, tokens = real_BT.shape
        if not k:
            return Neighbours.none(batch, tokens)
        real_BT = real_BT.cpu()
        lines = real_BT.nonzero()[:, 0].tolist()
        filters = for_each(allowed, batch)
        found = self._searched(keys_BTD[real_BT.to(keys_BTD.device)], k, [filters[line] for line in lines])
        spread = Neighbours.none(batch, tokens, k=found.k)
        spread.positions[real_BT] = found.positions.cpu()
        spread.similarity[real_BT] = found.similarity.cpu()
        return spread

    def _searched(self, keys_ND: Tensor, k: int, filters: Sequence[Allowed | None]) -> Neighbours:
        """Return the k nearest of each query under its own filter, [N, k]; search queries of one filter together."""
        alike: dict[int, list[int]] = {}
        for number, allowed in enumerate(filters):
            alike.setdefault(id(allowed), []).append(number)
        if len(alike) <= 1:
            return self.index.search(keys_ND, k, filters[0] if filters else None)
        parts = [self.index.search(keys_ND[numbers], k, filters[numbers[0]]) for numbers in alike.values()]
        order = torch.tensor([number for numbers in alike.values() for number in numbers])
        return Neighbours.joined(parts)[order.argsort()]

    def check_tokens(self, tokens: Sequence[Sequence[int]]) -> None:
        """Refuse ids outside the model's vocabulary."""
        if not tokens:
            raise ConfigError("read expects at least one text, as a list of token ids")
        for text in tokens:
            if len(text) and not (min(text) >= 0 and max(text) < self.lm.vocab_size):
                raise ConfigError(
                    f"expected token ids from 0 to {self.lm.vocab_size - 1}, got {min(text)} to {max(text)}"
                )


Choice = TypeVar("Choice")


def for_each(choice: Choice | Sequence[Choice | None] | None, texts: int) -> list[Choice | None]:
    """Return one value for each text, given one for all or a list.

    >>> for_each(None, 2), for_each([3, None], 2)
    ([None, None], [3, None])
    """
    if isinstance(choice, (list, tuple)):
        assert len(choice) == texts, "one for each text"
        return list(choice)
    return [cast("Choice | None", choice)] * texts
