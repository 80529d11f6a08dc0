"""Beam search: the texts with the highest mean log-probability, as transformers searches for them.

Shapes: M beams, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gnnlm.predict.open_book import BLOCK, Past
from gnnlm.predict.predictor import Prediction
from gnnlm.write.batch_loop import Writer
from gnnlm.write.detokenizer import TextStream
from gnnlm.write.text_state import Order, Writing, Written


@torch.inference_mode()
def search_beams(writer: Writer, order: Order, prompt: Sequence[int], beams: int, n: int) -> list[Writing]:
    """The n best continuations of a prompt, best first.

    In each step every beam is extended by every token, and the best are kept. A beam that ends is finished, with its
    mean log-probability. The search ends when there are as many finished texts as beams, and no open beam is better.
    """
    began = time.perf_counter()
    prediction, past = _prefill(writer, order, prompt)
    searches = past.searches[0]
    past = past.select([0] * beams)
    prediction = prediction[[0] * beams]
    written: list[list[Written]] = [[] for _ in range(beams)]
    totals_M = torch.tensor([0.0] + [-math.inf] * (beams - 1))  # the first step extends one beam only
    finished: list[tuple[float, list[Written], str]] = []
    steps = 0
    while True:
        log_probs_MV, parts_MK = writer.distributions(prediction)
        vocab = log_probs_MV.shape[1]
        scores = (totals_M[:, None].to(log_probs_MV) + log_probs_MV).flatten()
        best = scores.topk(min(2 * beams, len(scores)))
        going_on: list[tuple[float, int, list[Written]]] = []
        for rank, (total, flat) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            if total == -math.inf:
                continue
            beam, token = divmod(flat, vocab)
            line = [*written[beam], writer.written(prediction[beam], log_probs_MV[beam], parts_MK[beam], token)]
            ends = _ends(writer, order, prompt, line)
            if ends:
                if rank < beams:
                    finished.append((total / len(line), line, "stop"))
            elif len(going_on) < beams:
                going_on.append((total, beam, line))
        finished = sorted(finished, key=lambda one: -one[0])[:beams]
        length = len(written[0]) + 1
        if not going_on or length >= order.max_tokens:
            finished += [(total / length, line, "length") for total, _, line in going_on]
            break
        if len(finished) == beams and finished[-1][0] >= going_on[0][0] / length:
            break
        rows = [beam for _, beam, _ in going_on]
        written = [line for _, _, line in going_on]
        totals_M = torch.tensor([total for total, _, _ in going_on])
        before = past.select(rows)
        read, past = writer.read([[line[-1].id] for line in written], before, [order] * len(written))
        prediction = read[:, 0]
        steps += 1
        searches += sum(past.searches) - sum(before.searches)
    chosen = sorted(finished, key=lambda one: -one[0])[:n]
    took = time.perf_counter() - began
    out = []
    for _, line, reason in chosen:
        stream = _streamed(writer, order, prompt, line)
        writing = Writing(list(prompt), order, 0, stream, line, finish_reason=reason, steps=steps)
        out.append(replace(writing, searches=searches, seconds=took))
    return out


def _prefill(writer: Writer, order: Order, prompt: Sequence[int]) -> tuple[Prediction, Past]:
    """The prediction after the prompt, [1], and the past."""
    past: Past | None = None
    for start in range(0, max(1, len(prompt)), BLOCK):
        prediction, past = writer.read([prompt[start : start + BLOCK]], past, [order])
    assert past is not None
    return prediction[:, -1], past


def _streamed(writer: Writer, order: Order, prompt: Sequence[int], line: Sequence[Written]) -> TextStream:
    stream = TextStream(writer.model.lm, prompt, order.stop)
    for token in line:
        if token.id in writer.model.lm.end_tokens:
            break
        stream.add(token.id)
    return stream


def _ends(writer: Writer, order: Order, prompt: Sequence[int], line: Sequence[Written]) -> bool:
    if line[-1].id in writer.model.lm.end_tokens:
        return True
    return bool(order.stop) and _streamed(writer, order, prompt, line).stopped
