"""The loop that writes: read what was chosen and a draft of what may follow, keep what the model chooses too.

Shapes: B texts, T tokens of a step, K neighbours, D width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnlm.predict.knn import neighbour_weights
from gnnlm.predict.open_book import BLOCK, OpenBook, Past
from gnnlm.predict.pointers import Pointers
from gnnlm.predict.predictor import MIXED, STATE_OF, Prediction
from gnnlm.retrieval.index import Allowed
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.write.draft import LONGEST, Chances, Costs, Draft, Drafter, best_length
from gnnlm.write.sampling import Sampling
from gnnlm.write.text import TextStream


@dataclass(frozen=True)
class Order:
    """What is asked for: by which predictor, how tokens are chosen, where to stop, what may be looked up."""

    predictor: str
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    draft: bool = True
    allowed: Allowed | None = None
    pointers: Pointers | None = None


@dataclass(frozen=True)
class Voters:
    """The neighbours with the token that was written: how heavy each is, and its share in the token's probability."""

    positions: Tensor
    similarity: Tensor
    weight: Tensor
    share: Tensor  # zero where the predictor has no p_kNN


@dataclass(frozen=True)
class Written:
    """A token that was written."""

    id: int
    log_prob: float  # under the predictor, before temperature and filters
    base_state: Tensor  # [D], for the base model's own opinion
    voters: Voters


@dataclass
class Writing:
    """A text in progress."""

    prompt: list[int]
    sample: int
    stream: TextStream
    tokens: list[Written] = field(default_factory=list)
    finish_reason: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    searches: int = 0
    seconds: float = 0.0
    chances: Chances = field(default_factory=Chances)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def last(self) -> int:
        return self.tokens[-1].id


