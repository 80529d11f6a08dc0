"""Fine-tuning a pretrained model on the corpus it will look up: all weights, or LoRA.

A model that was trained on the whole store has memorised it: its states predict the training text far better than
they predict any other text, and a graph network trained on them learns to do nothing. The network is therefore trained
on text that the model has not been trained on: on train documents held out from fine-tuning, or on the states that the
model computed for each document when it first read it, which fine-tuning computes anyway.
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

from gnnlm.artifact import Artifact
from gnnlm.config import FinetuneConfig
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.encode import round_states
from gnnlm.errors import ConfigError, ModelError, TrainingError
from gnnlm.lm.hf import HFModel
from gnnlm.lm.pretrained import save_hf
from gnnlm.train.data import Pieces, Start
from gnnlm.train.fit import Fitting, fit
from gnnlm.train.lm import LMTask, adam, documents, finish_lm, hf_losses, valid_text
from gnnlm.train.schedule import Plan

UNREAD_STATES, UNREAD_POSITIONS = "unread.states.npy", "unread.positions.npy"


def unread_documents(stream: Stream, share: float, seed: int) -> set[int]:
    """The numbers of the train documents that fine-tuning does not read: about this share of the tokens."""
    count = len(stream.starts) - 1
    if share == 0:
        return set()
    if count < 2:
        raise ConfigError(
            f"lm.finetune.held_out needs at least two train documents (got {count}); set it to 0, or add documents"
        )
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
    """The states of train positions when the model first read them, before it learned from them.

    The file has all positions; those that were not kept are zero. A step writes to the positions it reads, so a step
    that is repeated after a crash writes the same states again.
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
        """Keep the input of the softmax while a batch is read."""
        if number not in self._kept:
            yield
            return
        seen: list[Tensor] = []
        hook = self._output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        try:
            if self._drops_out:  # states under dropout are not those of prediction: read again without it
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
        """The positions kept in the first `batches` batches, in order."""
        self._states.flush()
        bounds = [self._pieces.bounds(number) for number in self._kept if number < batches]
        if not bounds:
            raise TrainingError(
                f"fine-tuning stopped after batch {batches}, but lm.finetune.settle keeps states for the GNN only from "
                f"batch {self._kept.start + 1} on; train longer, or lower lm.finetune.settle"
            )
        return np.sort(np.concatenate([np.arange(begin, end) for begin, end in np.concatenate(bounds).tolist()]))


def drops_out(model: Any) -> bool:
    """Whether a transformers model uses dropout."""
    settings = model.config.to_dict().items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings)


def with_lora(model: Any, config: FinetuneConfig) -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError("lm.finetune.kind lora needs peft; install it: pip install 'gnnlm[lora]'") from None
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return peft.get_peft_model(model, lora)


def finetune_hf(fitting: Fitting, lm: HFModel, streams: dict[str, Stream], config: FinetuneConfig) -> Artifact:
    """Fine-tune a transformers model; the artifact is a directory that transformers reads."""
    draft, seed, start = fitting.draft, fitting.seed, Start(lm.start_token, always=True)
    stream, first = streams["train"], config.unread == "first-reading"
    unread = set[int]() if first else unread_documents(stream, config.held_out, seed)
    batches = Pieces(stream.tokens, documents(stream, unread), start, config.block, config.batch_tokens, seed)
    model = lm.model.requires_grad_(True)
    if config.kind == "lora":
        model = with_lora(model.requires_grad_(False), config)

    def save(folder: Path) -> None:
        save_hf(copy.deepcopy(model).merge_and_unload() if config.kind == "lora" else model, lm.tokenizer, folder)

    task = LMTask(
        model=model,
        batches=batches,
        valid=valid_text(streams["valid"], start, config),
        losses=hf_losses,
        accumulate=config.accumulate,
        save_to=save,
    )
    if first:
        readings = FirstReadings(draft.file(UNREAD_STATES).parent, len(stream), model, batches, config.settle)
        task.around = readings.reading
    steps = max(1, math.ceil(config.epochs * batches.batches_in(0) / config.accumulate))
    plan = Plan(
        config=config,
        steps=steps,
        schedule=config.schedule,
        tokens=round(config.epochs * batches.tokens / steps),
        label="finetune",
        section="lm.finetune",
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    fitted = fit(fitting, task, adam(trained, config), plan)
    facts = {
        "trained": sum(p.numel() for p in trained),
        "kind": config.kind,
        "unread": sorted(unread),
        "read_tokens": batches.tokens,
    }
    if not first:
        return finish_lm(fitting, fitted, facts)
    positions = readings.finish(fitted.facts["steps_done"] * config.accumulate)
    draft.save(UNREAD_POSITIONS, positions)
    facts["first_reading"] = {"positions": UNREAD_POSITIONS, "states": UNREAD_STATES, "count": len(positions)}
    return finish_lm(fitting, fitted, facts, (UNREAD_STATES, UNREAD_POSITIONS))
