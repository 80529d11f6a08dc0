"""A fact in a new document, learned and forgotten: by the open book, by passages in the context, by fine-tuning.

    python benchmarks/facts.py --run runs/demo [--facts 60] [--learners book passages lora full] [--json]

**The documents** are the beginnings of the run's test documents: real text that neither the store nor the base model's
training here has. **A fact** is a word in one of them, of several tokens, with the part of its sentence before it as
the prompt; nothing else of the document is in the context. The word must stand in the store at most `--rare` times (0),
not in the prompt, and nowhere in the text on which everything else is measured, and the base model alone must give it
less than `--known` (0.1) after the prompt. Among those, `--seed` chooses, each word once, one from each document in
turn. No other prediction is looked at. Only documents with a fact are learned.

**Probes.** `as written`: the prompt as it stands in the document, which is what an open book does best.
`other lead-in`: its last 12 tokens, after a sentence of another document.

**Stages.** Before; after all documents were learned at once; after a fifth of them was forgotten and the others stay;
after all were forgotten, which must be as before. A single document is learned, too, for its time. **Everything else**
is the beginnings of the run's valid documents, `--others` tokens in all. Intervals: 95%, by bootstrap over documents.

`--json` prints one object as the last line: `cases` has one entry per learner, prediction and probe, with
  learner, prediction, probe
  p, log_p, right: each {before, learned, forgotten}: mean probability of the whole word, mean log-probability, share of
      facts for which greedy writing gives the word
  p_low, p_high, gain_low, gain_high: the intervals of p.learned, and of p.learned - p.before
  some: {forgotten, kept}: mean probability after a fifth was forgotten, of facts of that fifth and of the others
  difference: the largest difference of log-probabilities between before and after forgetting
  others: {before, learned, low, high}: perplexity of everything else; low and high are of its relative change
  seconds: {learn, one, forget_some, forget}: each {what was done: [seconds that passed, seconds of the processor]}
and `facts`, `documents`, `tokens`, `epochs` say on what.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Took, arguments, open_run, report
from learners import (
    Answers,
    Ids,
    Learner,
    OpenBookLearner,
    PassageLearner,
    Probe,
    Read,
    Seconds,
    TuningLearner,
    read_with,
)

from gnnlm.config import load_config
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.stream import Stream
from gnnlm.errors import CorpusError
from gnnlm.evaluate.context_retrieval import Setting
from gnnlm.predict.bootstrap import Floats, Ints, bootstrap_means, change_interval
from gnnlm.predict.predictor import perplexity
from gnnlm.run import Run

SAMPLES = 2000  # of the documents
WORD = re.compile(r"[A-Za-z_][\w.]*\w")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")
SHORTEST = 4  # characters of a word
BEFORE = 8  # tokens of a prompt, at least
TAIL = 12  # tokens of a prompt that the other lead-in leaves
LEAD = (8, 24)  # tokens of the sentence that is put before them
PROBES = ("as written", "other lead-in")


@dataclass(frozen=True)
class Fact:
    """A word of a document, its place there, and its sentence before it and the word itself as token ids."""

    document: int
    place: int
    word: str
    prompt: Ids
    answer: Ids


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--facts", type=int, default=60, help="the most facts (default: %(default)s)")
    parser.add_argument("--document-tokens", type=int, default=256, help="tokens of each document that are learned")
    parser.add_argument("--others", type=int, default=2000, help="tokens of everything else (default: %(default)s)")
    parser.add_argument("--rare", type=int, default=0, help="the most often that a word may stand in the store")
    parser.add_argument("--known", type=float, default=0.1, help="the base model gives the word less than this")
    parser.add_argument("--single", type=int, default=2, help="documents that are learned one by one, for the time")
    parser.add_argument("--epochs", type=float, default=4, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    choices = ("book", "passages", "lora", "full")
    parser.add_argument("--learners", nargs="+", choices=choices, default=choices)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, old = Path(folder) / "run", Path(folder) / "old weights"
        open_run(given.run).copy(root)
        run = Run(load_config(root), reading=True)
        documents = [*beginnings(run.snapshot.streams["test"], given.document_tokens)]
        others = [
            one.tokens for one in first_tokens(run.snapshot.streams["valid"], given.document_tokens, given.others)
        ]
        facts = choose(run, documents, others, given)
        with_facts = sorted({fact.document for fact in facts})
        documents = [documents[number] for number in with_facts]
        facts = [replace(fact, document=with_facts.index(fact.document)) for fact in facts]
        lead = lead_in(run.snapshot.streams["valid"])
        say(f"{len(facts)} facts of {len(documents)} documents")
        learners: dict[str, Callable[[], Learner]] = {
            "book": lambda: OpenBookLearner(run),
            "passages": lambda: PassageLearner(run, setting_of(run)),
            "lora": lambda: TuningLearner(run, old, "lora", given.epochs, given.seed),
            "full": lambda: TuningLearner(run, old, "full", given.epochs, given.seed),
        }
        cases: list[dict[str, Any]] = []
        for name in given.learners:
            cases += measure(learners[name](), facts, documents, others, lead, given.single)
    report(
        f"{len(facts)} facts learned and forgotten ({given.run})",
        cases,
        given.json,
        [shown(case) for case in cases],
        facts=len(facts),
        documents=len(documents),
        tokens=sum(len(one.tokens) for one in documents),
        epochs=given.epochs,
    )


def say(text: str) -> None:
    print(f"facts: {text}", file=sys.stderr, flush=True)


# -- facts ---------------------------------------------------------------------------------------------------------


def beginnings(stream: Stream, tokens: int) -> Iterator[TokenizedDocument]:
    """The documents of a split, cut to their first tokens."""
    for number in range(len(stream.names)):
        yield stream.tokenized(number).cut(tokens)


def first_tokens(stream: Stream, tokens: int, most: int) -> Iterator[TokenizedDocument]:
    """The beginnings of the first documents, until they have `most` tokens."""
    for document in beginnings(stream, tokens):
        if most <= 0:
            return
        yield document.cut(most)
        most -= len(document.tokens)


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Where each sentence begins and ends.

    >>> [*sentences("One. Two\\n\\nthree")]
    [(0, 4), (5, 8), (10, 15)]
    """
    begin = 0
    for end in [*SENTENCE_END.finditer(text), None]:
        stop = len(text) if end is None else end.start()
        if stop > begin:
            yield begin, stop
        begin = stop if end is None else end.end()


