"""Fine-tuning a pretrained model on the corpus it will look up: all weights, or LoRA.

A model that has read the whole store has memorised it: its train states predict train text far better than anything
can do on text it has not read, and a graph network trained on them learns to do nothing. The network learns on text
that the model has not read: on train documents kept from it, or on the states that the model had of every document
when it first read it, which training computes anyway.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import FinetuneConfig, LMConfig
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.encode import round_states
from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.hf import HFModel
from gnnlm.lm.pretrained import save_hf
from gnnlm.train.data import Pieces
from gnnlm.train.fit import Log, fit, fit_facts, plan_of
from gnnlm.train.lm import LMTask, adam, documents, finish_lm, hf_losses, valid_batches

UNREAD_STATES, UNREAD_POSITIONS = "unread.states.npy", "unread.positions.npy"


def unread_documents(stream: Stream, share: float, seed: int) -> set[int]:
    """The numbers of the train documents that fine-tuning does not read: about this share of the tokens."""
    count = len(stream.starts) - 1
    if share == 0:
        return set()
    if count < 2:
        raise ConfigError("lm.finetune.held_out needs at least two train documents; set it to 0, or give more")
    order = sorted(range(count), key=lambda n: hashlib.sha256(f"{seed}:unread:{n}".encode()).digest())
    lengths = (stream.starts[1:] - stream.starts[:-1]).tolist()
    wanted, taken, unread = share * sum(lengths), 0, set[int]()
    for number in order[: count - 1]:
        if unread and taken + lengths[number] / 2 > wanted:
            break
        unread.add(number)
        taken += lengths[number]
    return unread


class FirstReadings:
    """States of train positions as the model had them when it first read them, before it learned from them.

    A file of all positions; those that were not kept are zero. Steps write where they read, so a step that is made
    again after a crash writes the same again.
    """

    def __init__(self, folder: Path, rows: int, model: Any, pieces: Pieces, settle: float) -> None:
        output: nn.Linear = model.get_output_embeddings()
        self._model, self._output, self._pieces = model, output, pieces
        self._drops_out = drops_out(model)
        self._kept = range(int(settle * pieces.batches_in(0)), pieces.batches_in(0))
        path = folder / UNREAD_STATES
        self._states: Any = (
            np.lib.format.open_memmap(path, "r+")
            if path.exists()
            else np.lib.format.open_memmap(path, "w+", np.float16, (rows, output.in_features))
        )

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Keep what the softmax is given while a batch is read."""
        if number not in self._kept:
            yield
            return
        seen: list[Tensor] = []
        hook = self._output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        try:
            if self._drops_out:  # what it learns from is not what it would be asked with: read once more
                self._read(number)
                hook.remove()
            yield
        finally:
            hook.remove()
        states = round_states(seen[0].float().cpu().numpy(), "fp16")
        for line, (begin, end) in enumerate(self._pieces.bounds(number).tolist()):
            self._states[begin:end] = states[line, : end - begin]

    @torch.no_grad()
    def _read(self, number: int) -> None:
        self._model.eval()
        self._model(input_ids=self._pieces(number)[0].to(self._output.weight.device), use_cache=False)
        self._model.train()

    def finish(self, batches: int) -> npt.NDArray[np.int64]:
        """The positions that were kept in so many batches, in order."""
        self._states.flush()
        bounds = [self._pieces.bounds(number) for number in self._kept if number < batches]
        if not bounds:
            raise ConfigError("lm.finetune.settle leaves nothing for the GNN to learn on; lower it")
        return np.sort(np.concatenate([np.arange(begin, end) for begin, end in np.concatenate(bounds).tolist()]))


def drops_out(model: Any) -> bool:
    """Whether a transformers model computes something else while it learns."""
    settings = model.config.to_dict().items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings)


def with_lora(model: Any, config: FinetuneConfig) -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError("lm.finetune.kind lora needs pip install 'gnnlm[lora]'") from None
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return peft.get_peft_model(model, lora)


def finetune_hf(
    draft: Draft,
    lm: HFModel,
    streams: dict[str, Stream],
    config: LMConfig,
    seed: int,
    log: Log = lambda name, value, step: None,
) -> Artifact:
    """Fine-tune a transformers model; the artifact is a directory that transformers reads."""
    fitting = config.finetune
    stream, first = streams["train"], fitting.unread == "first-reading"
    unread = set[int]() if first else unread_documents(stream, fitting.held_out, seed)
    read = documents(stream, unread)
    batches = Pieces(stream.tokens, read, lm.start_token, True, fitting.block, fitting.batch_tokens, seed)
    valid, count = valid_batches(streams["valid"], lm.start_token, True, False, fitting, None)
    model = lm.model.requires_grad_(True)
    if fitting.kind == "lora":
        model = with_lora(model.requires_grad_(False), fitting)

    def save(folder: Path) -> None:
        save_hf(copy.deepcopy(model).merge_and_unload() if fitting.kind == "lora" else model, lm.tokenizer, folder)

    steps = max(1, math.ceil(fitting.epochs * batches.batches_in(0) / fitting.accumulate))
    task = LMTask(model, batches, valid, hf_losses, fitting.accumulate, count, save)
    if first:
        readings = FirstReadings(draft.folder, len(stream), model, batches, fitting.settle)
        task.around = readings.reading
    plan = plan_of(fitting, steps, "finetune", "lm.finetune")
    tokens = round(fitting.epochs * batches.tokens / steps)
    trained = [p for p in model.parameters() if p.requires_grad]
    best = fit(draft, task, adam(trained, fitting), plan, tokens, seed, config.device == "cpu", log)
    facts = {
        **fit_facts(draft, plan, model),
        "trained": sum(p.numel() for p in trained),
        "kind": fitting.kind,
        "unread": sorted(unread),
        "read_tokens": batches.tokens,
    }
    if not first:
        return finish_lm(draft, best, facts)
    positions = readings.finish(facts["steps_done"] * fitting.accumulate)
    draft.save(UNREAD_POSITIONS, positions)
    facts["first_reading"] = {"positions": UNREAD_POSITIONS, "states": UNREAD_STATES, "count": len(positions)}
    return finish_lm(draft, best, facts, (UNREAD_STATES, UNREAD_POSITIONS))
