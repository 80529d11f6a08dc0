"""The plan of a run: its sizes, the needs of the stages that are left, and the refusal of what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gnnlm.config import SCRATCH
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.load_lm import usable_device
from gnnlm.plan.fits import FreeResources, problems
from gnnlm.plan.needs import Need, PlanFacts, plan
from gnnlm.plan.rates import NO_TIME, Rates, measured_rates
from gnnlm.plan.sizes import ModelSizes, TextSize, text_sizes, untrained_lm, vocabulary_size

if TYPE_CHECKING:
    from gnnlm.run.run import Run

LARGEST = 4e8  # parameters of an untrained model that is built only to be measured
UNKNOWN_ROWS = 10**9  # of the store, while the amount of text is not known


def model_sizes(run: Run, load: bool = True) -> ModelSizes:
    """Return the sizes of the models; unless `load`, a finished store is asked first, so that no model is loaded."""
    if not load and run.state(run.stages["encode"]) == "done":
        return stored_sizes(run)
    if run.config.lm.model == SCRATCH:
        lm: BaseLM = untrained_lm(run.config, vocabulary_size(run.config, _corpus_facts(run)))
    else:
        lm = run.snapshot.source_lm
    return ModelSizes.of(run.config, lm)


def stored_sizes(run: Run) -> ModelSizes:
    """Return the sizes that a finished store records."""
    return ModelSizes.stored(run.config, run.artifact("encode").facts)


def sizes_of_text(run: Run) -> dict[str, TextSize]:
    """Return how much text each split has."""
    return text_sizes(run.config, _corpus_facts(run))


def _corpus_facts(run: Run) -> Mapping[str, Any] | None:
    """The facts of the corpus; None if it is not built."""
    state = run.state(run.stages["corpus"])
    if state in ("stale", "damaged"):
        raise ConfigError(
            f"{run.path('corpus')} is {state}; rebuild it (gnnlm corpus --rebuild), or choose another run directory"
        )
    return run.artifact("corpus").facts if state == "done" else None


def done_stages(run: Run) -> dict[str, int]:
    """Return the stages that are done, with their bytes on disk."""
    return {name: run.bytes_of(name) for name, stage in run.stages.items() if run.state(stage) == "done"}


def remaining(needs: Mapping[str, Need], run: Run) -> dict[str, Need]:
    """Return the needs of the stages that are not done; what a half-done stage has on disk is not needed again."""
    done = done_stages(run)
    return {
        name: replace(need, disk=max(0.0, need.disk - run.bytes_of(name)))
        for name, need in needs.items()
        if name not in done
    }


def rates_here(run: Run, sizes: ModelSizes, learning: bool, slowdown: float) -> Rates:
    """Measure this machine with the models of a run; a very large untrained base model is left out."""
    config, rows = run.config, UNKNOWN_ROWS
    with suppress(ConfigError):
        rows = sizes_of_text(run)["train"].tokens
    lm: BaseLM | None = None
    if config.lm.model != SCRATCH:
        lm = run.snapshot.source_lm
    elif sizes.parameters <= LARGEST:
        lm = untrained_lm(config, sizes.vocabulary, usable_device(config.lm.device))
    return measured_rates(config, sizes, rows, lm, learning and config.lm.is_trained, slowdown)


def check_fits(run: Run) -> None:
    """Refuse to go on with a run whose remaining stages need more memory or disk than there is."""
    facts = PlanFacts(model_sizes(run, load=False), sizes_of_text(run), NO_TIME)
    needs = remaining(plan(run.config, facts), run)
    for problem in problems(run.config, facts, needs, FreeResources.here(run.root)):
        raise ArtifactError(f"{problem}; --force starts the run in any case")
