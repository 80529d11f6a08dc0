"""Fine-tuning a pretrained model on the corpus it will look up: all weights, or LoRA.

A model that was trained on the whole store has memorised it: its states predict the training text far better than
any other text, and a graph network trained on such states learns to do nothing. The network is therefore trained on
text that the model had not been trained on: on train documents held out from fine-tuning, or on the states that the
model computed when it first read each document, which fine-tuning computes anyway.
"""

from __future__ import annotations

import copy
import hashlib
import math
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact
from gnnlm.config import FinetuneConfig
from gnnlm.corpus.stream import Stream
from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.hf_loading import save_hf
from gnnlm.lm.hf_model import HFModel
from gnnlm.train.batches import StartToken, TextPieces
from gnnlm.train.first_readings import UNREAD_POSITIONS, UNREAD_STATES, FirstReadings
from gnnlm.train.schedule import TrainingPlan
from gnnlm.train.train_lm import LMTask, adam, documents, hf_losses, valid_text
from gnnlm.train.training_loop import TrainingSetup, finish, fit


def unread_documents(stream: Stream, share: float, seed: int) -> set[int]:
    """Return the numbers of train documents that fine-tuning does not read, with about this share of the tokens."""
    count = len(stream.starts) - 1
    if share == 0:
        return set()
    if count < 2:
        raise ConfigError(
            f"lm.finetune.held_out needs at least two train documents (got {count}); set it to 0, or add documents"
        )
    order = sorted(range(count), key=lambda n: hashlib.sha256(f"{seed}:unread:{n}".encode()).digest())
    lengths = (stream.starts[1:] - stream.starts[:-1]).tolist()
    wanted = share * sum(lengths)
    taken = 0
    unread = set[int]()
    for number in order[: count - 1]:
        if unread and taken + lengths[number] / 2 > wanted:
            break
        unread.add(number)
        taken += lengths[number]
    return unread


def with_lora(model: Any, config: FinetuneConfig) -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError("lm.finetune.kind lora needs peft; install it: pip install 'gnnlm[lora]'") from None
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return peft.get_peft_model(model, lora)


def finetune_hf(setup: TrainingSetup, lm: HFModel, streams: dict[str, Stream], config: FinetuneConfig) -> Artifact:
    """Fine-tune a transformers model; the artifact is a directory that transformers reads."""
    draft, stream = setup.draft, streams["train"]
    start = StartToken(lm.start_token, always=True)
    first = config.unread == "first-reading"
    unread = set[int]() if first else unread_documents(stream, config.held_out, setup.seed)
    batches = TextPieces(stream.tokens, documents(stream, unread), start, config.block, config.batch_tokens, setup.seed)
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
        task.readings = readings
    steps = max(1, math.ceil(config.epochs * batches.batches_in(0) / config.accumulate))
    plan = TrainingPlan(
        config=config,
        steps=steps,
        schedule=config.schedule,
        tokens=round(config.epochs * batches.tokens / steps),
        label="finetune",
        section="lm.finetune",
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    record = fit(setup, task, adam(trained, config), plan)
    facts = {
        "trained": sum(p.numel() for p in trained),
        "kind": config.kind,
        "unread": sorted(unread),
        "read_tokens": batches.tokens,
    }
    if not first or not setup.processes.first:
        return finish(setup, task, plan, record, facts)
    positions = readings.finish(record.checkpoint * config.accumulate)
    draft.save(UNREAD_POSITIONS, positions)
    facts["first_reading"] = {"positions": UNREAD_POSITIONS, "states": UNREAD_STATES, "count": len(positions)}
    return finish(setup, task, plan, record, facts, (UNREAD_STATES, UNREAD_POSITIONS))
