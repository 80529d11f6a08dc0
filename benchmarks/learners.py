"""Three ways to learn documents and to forget them: an open book, passages in the context, fine-tuning.

Each learns all documents at once, forgets some of them or all, and says how likely it finds a text. A way may give
several predictions: the open book gives one for each of its predictors.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from common import Clock, Took

from gnnlm.book import book_of
from gnnlm.corpus.windows import Window
from gnnlm.datastore.encode import EncodingWindow, encode_windows
from gnnlm.errors import ModelError
from gnnlm.evaluate.context_retrieval import Setting, passage_jobs
from gnnlm.library.library import Library
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.hf_loading import save_hf
from gnnlm.lm.hf_model import HFModel
from gnnlm.lm.load_lm import load_lm
from gnnlm.predict.bootstrap import Floats
from gnnlm.predict.predictor import LABELS
from gnnlm.retrieval.bm25 import PassageIndex, plan_passages
from gnnlm.run import Run
from gnnlm.train.batches import StartToken, TextPieces
from gnnlm.train.finetune import with_lora
from gnnlm.train.train_lm import adam, hf_losses

Ids = list[int]
Texts = Mapping[str, str]
RATES = {"lora": 1e-3, "full": 1e-4}  # learning rates
BATCH = 512  # tokens of a step of fine-tuning


@dataclass(frozen=True)
class Probe:
    """Tokens to be predicted, after others."""

    before: Ids
    wanted: Ids


@dataclass(frozen=True)
class Read:
    """The log-probability of each wanted token, and whether it was the likeliest."""

    log_probs: Floats
    likeliest: bool

    @property
    def total(self) -> float:
        return float(self.log_probs.sum())


Seconds = dict[str, Took]
Answers = dict[str, list[Read]]


class Learner(Protocol):
    """Learns documents, forgets them, and predicts."""

    name: str

    def learn(self, texts: Texts) -> Seconds:
        """Learn documents; how long each step took."""
        ...

    def forget(self, names: Collection[str]) -> Seconds:
        """Forget some of the documents that were learned, or all; how long each step took."""
        ...

    def read(self, probes: Sequence[Probe]) -> Answers:
        """What each probe is given, by prediction."""
        ...

    def read_others(self, texts: Sequence[Ids]) -> dict[str, Floats]:
        """The log-probabilities of all tokens of some texts, each read from its beginning, by prediction."""
        ...


class OpenBookLearner:
    """Adds documents to the store of a run, and erases them from it."""

    name = "open book"

    def __init__(self, run: Run) -> None:
        self.library, self.book = Library(run), book_of(run)

    def learn(self, texts: Texts) -> Seconds:
        clock = Clock()
        self.library.add_texts(texts)
        self.book.refresh()
        return {"add": clock.lap()}

    def forget(self, names: Collection[str]) -> Seconds:
        clock = Clock()
        self.library.remove(sorted(names))
        self.book.refresh()
        removing = clock.lap()
        erased = self.library.compact(erase=True, readers=[self.book]).as_json()
        assert not erased["found"], erased["found"]
        return {"remove": removing, "erase": clock.lap()}

    def read(self, probes: Sequence[Probe]) -> Answers:
        scores = self.book.score([(probe.before, probe.wanted) for probe in probes])
        return {
            LABELS[name]: [Read(one.log_probs[name].astype(np.float64), bool(one.top1[name].all())) for one in scores]
            for name in self.book.predictors
        }

    def read_others(self, texts: Sequence[Ids]) -> dict[str, Floats]:
        found = self.read([Probe([], ids) for ids in texts])
        return {name: np.concatenate([one.log_probs for one in reads]) for name, reads in found.items()}


class PassageLearner:
    """The base model reads passages that BM25 finds; the documents' passages are in the index, or are not.

    The index has no way to add or drop a passage: it is made again. The same tokens are read once.
    """

    name = "passages in the context"

    def __init__(self, run: Run, setting: Setting) -> None:
        self.run, self.setting, self.lm = run, setting, run.snapshot.lm
        self._learned: dict[str, Ids] = {}
        self._index()
        self._known: dict[bytes, Read] = {}

    def _index(self) -> None:
        """The passages of the store and of what was learned."""
        stream = self.run.snapshot.streams["train"]
        cut = [stream.tokens[first:last] for first, last in plan_passages(stream.starts, self.setting.length).tolist()]
        for ids in self._learned.values():
            bounds = plan_passages([0, len(ids) + 1], self.setting.length).tolist()
            cut += [np.array(ids[first:last]) for first, last in bounds]
        self.index = PassageIndex([np.asarray(passage, dtype=np.int64) for passage in cut])

    def learn(self, texts: Texts) -> Seconds:
        clock = Clock()
        self._learned |= {name: self.lm.tokenize(text)[0] for name, text in texts.items()}
        self._index()
        return {"index": clock.lap()}

    def forget(self, names: Collection[str]) -> Seconds:
        clock = Clock()
        for name in names:
            del self._learned[name]
        self._index()
        return {"index again": clock.lap()}

    def read(self, probes: Sequence[Probe]) -> Answers:
        with_passages = []
        for probe in probes:
            found = self.index.find(probe.before[-self.setting.query :], self.setting.count)
            passages = [token for number in reversed(found) for token in self.index.passages[number].tolist()]
            with_passages.append(Probe([*passages, *probe.before], probe.wanted))
        return {"base": self._read_once(with_passages)}

    def read_others(self, texts: Sequence[Ids]) -> dict[str, Floats]:
        lm, window, probes = self.lm, self.run.config.lm.window, []
        for ids in texts:
            jobs = passage_jobs(np.array(ids), np.arange(len(ids)), self.index, self.setting, lm.start_token, window)
            for job in jobs:  # its states predict the tokens from `first` on, up to `stop`
                wanted = ids[job.window.first : job.window.stop + 1]
                read = job.tokens[1 : len(job.tokens) - len(wanted) + 1].tolist()
                probes.append(Probe(read, wanted))
        return {"base": np.concatenate([one.log_probs for one in self._read_once(probes)])}

    def _read_once(self, probes: Sequence[Probe]) -> list[Read]:
        keys = [np.array([len(probe.before), *probe.before, *probe.wanted]).tobytes() for probe in probes]
        new = {key: probe for key, probe in zip(keys, probes, strict=True) if key not in self._known}
        made = read_with(self.lm, list(new.values()), self.run.config.lm.batch_tokens)
        self._known |= dict(zip(new, made, strict=True))
        return [self._known[key] for key in keys]


class TuningLearner:
    """Trains the base model on the documents: all weights, or LoRA.

    Forgetting everything puts the old weights back. To forget some documents and keep the others, the old weights are
    trained again, without them.
    """

    def __init__(self, run: Run, old: Path, kind: str, epochs: float, seed: int) -> None:
        """`old`: where the old weights are kept, as float32, whatever the run's model was loaded from."""
        self.name = {"lora": "fine-tuning, LoRA", "full": "fine-tuning, all weights"}[kind]
        self._kind, self._epochs, self._seed = kind, epochs, seed
        self._config = run.config.lm.model_copy(update={"model": str(old)})
        self._learned: dict[str, str] = {}
        lm = run.snapshot.lm
        if not isinstance(lm, HFModel):
            raise ModelError("only transformers models are fine-tuned here; leave lora and full out of --learners")
        if not old.exists():
            save_hf(lm.model, lm.tokenizer, old)

    @cached_property
    def lm(self) -> HFModel:
        """The model with its old weights, read from the disk; training replaces it."""
        return cast(HFModel, load_lm(self._config))

    def learn(self, texts: Texts) -> Seconds:
        self._learned |= texts
        lm, clock = self.lm, Clock()
        self._train(lm)
        return {"train": clock.lap()}

    def forget(self, names: Collection[str]) -> Seconds:
        self._learned = {name: text for name, text in self._learned.items() if name not in names}
        clock = Clock()
        del self.lm
        lm, loading = self.lm, clock.lap()
        if not self._learned:
            return {"load": loading}
        self._train(lm)
        return {"load": loading, "train again": clock.lap()}

    def _train(self, lm: HFModel) -> None:
        ids = [lm.tokenize(text)[0] for text in self._learned.values()]
        ends = np.cumsum([len(one) for one in ids])
        bounds = np.stack([ends - [len(one) for one in ids], ends], axis=1)
        start = StartToken(lm.start_token, always=True)
        batches = TextPieces(np.concatenate(ids), bounds, start, self._config.window, BATCH, self._seed)
        torch.manual_seed(self._seed)
        config = self._config.finetune.model_copy(update={"lr": RATES[self._kind]})
        model: Any = lm.model.requires_grad_(self._kind == "full")
        model = with_lora(model, config) if self._kind == "lora" else model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = adam(trained, config)
        steps = max(1, round(self._epochs * batches.batches_in(0)))
        for step in range(steps):
            losses, _ = hf_losses(model.train(), *batches(step), None)
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(trained, config.clip)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                loss = float(losses.mean().detach())
                print(f"{self.name}: step {step + 1} of {steps}, loss {loss:.2f}", file=sys.stderr, flush=True)
        whole = model.merge_and_unload() if self._kind == "lora" else model
        self.lm = HFModel(whole, lm.tokenizer, self._config.start, self._config.dtype)

    def read(self, probes: Sequence[Probe]) -> Answers:
        return {"base": read_with(self.lm, probes, self._config.batch_tokens)}

    def read_others(self, texts: Sequence[Ids]) -> dict[str, Floats]:
        found = self.read([Probe([], ids) for ids in texts])["base"]
        return {"base": np.concatenate([one.log_probs for one in found])}


@torch.inference_mode()
def read_with(lm: BaseLM, probes: Sequence[Probe], batch_tokens: int) -> list[Read]:
    """What a base model gives each probe; it reads the start token first."""
    if not probes:
        return []
    jobs = []
    for probe in probes:
        first, count = len(probe.before), len(probe.wanted)
        tokens = np.array([lm.start_token, *probe.before, *probe.wanted[:-1]])
        jobs.append(EncodingWindow(Window(0, first + count - 1, first), tokens, np.arange(first, first + count)))
    states_ND = torch.from_numpy(encode_windows(lm, jobs, batch_tokens, "state").states)
    found, at = [], 0
    for probe in probes:
        wanted_n = torch.tensor(probe.wanted)
        full_nV = lm.log_probs(states_ND[at : at + len(wanted_n)]).cpu()
        given_n = full_nV.gather(1, wanted_n[:, None])[:, 0].double().numpy()
        found.append(Read(given_n, bool((full_nV.argmax(1) == wanted_n).all())))
        at += len(wanted_n)
    return found