class Writer:
    """Writes a batch of texts, a step at a time; finished texts leave the batch."""

    def __init__(self, model: OpenBook, order: Order, drafter: Drafter, costs: Costs) -> None:
        model.predictor.check((order.predictor,))
        self.model, self.order = model, order
        self.drafter, self.costs = drafter if order.draft else None, costs
        self.active: list[Writing] = []
        self._past: Past | None = None
        self.wanted = tuple(dict.fromkeys(("base", order.predictor)))  # base costs nothing but keeping its state

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]], n: int = 1) -> list[Writing]:
        """Read the prompts and write the first token of n texts for each."""
        began = time.perf_counter()
        prediction, past = self.prefill(prompts)
        rows = [number for number in range(len(prompts)) for _ in range(n)]
        self._past = past.select(rows) if n > 1 else past
        order = self.order
        writings = [
            Writing(list(prompts[row]), place % n, TextStream(self.model.lm, prompts[row], order.stop))
            for place, row in enumerate(rows)
        ]
        searches = self._past.searches
        log_probs_BV, parts_BK = self.distributions(prediction)
        for place, (writing, row) in enumerate(zip(writings, rows, strict=True)):
            writing.searches = searches[place]
            self._take(writing, prediction[row], log_probs_BV[row], parts_BK[row])
        self.active = list(writings)
        self._time(writings, began)
        self._leave()
        return writings

    @torch.inference_mode()
    def step(self) -> list[Writing]:
        """Write one or more tokens of every text in progress; the texts that were written on."""
        began = time.perf_counter()
        writings, past, order = self.active, self._past, self.order
        assert past is not None
        drafts = self._drafts(writings)
        blocks = [[writing.last, *draft.tokens] for writing, draft in zip(writings, drafts, strict=True)]
        prediction, past = self.model.read(blocks, past, self.wanted, order.allowed, pointers=order.pointers)
        real_BT = prediction.real.cpu()
        real = prediction[prediction.real]
        log_probs_NV, parts_NK = self.distributions(real)
        line, kept, neighbours = 0, [], []
        for number, (writing, draft) in enumerate(zip(writings, drafts, strict=True)):
            accepted = 0
            for place in range(len(draft.tokens) + 1):
                self._take(writing, real[line + place], log_probs_NV[line + place], parts_NK[line + place])
                if place == len(draft.tokens) or writing.finish_reason:
                    break
                same = writing.last == draft.tokens[place]
                writing.chances.saw(draft.kinds[place], same)
                if not same:
                    break
                accepted += 1
            writing.steps += 1
            writing.drafted += len(draft.tokens)
            writing.accepted += accepted
            writing.searches = past.searches[number]
            kept.append(accepted)
            neighbours.append(real.neighbours[line + accepted])
            line += int(real_BT[number].sum())
        past = past.crop([len(draft.tokens) - accepted for draft, accepted in zip(drafts, kept, strict=True)])
        self._past = replace(past, neighbours=_stacked(neighbours))
        self.costs.saw(real_BT.numel(), time.perf_counter() - began)
        self._time(writings, began)
        self._leave()
        return writings

    def stop(self, writing: Writing, reason: str) -> None:
        """End a text now, and take it out of the batch."""
        writing.finish_reason = reason
        self._leave()

    def _time(self, writings: Sequence[Writing], began: float) -> None:
        took = time.perf_counter() - began
        for writing in writings:
            writing.seconds += took

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Prediction, Past]:
        """The prediction after each prompt, [B], and the past."""
        past: Past | None = None
        last: list[Prediction | None] = [None] * len(prompts)
        for start in range(0, max(1, max(map(len, prompts))), BLOCK):
            parts = [prompt[start : start + BLOCK] for prompt in prompts]
            prediction, past = self.model.read(
                parts, past, self.wanted, self.order.allowed, pointers=self.order.pointers
            )
            for line, count in enumerate(prediction.real.sum(1).tolist()):
                if count:
                    last[line] = prediction[line, count - 1]
        assert past is not None
        return _gathered([one for one in last if one is not None]), past

    def distributions(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """The predictor's log-probabilities, [N, V], and each neighbour's part in the probability of its token, [N, K].

        A predictor without p_kNN takes nothing from single neighbours; theirs are the weights that p_kNN would have.
        """
        name = self.order.predictor
        log_probs_NV, weight_N = prediction.distribution(name)
        mix, similarity_NK = prediction.predictor.mixes[STATE_OF[name]], prediction.neighbours.similarity
        k = mix.k if name in MIXED else similarity_NK.shape[-1]
        parts_NK = torch.zeros_like(similarity_NK)
        parts_NK[:, :k] = neighbour_weights(similarity_NK[:, :k], mix.temperature)
        return log_probs_NV, parts_NK * weight_N[:, None] if name in MIXED else parts_NK

    def written(self, at: Prediction, log_probs_V: Tensor, parts_K: Tensor, token: int) -> Written:
        """The record of a token that was chosen from the prediction at one position."""
        log_prob = float(log_probs_V[token])
        hits = torch.nonzero(at.tokens == token)[:, 0]
        parts, found = parts_K[hits], at.neighbours[hits]
        mixed = self.order.predictor in MIXED
        share = (parts.double() / math.exp(log_prob)).float() if mixed else torch.zeros_like(parts)
        voters = Voters(found.positions.cpu(), found.similarity.cpu(), parts.cpu(), share.cpu())
        return Written(token, log_prob, at.states["base"], voters)

    def _take(self, writing: Writing, at: Prediction, log_probs_V: Tensor, parts_K: Tensor) -> None:
        """Choose the next token of a text from the prediction at one position."""
        order, lm = self.order, self.model.lm
        place = len(writing.tokens)
        seen = torch.tensor([*writing.prompt, *writing.ids], dtype=torch.long) if _needs_history(order) else NOTHING
        token = order.sampling.choose(log_probs_V, seen.to(log_probs_V.device), writing.sample, place)
        writing.tokens.append(self.written(at, log_probs_V, parts_K, token))
        if token in lm.end_tokens:
            writing.finish_reason = "stop"
            return
        writing.stream.add(token)
        if writing.stream.stopped:
            writing.finish_reason = "stop"
        elif len(writing.tokens) >= order.max_tokens:
            writing.finish_reason = "length"

    def _drafts(self, writings: Sequence[Writing]) -> list[Draft]:
        """A draft for every text, all cut to the length that promises most."""
        if self.drafter is None:
            return [Draft()] * len(writings)
        drafts = []
        for writing in writings:
            room = min(LONGEST, self.order.max_tokens - len(writing.tokens) - 1)
            voters = writing.tokens[-1].voters
            draft = self.drafter.draft(
                [*writing.prompt, *writing.ids], voters.positions, voters.weight, writing.chances
            )
            drafts.append(Draft(draft.tokens[:room], draft.kinds[:room]))
        count = best_length(
            [writing.chances.expected(draft) for writing, draft in zip(writings, drafts, strict=True)], self.costs
        )
        return [Draft(draft.tokens[:count], draft.kinds[:count]) for draft in drafts]

    def _leave(self) -> None:
        """Finished texts leave the batch."""
        going_on = [number for number, writing in enumerate(self.active) if writing.finish_reason is None]
        if len(going_on) < len(self.active) and self._past is not None:
            self.active = [self.active[number] for number in going_on]
            self._past = self._past.select(going_on) if going_on else None


NOTHING = torch.empty(0, dtype=torch.long)


def _needs_history(order: Order) -> bool:
    return order.sampling.repetition_penalty != 1.0


def _stacked(rows: Sequence[Neighbours]) -> Neighbours:
    return Neighbours(torch.stack([row.positions for row in rows]), torch.stack([row.similarity for row in rows]))


def _gathered(rows: Sequence[Prediction]) -> Prediction:
    """Predictions at single positions as one, [B]."""
    first = rows[0]
    states = {name: torch.stack([row.states[name] for row in rows]) for name in first.states}
    k = max(row.neighbours.k for row in rows)
    return replace(
        first,
        states=states,
        neighbours=_stacked([row.neighbours.padded(k) for row in rows]),
        tokens=torch.stack(
            [torch.nn.functional.pad(row.tokens, (0, k - row.tokens.shape[-1]), value=-1) for row in rows]
        ),
        real=torch.stack([row.real for row in rows]),
        read=torch.stack([row.read for row in rows]),
    )
