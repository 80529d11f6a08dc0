"""Examples of what retrieval does: drawn at random, not picked."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from pydantic import TypeAdapter

from gnnlm.evaluate.examples import Example, Examples, find_examples, is_clear_gain, render_choice, render_example
from gnnlm.run import Run


def drawn_from(run: Run, base: np.ndarray, best: np.ndarray, seed: int, count: int = 2) -> Examples:
    parts = run.snapshot
    return find_examples(parts.searched("test"), parts.streams["test"], parts.store, base, best, count, seed)


def test_drawn_at_random_among_clear_gains(tiny_run: Run) -> None:
    tokens = tiny_run.snapshot.streams["test"].token_count
    rng = np.random.default_rng(0)
    base = np.log(rng.uniform(0.01, 0.3, tokens)).astype(np.float32)
    best = base.copy()
    gains = rng.choice(tokens, tokens // 2, replace=False)
    best[gains] = np.log(0.95)
    found = drawn_from(tiny_run, base, best, seed=0)
    assert len(found.sample) == 2
    assert 0 < found.gains < found.words <= tokens
    assert found.losses == 0
    for example in found.sample:
        before, after = example.probabilities.values()
        assert is_clear_gain(np.log(before), np.log(after))
        assert f"p {before:.3f} -> {after:.3f}" in render_example(example).plain
        assert TypeAdapter(Example).validate_python(json.loads(json.dumps(asdict(example)))) == example
    assert len({example.query.document for example in found.sample}) == 2
    assert drawn_from(tiny_run, base, best, seed=0) == found
    many = {drawn_from(tiny_run, base, best, seed=seed, count=1).sample[0].query for seed in range(12)}
    assert len(many) > 6  # the seed decides, not the size of the gain
    assert f"at random among {found.gains:,} clear gains" in render_choice(found)
    turned = drawn_from(tiny_run, best, base, seed=0)
    assert (turned.gains, turned.losses, turned.sample) == (0, found.gains, [])
    assert render_choice(turned).startswith("No examples: none of ")
