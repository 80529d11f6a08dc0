"""Whether a run fits on a machine: refused before it begins if not, with the setting that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import human_bytes
from gnnlm.config import Config, changed
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.run.machine import Machine
from gnnlm.run.plan import Need, plan
from gnnlm.run.rates import NO_TIME
from gnnlm.run.sizes import Amount, Description, amounts, describe, done_stages

if TYPE_CHECKING:
    from gnnlm.run.run import Run

SETTINGS: tuple[tuple[str, Any], ...] = (  # tried in this order, each by itself
    ("store.dtype", "fp16"),
    ("index.kind", "auto"),
    ("cache.form", "none"),
    ("train.checkpoint", True),
    ("train.batch_blocks", 1),
    ("eval.block", 64),
    ("lm.batch_tokens", 512),
    ("lm.train.batch_tokens", 1024),
    ("lm.finetune.batch_tokens", 1024),
)
HALVED = ("search.max_train", "corpus.max_train_tokens")  # then these, halved until it fits


@dataclass(frozen=True)
class Shortage:
    """A stage that needs more of something than there is."""

    stage: str
    what: str  # memory or disk
    needed: float
    there: float

    @property
    def words(self) -> str:
        if self.what == "disk":
            return (
                f"the run still needs about {human_bytes(self.needed)} of disk, most of it for {self.stage}, but "
                f"{human_bytes(self.there)} are free"
            )
        return f"{self.stage} needs about {human_bytes(self.needed)} of memory, but {human_bytes(self.there)} are free"


def shortages(needs: Mapping[str, Need], machine: Machine) -> list[Shortage]:
    """What the remaining stages lack: memory one by one, disk all together."""
    found = [
        Shortage(name, "memory", need.memory, machine.memory)
        for name, need in needs.items()
        if need.memory > machine.memory
    ]
    disk = sum(need.disk for need in needs.values())
    if disk > machine.disk:
        found.append(Shortage(max(needs, key=lambda name: needs[name].disk), "disk", disk, machine.disk))
    return found


def remaining(needs: Mapping[str, Need], run: Run) -> dict[str, Need]:
    """The needs of the stages that are not done; what is on the disk of a half-done one is not needed again."""
    done = done_stages(run)
    return {
        name: replace(need, disk=max(0.0, need.disk - run.bytes_of(name)))
        for name, need in needs.items()
        if name not in done
    }


def remedy(
    lack: Shortage, config: Config, about: Description, text: dict[str, Amount], machine: Machine, names: set[str]
) -> str:
    """The one setting that would make it fit, as `name=value`; empty if none would.

    `names` are the stages that remain; each setting is tried by planning with it.
    """
    for name, value in (*SETTINGS, *_halved(config, text)):
        try:
            other = changed(config, {name: value})
            if other == config:
                continue
            fewer = name == "corpus.max_train_tokens"
            smaller = {**text, "train": text["train"].scaled(value)} if fewer else text
            needs = plan(other, about, smaller, NO_TIME)
        except ConfigError:  # not for this run
            continue
        left = shortages({stage: need for stage, need in needs.items() if stage in names}, machine)
        if not any(short.what == lack.what and (lack.what == "disk" or short.stage == lack.stage) for short in left):
            return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
    return ""


def _halved(config: Config, text: dict[str, Amount]) -> Iterator[tuple[str, int]]:
    for name in HALVED:
        value = text["train"].tokens // 2
        while value >= 1000:
            yield name, value
            value //= 2


def problems(
    config: Config, about: Description, text: dict[str, Amount], needs: Mapping[str, Need], machine: Machine
) -> list[str]:
    """What does not fit, each with the setting that would make it fit."""
    words = []
    for lack in shortages(needs, machine):
        setting = remedy(lack, config, about, text, machine, set(needs))
        advice = (
            f"the run would fit with --set {setting}"
            if setting
            else "no single setting makes the run fit: use less text"
        )
        words.append(f"{lack.words}; {advice}")
    return words


def check_fits(run: Run) -> None:
    """Refuse to go on with a run whose remaining stages need more memory or disk than there is."""
    text = amounts(run)
    about = describe(run, whole_model=False)
    needs = remaining(plan(run.config, about, text, NO_TIME), run)
    found = problems(run.config, about, text, needs, Machine.here(run.root)) if needs else []
    if found:
        raise ArtifactError(f"{found[0]}; --force starts the run in any case")
