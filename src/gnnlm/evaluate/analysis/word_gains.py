"""Words most helped and most hurt, with their neighbours.

The best and the worst are shown beside some drawn at random from each bucket of gain, so that nobody takes the best for
the usual. A word is a test token with a letter in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.gain_examples import example_table, token_example
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.token_buckets import BEGINS, CONTINUES, by_edges, kinds_of
from gnnlm.evaluate.examples import Example, flat
from gnnlm.evaluate.plots import COLOURS
from gnnlm.evaluate.table import Table, number, percent, text
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS

GAINS = (-1.0, -0.1, 0.1, 1.0)  # nats
NAMES = ("lost 1 or more", "lost 0.1 to 1", "within 0.1", "gained 0.1 to 1", "gained 1 or more")
DRAWN = 3  # from each bucket
ENDS = 10  # best and worst


@dataclass(frozen=True)
class WordExample(Example):
    """A test word and what it gained, in nats."""

    gain: float

    @property
    def note(self) -> str:
        return f"{self.gain:+.2f} nats"


class WordBucket(PartResult):
    """Words with a similar gain: how many, their gain in all, and some of them."""

    name: str
    words: int
    nats: float
    drawn: list[WordExample]

    @property
    def mean(self) -> float:
        return self.nats / max(1, self.words)


class VocabularyGain(PartResult):
    """A token of the vocabulary: how often it occurs in test, and what it gained there in all and on average."""

    word: str
    times: int
    nats: float
    mean: float


class WordsResult(PartResult):
    predictor: str
    words: int
    tokens: int
    buckets: list[WordBucket]
    best: list[WordExample]
    worst: list[WordExample]
    types: dict[str, list[VocabularyGain]]  # `helped` and `hurt`


def measure(subject: Subject) -> WordsResult:
    gain_N = subject.scores[subject.best] - subject.scores["base"]
    kinds = np.array(kinds_of(subject.snapshot.streams["test"]))
    words = np.flatnonzero((kinds == BEGINS) | (kinds == CONTINUES))
    ascending = words[np.argsort(gain_N[words], kind="stable")]
    ends = min(ENDS, len(words) // 2)

    def examples(tokens: Ints) -> list[WordExample]:
        return [WordExample(**vars(token_example(subject, int(token))), gain=float(gain_N[token])) for token in tokens]

    buckets = []
    for name, places in by_edges(gain_N[words], GAINS, NAMES):
        here = words[places]
        drawn = np.random.default_rng(subject.seed).permutation(here)[:DRAWN]
        nats = float(gain_N[here].sum())
        buckets.append(WordBucket(name=name, words=len(here), nats=nats, drawn=examples(drawn)))
    return WordsResult(
        predictor=subject.best,
        words=len(words),
        tokens=len(gain_N),
        buckets=buckets,
        best=examples(ascending[::-1][:ends]),
        worst=examples(ascending[:ends]),
        types=_types(subject, words, gain_N),
    )


def _types(subject: Subject, words: Ints, gain_N: Floats) -> dict[str, list[VocabularyGain]]:
    """The tokens of the vocabulary that gained most and lost most, all their occurrences in test taken together."""
    tokens = subject.targets_N.numpy()[words]
    types, first, number_N, count = np.unique(tokens, return_index=True, return_inverse=True, return_counts=True)
    total = np.bincount(number_N, weights=gain_N[words], minlength=len(types))
    ascending = np.argsort(total, kind="stable")
    stream = subject.snapshot.streams["test"]

    def gain(place: int) -> VocabularyGain:
        position = int(subject.positions_N[words[first[place]]])
        word = flat(stream.text_between(position, position + 1))
        nats, times = float(total[place]), int(count[place])
        return VocabularyGain(word=word, times=times, nats=nats, mean=nats / times)

    return {
        "helped": [gain(place) for place in ascending[::-1][:ENDS] if total[place] > 0],
        "hurt": [gain(place) for place in ascending[:ENDS] if total[place] < 0],
    }


def show(result: WordsResult) -> AnalysisSection:
    label = LABELS[result.predictor]
    buckets = result.buckets
    gained = sum(bucket.nats for bucket in buckets[3:])
    lost = -sum(bucket.nats for bucket in buckets[:2])
    finding = (
        f"{buckets[-1].words:,} of {result.words:,} test words gain a nat or more with {label}, {buckets[0].words:,} "
        f"lose as much; gains above 0.1 nats add up to {gained:,.0f} nats, losses to {lost:,.0f}."
    )
    tables = [
        Table.of(
            "words_buckets",
            f"Words by their gain with {label}",
            buckets,
            text("gain in nats", lambda bucket: bucket.name),
            number("words", lambda bucket: bucket.words, 0),
            percent("share", lambda bucket: bucket.words / max(1, result.words)),
            number("nats in all", lambda bucket: bucket.nats, 1),
            number("mean", lambda bucket: bucket.mean, 3),
        )
    ]
    tables += [_types_table(side, types) for side, types in result.types.items() if types]
    drawn = [(example, f"{bucket.name}: {example.note}") for bucket in buckets for example in bucket.drawn]
    for name, caption, examples in (
        ("words_drawn", f"Drawn at random, {DRAWN} from each bucket of gain", drawn),
        ("words_worst", "The words most hurt", [(example, example.note) for example in result.worst]),
        ("words_best", "The words most helped", [(example, example.note) for example in result.best]),
    ):
        if examples:
            tables.append(example_table(name, caption, *zip(*examples, strict=True)))
    return AnalysisSection(
        [
            f"Words are the {result.words:,} of {result.tokens:,} test tokens that have a letter in them; their "
            f"gain is the log-probability under {label} minus that under base. The best and the worst are extremes; "
            "those drawn at random show what is usual.",
            finding,
        ],
        tables,
        [_figure(result)],
        [finding],
    )


def _types_table(side: str, types: Sequence[VocabularyGain]) -> Table:
    return Table.of(
        f"words_types_{side}",
        f"Tokens of the vocabulary most {side}, all their occurrences in test together",
        types,
        text("token", lambda row: f'"{row.word}"'),
        number("times in test", lambda row: row.times, 0),
        number("nats in all", lambda row: row.nats),
        number("mean", lambda row: row.mean, 3),
    )


def _figure(result: WordsResult) -> Figure:
    """How many words each bucket has, and how many nats they bring."""
    figure, (shares, nats) = axes_of(2, height=2.8, titles=("% of the words", "nats in all"))
    buckets = result.buckets
    label = LABELS[result.predictor]
    for axes, heights, digits in (
        (shares, [100 * bucket.words / max(1, result.words) for bucket in buckets], 1),
        (nats, [bucket.nats for bucket in buckets], 0),
    ):
        bars = axes.barh(range(len(buckets)), heights, color=COLOURS[result.predictor], edgecolor="black", lw=0.6)
        axes.bar_label(bars, [f"{height:,.{digits}f}" for height in heights], fontsize=8, padding=2)
        axes.axvline(0, color="black", lw=0.8)
        axes.margins(x=0.2)
    shares.set_yticks(range(len(buckets)), [bucket.name for bucket in buckets])
    nats.set_yticks([])
    words = "; ".join(f"{bucket.name}: {bucket.words:,} words, {bucket.nats:+,.0f} nats" for bucket in buckets)
    return Figure("words", f"Words by their gain with {label}", f"{words}.", figure)


PART = AnalysisPart(
    "words",
    "Words helped and hurt",
    WordsResult,
    lambda m: measure(m.subject),
    show,
    lambda subject: 1 + subject.report.test_tokens / 5e4,
)
