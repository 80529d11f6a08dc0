"""The loop that writes: read the token chosen last and a draft of what may follow; keep what the model chooses too.

Texts join and leave between two steps. What is written of a text does not depend on the texts beside it.

Shapes: B texts, T tokens of a step, N positions, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gnnlm.predict.open_book import BLOCK, OpenBook, Past
from gnnlm.predict.predictor import Prediction
from gnnlm.write.detokenizer import Detokenizer
from gnnlm.write.drafter import LONGEST, Drafter, TokenDraft, best_length
from gnnlm.write.next_token import NextTokens, likeliest
from gnnlm.write.sampling import choose_token
from gnnlm.write.text_state import ScoredToken, TextSettings, TextState

PROMPT_TOKENS = 1024  # tokens of prompts that are read between two steps, so that texts in progress do not wait long
SCORED_AT_ONCE = 64  # positions whose distributions over the vocabulary are held at once


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read, and the texts that will continue it."""

    tokens: list[int]
    texts: list[TextState]
    read: int = 0
    searches: int = 0
    past: Past | None = None

    @property
    def settings(self) -> TextSettings:
        return self.texts[0].settings


class Writer:
    """Writes texts with one predictor, a step at a time: new texts join the batch, finished ones leave it."""

    def __init__(self, model: OpenBook, predictor: str, drafter: Drafter) -> None:
        model.predictor.check((predictor,))
        self.model = model
        self.predictor = predictor
        self.wanted = tuple(dict.fromkeys(("base", predictor)))  # base costs nothing but keeping its state
        self.searching = model.predictor.neighbours_needed(self.wanted) > 0
        self.drafter = drafter
        self.costs = drafter.costs[predictor]
        self.prompts: list[Prompt] = []  # not read yet; the first comes next
        self.active: list[TextState] = []
        self._past: Past | None = None

    @property
    def busy(self) -> bool:
        return bool(self.prompts or self.active)

    def add(self, prompt: Sequence[int], settings: TextSettings, n: int = 1) -> list[TextState]:
        """Add n texts that continue a prompt; the next steps read the prompt, and then write."""
        assert settings.predictor == self.predictor
        self.model.check_tokens([prompt])
        texts = [
            TextState(list(prompt), settings, sample, Detokenizer(self.model.lm, prompt, settings.options.stop))
            for sample in range(n)
        ]
        self.prompts.append(Prompt(list(prompt), texts))
        return texts

    def step(self) -> list[TextState]:
        """Read on in the prompts and write one or more tokens of every text; return the texts that have new tokens."""
        active_before = bool(self.active)
        changed = self._read_prompts() if self.prompts else []
        if active_before and self.active:
            changed += self._write()
        return list(dict.fromkeys(changed))

    def stop(self, text: TextState, reason: str) -> None:
        """End a text now, and take it out of the batch."""
        text.finish_reason = reason
        for prompt in self.prompts:
            prompt.texts = [one for one in prompt.texts if one is not text]
        self.prompts = [prompt for prompt in self.prompts if prompt.texts]
        self._drop_finished()

    # -- prompts -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _read_prompts(self) -> list[TextState]:
        """Read a block of the first prompts; prompts read to their end join the batch with their first token.

        The others move to the end of the queue, so that a long prompt does not delay a short one.
        """
        began = time.perf_counter()
        chosen = [self.prompts[0]]
        total = 0
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
        seconds = time.perf_counter() - began
        for prompt in chosen:
            for text in prompt.texts:
                text.seconds += seconds
        self._drop_finished()
        return begun

    def _read_block(self, prompts: Sequence[Prompt]) -> list[TextState]:
        """Read a block of prompts that are all new or all begun; return the texts that now have a first token."""
        blocks = [prompt.tokens[prompt.read : prompt.read + BLOCK] for prompt in prompts]
        pasts = [prompt.past for prompt in prompts if prompt.past is not None]
        prediction, past = self._read(blocks, joined(pasts), [prompt.settings for prompt in prompts])
        counts = prediction.real.sum(1).tolist()
        complete = []
        for line, (prompt, block) in enumerate(zip(prompts, blocks, strict=True)):
            if prompt.settings.scored:
                self._score(prompt, prediction[line, : counts[line]])
            prompt.read += len(block)
            prompt.searches += counts[line] * self.searching
            if prompt.read == len(prompt.tokens):
                complete.append(line)
                prompt.past = None
            else:
                prompt.past = past.select([line])
        if not complete:
            return []
        last = prediction[torch.tensor(complete), torch.tensor([counts[line] - 1 for line in complete])]
        next_tokens = NextTokens.of(last, self.predictor)
        rows = []
        begun = []
        for position, line in enumerate(complete):
            for text in prompts[line].texts:
                text.searches = prompts[line].searches
                if text.settings.max_tokens:
                    self._append(text, next_tokens, position)
                else:
                    text.finish_reason = "length"
                rows.append(line)
                begun.append(text)
        if rows != list(range(len(prompts))):
            past = past.select(rows)
        self._past = past if self._past is None else self._past.join([past])
        self.active += begun
        return begun

    def _score(self, prompt: Prompt, prediction: Prediction) -> None:
        """Record the prompt's tokens that are predicted at these positions, [T]."""
        first = prompt.read + (prompt.past is not None)  # at the beginning of a text, its first token is predicted too
        targets = prompt.tokens[first : first + len(prediction.real)]
        for start in range(0, len(targets), SCORED_AT_ONCE):
            some = targets[start : start + SCORED_AT_ONCE]
            log_probs_NV = prediction[start : start + len(some)].distribution(self.predictor).log_probs_NV
            scored = [
                ScoredToken(token, float(log_probs_V[token]), likeliest(log_probs_V, prompt.settings.top))
                for token, log_probs_V in zip(some, log_probs_NV, strict=True)
            ]
            for text in prompt.texts:
                text.scored += scored

    # -- steps ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _write(self) -> list[TextState]:
        """Write one or more tokens of every text in the batch."""
        began = time.perf_counter()
        texts = self.active
        drafts = self._drafts(texts)
        blocks = [[text.last, *draft.tokens] for text, draft in zip(texts, drafts, strict=True)]
        prediction, past = self._read(blocks, self._past, [text.settings for text in texts])
        next_tokens = NextTokens.of(prediction[prediction.real], self.predictor)
        first = 0
        unused = []
        for text, draft in zip(texts, drafts, strict=True):
            accepted = self._accept(text, draft, next_tokens, first)
            text.steps += 1
            text.drafted += len(draft.tokens)
            text.accepted += accepted
            text.searches += (1 + len(draft.tokens)) * self.searching
            unused.append(len(draft.tokens) - accepted)
            first += 1 + len(draft.tokens)
        self._past = past.crop(unused)
        seconds = time.perf_counter() - began
        self.costs.saw(prediction.real.numel(), seconds)
        for text in texts:
            text.seconds += seconds
        self._drop_finished()
        return texts

    def _accept(self, text: TextState, draft: TokenDraft, next_tokens: NextTokens, first: int) -> int:
        """Write a token, and as many more as the draft has right; return the number of draft tokens accepted."""
        self._append(text, next_tokens, first)
        for place, drafted in enumerate(draft.tokens):
            if text.finish_reason:
                return place
            same = text.last == drafted
            text.chances.saw(draft.kinds[place], same)
            if not same:
                return place
            self._append(text, next_tokens, first + place + 1)
        return len(draft.tokens)

    def _append(self, text: TextState, next_tokens: NextTokens, position: int) -> None:
        """Choose the next token of a text at one position."""
        settings = text.settings
        log_probs_V = next_tokens.log_probs_NV[position]
        history = [*text.prompt, *text.ids] if settings.options.repetition_penalty != 1.0 else []
        seen = torch.tensor(history, dtype=torch.long, device=log_probs_V.device)
        token = choose_token(settings.options, log_probs_V, seen, text.sample, len(text.tokens))
        text.tokens.append(next_tokens.record(position, token, settings.top))
        if token in self.model.lm.end_tokens:
            text.finish_reason = "stop"
            return
        text.detokenizer.add(token)
        if text.detokenizer.stopped:
            text.finish_reason = "stop"
        elif len(text.tokens) >= settings.max_tokens:
            text.finish_reason = "length"

    def _drafts(self, texts: Sequence[TextState]) -> list[TokenDraft]:
        """Return a draft for every text, empty for texts without drafts, all cut to the most promising length."""
        drafts = []
        for text in texts:
            draft = TokenDraft()
            if text.settings.options.draft:
                voters = text.tokens[-1].voters
                draft = self.drafter.draft([*text.prompt, *text.ids], voters.positions, voters.weight, text.chances)
            drafts.append(draft.cut(min(LONGEST, text.settings.max_tokens - len(text.tokens) - 1)))
        expected = [text.chances.expected(draft) for text, draft in zip(texts, drafts, strict=True)]
        length = best_length(expected, self.costs)
        return [draft.cut(length) for draft in drafts]

    def _read(
        self, tokens: Sequence[Sequence[int]], past: Past | None, settings: Sequence[TextSettings]
    ) -> tuple[Prediction, Past]:
        """Read on, each text with its settings."""
        filters = [one.allowed for one in settings]
        own_past = [one.options.own_past for one in settings]
        return self.model.read(tokens, past, self.wanted, filters, own_past=own_past)

    def _drop_finished(self) -> None:
        """Take finished texts out of the batch."""
        unfinished = [number for number, text in enumerate(self.active) if text.finish_reason is None]
        if len(unfinished) < len(self.active) and self._past is not None:
            self.active = [self.active[number] for number in unfinished]
            self._past = self._past.select(unfinished) if unfinished else None


def joined(pasts: Sequence[Past]) -> Past | None:
    """Return the pasts as one; None if there are none."""
    if not pasts:
        return None
    return pasts[0].join(pasts[1:]) if len(pasts) > 1 else pasts[0]
