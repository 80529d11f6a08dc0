"""Fine-tuning a pretrained model on the corpus it will look up: all weights, or LoRA.

A model that has read the whole store has memorised it: its train states predict train text far better than anything
can do on text it has not read, and a graph network trained on them learns to do nothing. So some train documents are
kept from it; the network learns on these.
"""

from __future__ import annotations

import copy
import hashlib
import math
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import FinetuneConfig, LMConfig
from gnnlm.corpus.stream import Stream
from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.hf import HFModel, save_hf
from gnnlm.train.data import Pieces
from gnnlm.train.fit import Log, fit, fit_facts, plan_of
from gnnlm.train.lm import LMTask, adam, documents, finish_lm, hf_losses, valid_batches


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
    unread = unread_documents(streams["train"], fitting.held_out, seed)
    stream = streams["train"]
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
    plan = plan_of(fitting, steps, "finetune", "lm.finetune", fitting.accumulate)
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
    return finish_lm(draft, best, facts)