def candidates(number: int, document: TokenizedDocument) -> Iterator[Fact]:
    """Words of several tokens with at least `BEFORE` tokens of their sentence before them, which do not have them."""
    text, ids = document.text, document.tokens
    starts = {offset: place for place, offset in reversed([*enumerate([*document.offsets, len(text)])])}
    for begin, end in sentences(text):
        first = starts.get(begin, starts.get(begin - 1))
        for found in WORD.finditer(text, begin, end):
            with_space = found.start() - 1 if text[found.start() - 1 : found.start()].isspace() else found.start()
            start, stop = starts.get(found.start(), starts.get(with_space)), starts.get(found.end())
            if first is None or start is None or stop is None or len(found.group()) < SHORTEST:
                continue
            if start - first >= BEFORE and stop - start >= 2 and found.group() not in text[begin : found.start()]:
                yield Fact(number, start, found.group(), ids[first:start], ids[start:stop])


def choose(run: Run, documents: Sequence[TokenizedDocument], others: Sequence[Ids], given: Any) -> list[Fact]:
    """The facts: see the beginning of this file."""
    stored = Counter(
        word for document in run.snapshot.streams["train"].documents for word in WORD.findall(document.text)
    )
    elsewhere = " ".join(run.snapshot.lm.detokenize(ids) for ids in others)
    found = [fact for number, document in enumerate(documents) for fact in candidates(number, document)]
    found = [fact for fact in found if stored[fact.word] <= given.rare and fact.word not in elsewhere]
    reads = read_with(run.snapshot.lm, [Probe(fact.prompt, fact.answer) for fact in found], run.config.lm.batch_tokens)
    found = [fact for fact, read in zip(found, reads, strict=True) if read.total < np.log(given.known)]
    random.Random(given.seed).shuffle(found)
    found = list({fact.word: fact for fact in reversed(found)}.values())  # each word once
    lists: dict[int, list[Fact]] = {}
    for fact in found:
        lists.setdefault(fact.document, []).append(fact)
    if len(lists) < 2:
        raise CorpusError(
            f"expected facts of at least 2 test documents, found them in {len(lists)}; raise --rare or --known"
        )
    chosen = [fact for rank in range(given.facts) for each in lists.values() for fact in each[rank : rank + 1]]
    return sorted(chosen[: given.facts], key=lambda fact: (fact.document, fact.place))


def lead_in(stream: Stream) -> Ids:
    """The first sentence of valid of a moderate length."""
    for number in range(len(stream.names)):
        document = stream.tokenized(number)
        places = {offset: place for place, offset in enumerate([*document.offsets, len(document.text)])}
        for begin, end in sentences(document.text):
            first, last = places.get(begin, places.get(begin - 1)), places.get(end)
            if first is not None and last is not None and LEAD[0] <= last - first <= LEAD[1]:
                return document.tokens[first:last]
    return stream.tokenized(0).tokens[: LEAD[0]]


def probes_of(fact: Fact, lead: Ids) -> dict[str, Probe]:
    return {
        "as written": Probe(fact.prompt, fact.answer),
        "other lead-in": Probe([*lead, *fact.prompt[-TAIL:]], fact.answer),
    }


