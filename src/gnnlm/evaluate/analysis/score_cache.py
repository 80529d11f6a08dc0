"""The scores of a split under the tuned predictors, computed once and read by several parts of the analysis.

A split is scored document by document, so that an interrupted pass can be resumed: no context edge leaves a document.

Shapes: P positions, N tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, Draft
from gnnlm.datastore.store import Store, mapped
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.mix_weight import sample_text
from gnnlm.lm.head import CHUNK_LOGITS, Confidence
from gnnlm.predict.bootstrap import Floats
from gnnlm.predict.knn import Mix
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.progress import Track

SHARD = 4096  # positions between two commits, at least
CONFIDENCE = {"best": np.int32, "best_log_probs": np.float32, "entropy": np.float32}  # the files of a `Confidence`


@dataclass(frozen=True)
class CachedScores:
    """The scores of a split's tokens under each predictor, and the graph network's states of all its positions."""

    artifact: Artifact

    @property
    def names(self) -> list[str]:
        names: list[str] = self.artifact.facts["predictors"]
        return names

    def log_probs(self, name: str) -> Floats:
        """The log-probability of every token, [N]."""
        return np.asarray(self.artifact.array(f"{name}.log_probs.npy"), dtype=np.float64)

    def confidence(self, name: str) -> Confidence:
        """The likeliest token at every token's place, its log-probability, and the entropy of the prediction, [N]."""
        token, log_prob, entropy = (np.asarray(self.artifact.array(f"{name}.{kind}.npy")) for kind in CONFIDENCE)
        return Confidence(
            torch.from_numpy(token.astype(np.int64)), torch.from_numpy(log_prob), torch.from_numpy(entropy)
        )

    def mixed(self, text: SearchedText, store: Store, state: str, mix: Mix) -> Floats:
        """The log-probability of every token if the softmax of `state` is mixed with kNN in this way, [N].

        `text` is the split, perhaps with other neighbours than the run's.
        """
        confidence = None if mix.gate is None else self.confidence(state)
        sample = sample_text(text, store, self.log_probs(state), mix, confidence)
        return np.asarray(sample.log_probs(mix).numpy())

    @property
    def gnn_states_PD(self) -> Tensor:
        """What the graph network feeds to the softmax at every position, ends of documents included; fp16."""
        return mapped(self.artifact.array("gnn.states.npy"))


@torch.inference_mode()
def score_split(draft: Draft, subject: Subject, split: str) -> Artifact:
    """Score a split under all predictors and write what `CachedScores` reads."""
    text = subject.snapshot.searched(split)
    predictor = subject.snapshot.predictor
    stream = subject.snapshot.streams[split]
    names = predictor.names
    head = predictor.head
    kinds = {"log_probs": np.float32, **CONFIDENCE}
    columns = {
        (name, kind): draft.writer(f"{name}.{kind}.npy", (stream.token_count,), dtype)
        for name in names
        for kind, dtype in kinds.items()
    }
    states = draft.writer("gnn.states.npy", (len(stream), head.width), np.float16) if "gnn" in names else None
    block = max(1, min(subject.config.eval.block, CHUNK_LOGITS // head.vocab_size))
    done = int(draft.notes.get("positions", 0))
    with Track(f"score {split} for the analysis", len(stream), "tokens", done) as track:
        for positions in shards(stream.starts.tolist(), done):
            for positions_n, prediction in text.predictions(predictor, block, names, positions):
                targets_n = text.text.tokens(positions_n)
                real_n = targets_n >= 0
                if states is not None:
                    states.append(prediction.states["gnn"].half().cpu().numpy())
                for name, full_nV in prediction[real_n.to(head.device)].log_probs(names).items():
                    targets = targets_n[real_n].to(full_nV.device)
                    values = (full_nV.gather(1, targets[:, None])[:, 0], *Confidence.of(full_nV))
                    for kind, value in zip(kinds, values, strict=True):
                        columns[name, kind].append(value.cpu().numpy())
                track.advance(len(positions_n))
            draft.notes["positions"] = int(positions[-1]) + 1
            draft.commit()
    return draft.finish({"predictors": list(names)})


def shards(starts: list[int], done: int, least: int = SHARD) -> Iterator[Tensor]:
    """Positions of whole documents, at least so many at a time, from position `done` on.

    >>> [part.tolist() for part in shards([0, 2, 3, 6], 0, least=3)]
    [[0, 1, 2], [3, 4, 5]]
    """
    first = done
    for end in starts[1:]:
        if end > first and (end - first >= least or end == starts[-1]):
            yield torch.arange(first, end)
            first = end
