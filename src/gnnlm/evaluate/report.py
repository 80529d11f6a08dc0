"""The report: a row for each predictor, and the evidence behind each figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from gnnlm.artifact import Artifact
from gnnlm.errors import ArtifactError
from gnnlm.evaluate.change import change_words
from gnnlm.predict.bootstrap import Floats, Ints, bootstrap_interval, change_interval
from gnnlm.predict.predictor import PREDICTORS, perplexity

SAME = 1e-6  # log-probabilities closer than this count as unchanged
EARLY = 64  # tokens of a document that count as its beginning
FEW_DOCUMENTS = 10  # a split with fewer says little about other text


class ReportPart(BaseModel):
    """A part of the report; further fields are allowed."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Row(ReportPart):
    """The figures of one predictor; None where a figure is infinite, or has no interval.

    `change` is that of perplexity against base, `change_low` to `change_high` its 95% interval. Early are the first 64
    tokens of each document; gains are in nats, summed over tokens.
    """

    ppl: float | None
    ppl_95: tuple[float | None, float | None]
    ppl_word: float | None
    bits_per_byte: float | None
    helped: float
    hurt: float
    tokens_per_second: float
    change: float | None
    change_low: float | None
    change_high: float | None
    ppl_early: float | None
    ppl_late: float | None
    early_gain: float | None
    late_gain: float | None

    @property
    def change_words(self) -> str:
        return change_words(self.change, self.change_low, self.change_high)

    @property
    def significance(self) -> str:
        """Whether the change is significant, as the end of a sentence about it."""
        if self.change_low is None or self.change_high is None:
            return "cannot be told from chance: it has no interval"
        if self.change_low <= 0 <= self.change_high:
            return "is not significant: its interval holds 0"
        return "is significant: its interval leaves out 0"


class WeightRow(ReportPart):
    """One way to weigh kNN, against the same softmax without kNN: `gained` and `lost` are nats per test token."""

    chosen: bool
    valid_ppl: float | None
    ppl: float | None
    helped: float
    hurt: float
    gained: float | None
    lost: float | None

    @classmethod
    def of(cls, scores: Floats, without: Floats, valid_loss: float, chosen: bool) -> WeightRow:
        """From the log-probabilities of the test tokens and the cross-validated loss on valid."""
        gain = scores - without
        return cls(
            chosen=chosen,
            valid_ppl=finite(perplexity(valid_loss)),
            ppl=finite(perplexity(-float(scores.mean()))),
            helped=float((gain > SAME).mean()),
            hurt=float((gain < -SAME).mean()),
            gained=finite(float(gain.clip(min=0).mean())),
            lost=finite(float(-gain.clip(max=0).mean())),
        )


class DocumentRow(ReportPart):
    """One test document: its tokens, and its perplexity by predictor."""

    name: str
    tokens: int
    ppl: dict[str, float | None]


class LmFacts(ReportPart):
    """How the base model was made."""

    kind: str = "frozen"
    best_step: int = 0
    steps_done: int = 0
    seconds: float = 0.0
    unread: list[int] = []
    first_reading: dict[str, Any] | None = None


class TrainingFacts(ReportPart):
    """How the graph network was trained."""

    best_step: int
    steps_done: int
    parameters: int


class IndexFacts(ReportPart):
    """What the store is searched with, and how much of what exact search finds it found when it was built."""

    kind: str
    rows: int
    probes: int = 0
    recall: dict[str, float] = {}
    recall_queries: int = 0


class CodecFacts(ReportPart):
    """How neighbour states are stored."""

    kind: str
    bytes: int
    compression: float
    error: float | None = None


class CacheFacts(ReportPart):
    """What the cache holds of the trained network's states."""

    form: str
    dtype: str


class PassageRow(ReportPart):
    """The figures of one predictor in the comparison with passages; None where a figure is infinite.

    `ppl_later` and `change_later` leave out the first tokens of each document. The rows with passages use the kNN mixes
    of those without; `ppl_own_mix` is the perplexity with a mix chosen for that row on valid.
    """

    ppl: float | None
    ppl_95: tuple[float | None, float | None]
    change: float | None
    change_low: float | None = None
    change_high: float | None = None
    ppl_later: float | None
    change_later: float | None
    tokens_per_second: float
    ppl_own_mix: float | None = None

    @property
    def change_words(self) -> str:
        return change_words(self.change, self.change_low, self.change_high)


class PassageTrial(ReportPart):
    """A setting that was tried on valid; `ppl` is that of the base model that reads passages.

    `tokens_read` is how many tokens the model reads for each token of the text.
    """

    count: int
    length: int
    query: int
    stride: int
    ppl: float | None
    tokens_read: float
    tokens_per_second: float


