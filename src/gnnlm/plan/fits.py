"""Whether a plan fits on a machine and, if it does not, which setting would make it fit."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnnlm.artifact import free_space, human_bytes
from gnnlm.config import Config, changed
from gnnlm.errors import ConfigError
from gnnlm.plan.needs import Need, PlanFacts, plan

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
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
HALVED = ("search.max_train", "corpus.max_train_tokens")  # then these, halved until the run fits


@dataclass(frozen=True)
class FreeResources:
    """Bytes of memory and of disk that are free."""

    memory: float
    disk: float

    @classmethod
    def here(cls, folder: Path) -> FreeResources:
        """What is free on this machine for a run in this folder, whether or not the folder exists yet."""
        return cls(free_memory(), float(free_space(folder.absolute())[1]))


def free_memory() -> float:
    """Return the bytes that this process may still take: what is free, within the limit of its container."""
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError, StopIteration):
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        free = 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        free = min(free, float(limit - int((CGROUP / "memory.current").read_text(encoding="ascii"))))
    return free


@dataclass(frozen=True)
class Shortage:
    """A stage that needs more memory or disk than there is."""

    stage: str
    resource: str  # memory or disk
    needed: float
    free: float

    def __str__(self) -> str:
        needed, free = human_bytes(self.needed), human_bytes(self.free)
        if self.resource == "disk":
            return f"the run still needs about {needed} of disk, most of it for {self.stage}, but {free} are free"
        return f"{self.stage} needs about {needed} of memory, but {free} are free"

    def same_as(self, other: Shortage) -> bool:
        """Return whether both lack the same: disk is lacked by the run, memory by a stage."""
        return self.resource == other.resource and (self.resource == "disk" or self.stage == other.stage)


def shortages(needs: Mapping[str, Need], free: FreeResources) -> list[Shortage]:
    """Return what the stages lack: memory one by one, disk all together."""
    lacking = [
        Shortage(name, "memory", need.memory, free.memory) for name, need in needs.items() if need.memory > free.memory
    ]
    disk = sum(need.disk for need in needs.values())
    if disk > free.disk:
        largest = max(needs, key=lambda name: needs[name].disk)
        lacking.append(Shortage(largest, "disk", disk, free.disk))
    return lacking


def remedy(shortage: Shortage, config: Config, facts: PlanFacts, free: FreeResources, stages: Collection[str]) -> str:
    """Return the one setting that would end a shortage of these stages, as `name=value`; empty if none would."""
    for name, value in (*SETTINGS, *_halvings(facts)):
        try:
            other = changed(config, {name: value})
            if other == config:
                continue
            text = facts.text
            if name == "corpus.max_train_tokens":
                text = {**text, "train": text["train"].scaled(value)}
            needs = plan(other, replace(facts, text=text))
        except ConfigError:  # the setting is not for this run
            continue
        left = shortages({stage: need for stage, need in needs.items() if stage in stages}, free)
        if not any(each.same_as(shortage) for each in left):
            return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
    return ""


def _halvings(facts: PlanFacts) -> Iterator[tuple[str, int]]:
    for name in HALVED:
        value = facts.text["train"].tokens // 2
        while value >= 1000:
            yield name, value
            value //= 2


def problems(config: Config, facts: PlanFacts, needs: Mapping[str, Need], free: FreeResources) -> Iterator[str]:
    """Say what does not fit, each time with the setting that would make it fit."""
    for shortage in shortages(needs, free):
        setting = remedy(shortage, config, facts, free, needs)
        if setting:
            yield f"{shortage}; the run would fit with --set {setting}"
        else:
            yield f"{shortage}; no single setting makes the run fit: use less text"