def setting_of(run: Run) -> Setting:
    """How passages are looked up: as the run chose, if it has compared with passages, else the least that it tries."""
    if "passages" in run.stages:
        chosen = run.artifact("passages").facts
        return Setting(*(chosen[name] for name in ("count", "length", "query", "stride")))
    tried = run.config.eval.context_retrieval
    return Setting(tried.counts[0], tried.lengths[0], tried.queries[0], max(tried.strides))


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(
    learner: Learner,
    facts: Sequence[Fact],
    documents: Sequence[TokenizedDocument],
    others: Sequence[Ids],
    lead: Ids,
    single: int,
) -> list[dict[str, Any]]:
    """All stages of a learner."""
    texts = {f"new/{document.name}": document.text for document in documents}
    names, asked = list(texts), [probes_of(fact, lead)[probe] for probe in PROBES for fact in facts]
    some = set(names[::5])
    stages, seconds = dict[str, Answers](), dict[str, Seconds]()
    others_read = dict[str, dict[str, Floats]]()

    def read(stage: str) -> None:
        say(f"{learner.name}: {stage}")
        stages[stage] = learner.read(asked)
        if stage in ("before", "learned"):
            others_read[stage] = learner.read_others(others)

    read("before")
    each = [
        {**learner.learn({name: texts[name]}), **learner.forget([name])} for name in names[: single * 5 : 5]
    ]  # not one after the other, so that they differ in length
    mean_of = {what: np.mean([one[what] for one in each], axis=0).tolist() for what in (each[0] if each else ())}
    seconds["one"] = {what: Took(*values) for what, values in mean_of.items()}
    seconds["learn"] = learner.learn(texts)
    read("learned")
    seconds["forget_some"] = learner.forget(some)
    read("some")
    seconds["forget"] = learner.forget([name for name in names if name not in some])
    read("forgotten")
    document_F = np.array([fact.document for fact in facts])
    forgotten_F = np.array([names[fact.document] in some for fact in facts])
    document_O = np.repeat(np.arange(len(others)), [len(ids) for ids in others])
    cases = []
    for prediction in stages["before"]:
        before, after = (others_read[stage][prediction] for stage in ("before", "learned"))
        low, high = change_interval(after - before, document_O, SAMPLES, 0) or (np.nan, np.nan)
        values = {"before": perplexity(-before.mean()), "learned": perplexity(-after.mean()), "low": low, "high": high}
        for number, probe in enumerate(PROBES):
            part = slice(number * len(facts), (number + 1) * len(facts))
            answers = {stage: found[prediction][part] for stage, found in stages.items()}
            case = {"learner": learner.name, "prediction": prediction, "probe": probe}
            cases.append({**case, **figures(answers, document_F, forgotten_F), "others": values, "seconds": seconds})
    return cases


def figures(answers: dict[str, list[Read]], document_F: Ints, forgotten_F: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The figures of a prediction on one probe of each fact."""
    log_p = {stage: np.array([one.total for one in found]) for stage, found in answers.items()}
    p, shown_stages = {stage: np.exp(values) for stage, values in log_p.items()}, ("before", "learned", "forgotten")
    p_low, p_high = interval(p["learned"], document_F)
    gain_low, gain_high = interval(p["learned"] - p["before"], document_F)
    some, kept = p["some"][forgotten_F], p["some"][~forgotten_F]
    return {
        "p": {stage: float(p[stage].mean()) for stage in shown_stages},
        "log_p": {stage: float(log_p[stage].mean()) for stage in shown_stages},
        "right": {stage: float(np.mean([one.likeliest for one in answers[stage]])) for stage in shown_stages},
        "p_low": p_low,
        "p_high": p_high,
        "gain_low": gain_low,
        "gain_high": gain_high,
        "some": {"forgotten": float(some.mean()), "kept": float(kept.mean()) if len(kept) else None},
        "difference": float(np.abs(log_p["forgotten"] - log_p["before"]).max()),
    }


def interval(values_F: Floats, document_F: Ints) -> tuple[float, float]:
    """The 95% interval of a mean over facts."""
    means = bootstrap_means(values_F, document_F, SAMPLES, 0)
    return float(means[int(0.025 * (SAMPLES - 1))]), float(means[round(0.975 * (SAMPLES - 1))])


def shown(case: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    p, right, others, seconds = (case[name] for name in ("p", "right", "others", "seconds"))

    def took(name: str) -> str:
        return ", ".join(f"{what} {value.passed:.2g} ({value.worked:.2g})" for what, value in seconds[name].items())

    return {
        "learner": case["learner"],
        "prediction": case["prediction"],
        "probe": case["probe"],
        "p before": f"{p['before']:.1%}",
        "learned": f"{p['learned']:.1%} ({case['p_low']:.1%} to {case['p_high']:.1%})",
        "forgotten": f"{p['forgotten']:.1%}",
        "right": f"{right['before']:.0%}, {right['learned']:.0%}, {right['forgotten']:.0%}",
        "a fifth forgotten: its, others'": f"{case['some']['forgotten']:.1%}, {case['some']['kept'] or 0:.1%}",
        "everything else": f"{others['before']:.2f}, {others['learned']:.2f}",
        "seconds (of the processor): learn": took("learn"),
        "one document": took("one"),
        "forget a fifth": took("forget_some"),
        "forget": took("forget"),
    }


if __name__ == "__main__":
    main()
