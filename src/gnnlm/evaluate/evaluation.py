"""The eval stage: scores test once and writes the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnlm.artifact import Artifact, Draft, write_json
from gnnlm.config import EvalConfig
from gnnlm.corpus.stream import SPLITS, Stream
from gnnlm.engine import Spread, here
from gnnlm.evaluate.mix_weight import sample_text
from gnnlm.evaluate.passage_rows import ReadWithPassages, compare_passages
from gnnlm.evaluate.plots import plot_rows, plot_training
from gnnlm.evaluate.report import (
    CacheFacts,
    CodecFacts,
    IndexFacts,
    LmFacts,
    Report,
    ScoredTest,
    TrainingFacts,
    WeightRow,
)
from gnnlm.evaluate.report_tables import markdown
from gnnlm.evaluate.speeds import seconds_each, speeds
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import MIXED, STATE_OF, Predictor
from gnnlm.predict.split_scoring import SearchedText, SplitScores, score_surely


@dataclass(frozen=True)
class Evaluation:
    """A finished predictor, the test split, and the artifacts that the report describes."""

    predictor: Predictor
    text: SearchedText
    stream: Stream
    corpus: Artifact
    encoded: Artifact
    indexed: Artifact
    searched: Artifact
    codec: Artifact
    tuned: Artifact
    model: str
    lm: Artifact | None = None
    training: Artifact | None = None
    cache: Artifact | None = None
    passages: ReadWithPassages | None = None


def build_report(
    draft: Draft, given: Evaluation, config: EvalConfig, ngram: int, seed: int, spread: Spread = here
) -> Artifact:
    """Score test under every predictor; write the table, the JSON, the Markdown, the figures and the scores."""
    names = given.predictor.names
    asked = given.tuned.facts.get("variants", ())
    scored = score_surely(
        given.predictor, given.text, config.block, "score test", names, tuple(asked), draft=draft, spread=spread
    )
    scores, seconds = scored.log_probs, seconds_each(scored.seconds, names)
    seconds["encode"] = given.encoded.facts["seconds"]["test"]
    seconds["search"] = given.searched.facts["seconds"]["test"]
    corpus, stream = given.corpus.facts, given.stream
    tokens = stream.token_count
    test = ScoredTest(
        scores,
        stream.document_of(np.flatnonzero(np.asarray(stream.tokens) >= 0)),
        stream.names,
        corpus["test"]["whitespace_words"],
        corpus["test"]["bytes"],
        speeds(names, seconds, tokens),
    )
    passages = None
    if given.passages is not None:
        passages, more = compare_passages(given.passages, given.predictor, test, config, seed)
        scores = {**scores, **more}
    report = Report(
        rows=test.rows(config.bootstrap, seed),
        documents=test.documents(),
        test_tokens=tokens,
        test_documents=len(stream.names),
        split_documents={split: corpus[split]["documents"] for split in SPLITS},
        cut_to={split: corpus[split]["cut_to"] for split in SPLITS if "cut_to" in corpus[split]},
        store_tokens=corpus["train"]["tokens"],
        model=given.model,
        mix=given.tuned.facts["mix"],
        weights=_weights(given, scored),
        lm=LmFacts(**_facts(given.lm)),
        overlap={split: corpus[split]["overlap"] for split in SPLITS},
        overlap_ngram=ngram,
        training=None if given.training is None else TrainingFacts(**given.training.facts),
        codec=CodecFacts(**given.codec.facts),
        index=IndexFacts(**given.indexed.facts),
        cache=None if given.cache is None else CacheFacts(**given.cache.facts),
        seconds=seconds,
        passages=passages,
    )
    for name, values in scores.items():
        draft.save(f"{name}.log_probs.npy", values.astype(np.float32))
    write_json(draft.file("report.json"), report.as_json())
    draft.write_text("report.md", markdown(report))
    plot_rows(report, draft.file("rows.png"))
    if given.training is not None:
        history = json.loads(given.training.text("history.json"))
        plot_training(history, given.training.facts["best_step"], draft.file("training.png"))
    return draft.finish({"predictors": list(names)})


def _weights(given: Evaluation, scored: SplitScores) -> dict[str, dict[str, WeightRow]]:
    """What one weight, buckets and a gate make of the test tokens, by predictor; empty without a gate."""
    text, store, variants = given.text, given.predictor.graphs.store, given.tuned.facts.get("variants", {})
    rows: dict[str, dict[str, WeightRow]] = {}
    for name in given.predictor.names:
        state = STATE_OF[name]
        if name not in MIXED or state not in variants:
            continue
        rows[name], without = {}, scored.log_probs[state]
        for variant, fitted in variants[state].items():
            chosen, scores = fitted["mix"] == given.tuned.facts["mix"][state], scored.log_probs[name]
            if not chosen:
                mix = Mix.of(fitted["mix"])
                sure = None if mix.gate is None else scored.sure[state]
                scores = sample_text(text, store, without, mix, sure).log_probs(mix).numpy()
            rows[name][variant] = WeightRow.of(scores, without, fitted["valid_loss"], chosen)
    return rows


def _facts(artifact: Artifact | None) -> dict[str, Any]:
    return {} if artifact is None else artifact.facts