class PassageComparison(ReportPart):
    """The predictors with and without passages before the text, all on the same tokens of test.

    `later` is how many tokens at the beginning of each document `ppl_later` leaves out, `later_tokens` how many remain.
    """

    tokens: int
    documents: int
    later: int
    later_tokens: int
    count: int
    length: int
    query: int
    stride: int
    tokens_read: float
    passages: int
    valid_tokens: int
    valid_base_ppl: float | None
    tried: list[PassageTrial]
    mix: dict[str, dict[str, Any]]
    rows: dict[str, PassageRow]


class Report(BaseModel):
    """Everything the table, the JSON and the figures show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[3] = 3
    rows: dict[str, Row]
    documents: list[DocumentRow]
    test_tokens: int
    test_documents: int
    split_documents: dict[str, int]
    cut_to: dict[str, int] = {}
    store_tokens: int
    model: str
    mix: dict[str, dict[str, Any]]
    weights: dict[str, dict[str, WeightRow]] = {}
    lm: LmFacts
    overlap: dict[str, dict[str, Any] | None]
    overlap_ngram: int
    training: TrainingFacts | None
    codec: CodecFacts
    index: IndexFacts | None = None
    cache: CacheFacts | None
    seconds: dict[str, float]
    passages: PassageComparison | None = None

    @property
    def predictors(self) -> list[str]:
        """The predictors that have a row, in the usual order."""
        return [name for name in PREDICTORS if name in self.rows]

    @property
    def early_tokens(self) -> int:
        """How many test tokens are at the beginning of a document."""
        return sum(min(document.tokens, EARLY) for document in self.documents)

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


@dataclass(frozen=True)
class ReportScores:
    """The test split's log-probabilities by predictor, and what is needed to turn them into figures.

    `document` numbers the document of each token; `speeds` are tokens per second.
    """

    scores: dict[str, Floats]
    document: Ints
    names: list[str]
    words: int
    bytes: int
    speeds: dict[str, float]

    def rows(self, samples: int, seed: int) -> dict[str, Row]:
        """The figures of each predictor; intervals from `samples` bootstrap samples."""
        base = perplexity(-float(self.scores["base"].mean()))
        rows = {}
        for name, scores in self.scores.items():
            total = -float(scores.sum())
            gain = scores - self.scores["base"]
            ppl = perplexity(total / len(scores))
            low, high = bootstrap_interval(scores, self.document, samples, seed)
            paired = change_interval(gain, self.document, samples, seed) if name != "base" else (0.0, 0.0)
            change_low, change_high = paired or (math.inf, math.inf)
            early = self.place < EARLY
            rows[name] = Row(
                ppl=finite(ppl),
                ppl_95=(finite(low), finite(high)),
                ppl_word=finite(perplexity(total / self.words)),
                bits_per_byte=finite(total / math.log(2) / self.bytes),
                helped=float((gain > SAME).mean()),
                hurt=float((gain < -SAME).mean()),
                tokens_per_second=self.speeds[name],
                change=finite(ppl / base - 1),
                change_low=finite(change_low),
                change_high=finite(change_high),
                ppl_early=finite(_mean_perplexity(scores[early])),
                ppl_late=finite(_mean_perplexity(scores[~early])),
                early_gain=finite(float(gain[early].sum())),
                late_gain=finite(float(gain[~early].sum())),
            )
        return rows

    @property
    def place(self) -> Ints:
        """The number of tokens before each token in its document."""
        first: Ints = np.searchsorted(self.document, self.document)
        return np.arange(len(self.document)) - first

    def documents(self) -> list[DocumentRow]:
        """A row for each document, in the order of the split."""
        sizes = np.bincount(self.document, minlength=len(self.names))
        sums = {name: np.bincount(self.document, -s, minlength=len(self.names)) for name, s in self.scores.items()}
        return [
            DocumentRow(
                name=name,
                tokens=int(sizes[number]),
                ppl={p: finite(perplexity(total[number] / max(1, sizes[number]))) for p, total in sums.items()},
            )
            for number, name in enumerate(self.names)
        ]


def finite(value: float) -> float | None:
    """The value, or None (null) if it is infinite, for which JSON has no number."""
    return value if math.isfinite(value) else None


def _mean_perplexity(scores: Floats) -> float:
    return perplexity(-float(scores.mean())) if len(scores) else math.inf


def read_report(artifact: Artifact) -> Report:
    """The report of a finished run."""
    try:
        return Report.model_validate_json(artifact.text("report.json"))
    except ValueError as error:
        run = artifact.path.parent
        raise ArtifactError(
            f"{artifact.path} holds no report of this version; rebuild it: gnnlm run {run} --rebuild"
        ) from error
