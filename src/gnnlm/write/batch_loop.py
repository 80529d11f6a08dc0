"""The loop that writes: read what was chosen and a draft of what may follow, keep what the model chooses too.

Texts join and leave between two steps. Nothing that is written depends on which texts are written beside it.

Shapes: B texts, T tokens of a step, N positions, K neighbours, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnlm.predict.open_book import BLOCK, OpenBook, Past
from gnnlm.predict.predictor import MIXED, Prediction
from gnnlm.write.detokenizer import Detokenizer
from gnnlm.write.drafter import LONGEST, Drafter, TokenDraft, best_length
from gnnlm.write.sampling import choose_token
from gnnlm.write.text_state import ScoredToken, TextSettings, TextState, Voters, WrittenToken

PROMPT_TOKENS = 1024  # tokens of prompts that are read between two steps, so that texts in progress do not wait long
SCORED_AT_ONCE = 64  # positions whose distributions over the vocabulary are held at once


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read, and the texts that will go on from it."""

    tokens: list[int]
    texts: list[TextState]
    read: int = 0
    searches: int = 0
    past: Past | None = None

    @property
    def settings(self) -> TextSettings:
        return self.texts[0].settings


class Writer:
    """Writes texts with one predictor, a step at a time: new ones join the batch, finished ones leave it."""

    def __init__(self, model: OpenBook, predictor: str, drafter: Drafter) -> None:
        model.predictor.check((predictor,))
        self.model = model
        self.predictor = predictor
        self.drafter = drafter
        self.costs = drafter.costs[predictor]
        self.prompts: list[Prompt] = []  # that are not read yet; the first comes next
        self.active: list[TextState] = []
        self._past: Past | None = None
        self.wanted = tuple(dict.fromkeys(("base", predictor)))  # base costs nothing but keeping its state

    @property
    def busy(self) -> bool:
        return bool(self.prompts or self.active)

    def add(self, prompt: Sequence[int], settings: TextSettings, n: int = 1) -> list[TextState]:
        """Take on n texts that go on from a prompt; the next steps read it, and then write."""
        assert settings.predictor == self.predictor
        self.model.check_tokens([prompt])
        texts = [
            TextState(list(prompt), settings, sample, Detokenizer(self.model.lm, prompt, settings.options.stop))
            for sample in range(n)
        ]
        self.prompts.append(Prompt(list(prompt), texts))
        return texts

    def step(self) -> list[TextState]:
        """Read on in the prompts, and write one or more tokens of every text; the texts that were written on."""
        going = bool(self.active)
        begun = self._read_prompts() if self.prompts else []
        return list(dict.fromkeys([*begun, *(self._write() if going and self.active else [])]))

    def stop(self, text: TextState, reason: str) -> None:
        """End a text now, and take it out of the batch."""
        text.finish_reason = reason
        for prompt in self.prompts:
            prompt.texts = [one for one in prompt.texts if one is not text]
        self.prompts = [prompt for prompt in self.prompts if prompt.texts]
        self._leave()

    # -- prompts -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _read_prompts(self) -> list[TextState]:
        """Read a block of the first prompts; those read whole join the batch with their first token.

        The others go to the end of the line: a long prompt delays no short one.
        """
        began = time.perf_counter()
        chosen, total = [self.prompts[0]], 0
        for prompt in self.prompts[1:]:
            total += min(BLOCK, len(chosen[-1].tokens) - chosen[-1].read)
            if total >= PROMPT_TOKENS:
                break
            chosen.append(prompt)
        self.prompts = self.prompts[len(chosen) :]
        begun: list[TextState] = []
        for fresh in (True, False):
            some = [prompt for prompt in chosen if (prompt.past is None) == fresh]
            if some:
                begun += self._read_block(some)
        self.prompts += [prompt for prompt in chosen if prompt.read < len(prompt.tokens)]
        for text in (text for prompt in chosen for text in prompt.texts):
            text.seconds += time.perf_counter() - began
        self._leave()
        return begun

    def _read_block(self, prompts: Sequence[Prompt]) -> list[TextState]:
        """Read on in prompts, all from their beginning or all from a past; the texts that have begun."""
        parts = [prompt.tokens[prompt.read : prompt.read + BLOCK] for prompt in prompts]
        pasts = [prompt.past for prompt in prompts if prompt.past is not None]
        prediction, past = self.read(parts, joined(pasts), [prompt.settings for prompt in prompts])
        counts = prediction.real.sum(1).tolist()
        for line, (prompt, part) in enumerate(zip(prompts, parts, strict=True)):
            if prompt.settings.scored:
                self._score(prompt, prediction[line, : counts[line]])
            prompt.read += len(part)
            prompt.searches += self._searches(counts[line])
        whole = [line for line, prompt in enumerate(prompts) if prompt.read == len(prompt.tokens)]
        for line, prompt in enumerate(prompts):
            prompt.past = None if line in whole else past.select([line])
        if not whole:
            return []
        last = prediction[torch.tensor(whole), torch.tensor([counts[line] - 1 for line in whole])]
        log_probs_NV, parts_NK = self.distributions(last)
        rows, begun = [], []
        for place, line in enumerate(whole):
            for text in prompts[line].texts:
                text.searches = prompts[line].searches
                if text.settings.max_tokens:
                    self._take(text, last[place], log_probs_NV[place], parts_NK[place])
                else:
                    text.finish_reason = "length"
                rows.append(line)
                begun.append(text)
        past = past if rows == list(range(len(prompts))) else past.select(rows)
        self._past = joined([*([] if self._past is None else [self._past]), past])
        self.active += begun
        return begun

    def _searches(self, positions: int) -> int:
        """How many of the positions were looked up: all, or none if the predictor needs no neighbours."""
        return positions if self.model.predictor.neighbours_needed(self.wanted) else 0

    def _score(self, prompt: Prompt, prediction: Prediction) -> None:
        """Record the prompt's tokens that are predicted at these positions, [T]."""
        first = prompt.read + (prompt.past is not None)  # at the beginning of a text, its first token is predicted too
        targets = prompt.tokens[first : first + len(prediction.real)]
        for start in range(0, len(targets), SCORED_AT_ONCE):
            some = targets[start : start + SCORED_AT_ONCE]
            log_probs_NV = prediction[start : start + len(some)].distribution(self.predictor).log_probs_NV
            found_N = log_probs_NV.gather(1, torch.tensor(some, device=log_probs_NV.device)[:, None])[:, 0].tolist()
            tops = [top_of(line_V, prompt.settings.top) for line_V in log_probs_NV]
            records = [ScoredToken(*one) for one in zip(some, found_N, tops, strict=True)]
            for text in prompt.texts:
                text.scored += records

    # -- steps ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _write(self) -> list[TextState]:
        """Write one or more tokens of every text in the batch."""
        began = time.perf_counter()
        texts, past = self.active, self._past
        assert past is not None
        drafts = self._drafts(texts)
        blocks = [[text.last, *draft.tokens] for text, draft in zip(texts, drafts, strict=True)]
        prediction, past = self.read(blocks, past, [text.settings for text in texts])
        real = prediction[prediction.real]
        log_probs_NV, parts_NK = self.distributions(real)
        line, kept = 0, []
        for text, draft in zip(texts, drafts, strict=True):
            accepted = 0
            for place in range(len(draft.tokens) + 1):
                self._take(text, real[line + place], log_probs_NV[line + place], parts_NK[line + place])
                if place == len(draft.tokens) or text.finish_reason:
                    break
                same = text.last == draft.tokens[place]
                text.chances.saw(draft.kinds[place], same)
                if not same:
                    break
                accepted += 1
            text.steps += 1
            text.drafted += len(draft.tokens)
            text.accepted += accepted
            text.searches += self._searches(1 + len(draft.tokens))
            kept.append(accepted)
            line += 1 + len(draft.tokens)
        self._past = past.crop([len(draft.tokens) - accepted for draft, accepted in zip(drafts, kept, strict=True)])
        self.costs.saw(prediction.real.numel(), time.perf_counter() - began)
        for text in texts:
            text.seconds += time.perf_counter() - began
        self._leave()
        return texts

    def read(
        self, tokens: Sequence[Sequence[int]], past: Past | None, settings: Sequence[TextSettings]
    ) -> tuple[Prediction, Past]:
        """Read on, each text with its settings."""
        filters = [one.allowed for one in settings]
        return self.model.read(tokens, past, self.wanted, filters, own_past=[one.options.own_past for one in settings])

    def distributions(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """The predictor's log-probabilities, [N, V], and each neighbour's part in the probability of its token, [N, K].

        A predictor without p_kNN takes nothing from single neighbours; theirs are the weights that p_kNN would have.
        """
        found = prediction.distribution(self.predictor)
        weights_NK = found.neighbour_weights_NK
        if self.predictor in MIXED:
            weights_NK = weights_NK * found.knn_weight_N[:, None]
        beyond = prediction.tokens.shape[-1] - weights_NK.shape[-1]  # neighbours that p_kNN does not use
        return found.log_probs_NV, torch.nn.functional.pad(weights_NK, (0, beyond))

    def written(self, at: Prediction, log_probs_V: Tensor, parts_K: Tensor, token: int, top: int = 0) -> WrittenToken:
        """The record of a token that follows the prediction at one position."""
        log_prob = float(log_probs_V[token])
        hits = torch.nonzero(at.tokens == token)[:, 0]
        parts, found = parts_K[hits], at.neighbours[hits]
        mixed = self.predictor in MIXED and log_prob > -math.inf
        share = (parts.double() / math.exp(log_prob)).float() if mixed else torch.zeros_like(parts)
        voters = Voters(found.positions.cpu(), found.similarity.cpu(), parts.cpu(), share.cpu())
        return WrittenToken(token, log_prob, at.states["base"], voters, top_of(log_probs_V, top))

    def _take(self, text: TextState, at: Prediction, log_probs_V: Tensor, parts_K: Tensor) -> None:
        """Choose the next token of a text from the prediction at one position."""
        settings = text.settings
        place = len(text.tokens)
        history = [*text.prompt, *text.ids] if settings.options.repetition_penalty != 1.0 else []
        seen = torch.tensor(history, dtype=torch.long, device=log_probs_V.device)
        token = choose_token(settings.options, log_probs_V, seen, text.sample, place)
        text.tokens.append(self.written(at, log_probs_V, parts_K, token, settings.top))
        if token in self.model.lm.end_tokens:
            text.finish_reason = "stop"
            return
        text.detokenizer.add(token)
        if text.detokenizer.stopped:
            text.finish_reason = "stop"
        elif len(text.tokens) >= settings.max_tokens:
            text.finish_reason = "length"

    def _drafts(self, texts: Sequence[TextState]) -> list[TokenDraft]:
        """A draft for every text that may have one, all cut to the length that promises most."""
        drafts = []
        for text in texts:
            draft = TokenDraft()
            if text.settings.options.draft:
                voters = text.tokens[-1].voters
                draft = self.drafter.draft([*text.prompt, *text.ids], voters.positions, voters.weight, text.chances)
            room = min(LONGEST, text.settings.max_tokens - len(text.tokens) - 1)
            drafts.append(TokenDraft(draft.tokens[:room], draft.kinds[:room]))
        count = best_length(
            [text.chances.expected(draft) for text, draft in zip(texts, drafts, strict=True)], self.costs
        )
        return [TokenDraft(draft.tokens[:count], draft.kinds[:count]) for draft in drafts]

    def _leave(self) -> None:
        """Finished texts leave the batch."""
        going_on = [number for number, text in enumerate(self.active) if text.finish_reason is None]
        if len(going_on) < len(self.active) and self._past is not None:
            self.active = [self.active[number] for number in going_on]
            self._past = self._past.select(going_on) if going_on else None


def top_of(log_probs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens and their log-probabilities, likeliest first.

    >>> top_of(torch.tensor([-3.0, -1.0, -2.0]), 2)
    ((1, -1.0), (2, -2.0))
    """
    if not count:
        return ()
    best = log_probs_V.topk(min(count, len(log_probs_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def joined(pasts: Sequence[Past]) -> Past | None:
    """The pasts as one; None if there are none."""
    return pasts[0].join(pasts[1:]) if len(pasts) > 1 else pasts[0] if pasts else None
