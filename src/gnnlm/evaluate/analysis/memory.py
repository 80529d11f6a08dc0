"""The largest number of bytes that tensors took at once during some work, beyond those that were there before."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.predictor import Predictor

MEASURED = 512  # tokens whose memory is measured


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """Run some work and return the peak of the memory that torch allocated for it.

    Every allocation is counted, so the figure does not depend on the machine's other work. Pages of memory-mapped files
    are left out.

    >>> peak_bytes(lambda: torch.zeros(1000) + torch.zeros(1000))
    12000
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def network_bytes(subject: Subject, predictor: Predictor) -> int:
    """The peak while some test tokens pass through the network; the states of their windows are loaded before."""
    positions = torch.arange(min(MEASURED, len(subject.test.text)))[None]
    context = subject.test.context(positions)
    near = subject.test.table.at(positions, predictor.graph_k)
    return peak_bytes(lambda: predictor.step(context, near, ("gnn",)), str(predictor.head.device))


@torch.inference_mode()
def base_bytes(subject: Subject) -> int:
    """The peak while the base model reads as many tokens."""
    lm = subject.snapshot.lm
    tokens = torch.from_numpy(subject.snapshot.streams["test"].text()[:MEASURED])
    window = min(subject.config.lm.window, len(tokens))
    tokens_BT = tokens[: len(tokens) // window * window].view(-1, window)
    return peak_bytes(lambda: lm.encode(tokens_BT), str(lm.head.device))
