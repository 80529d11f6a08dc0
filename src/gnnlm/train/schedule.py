"""The plan of a training: the number of steps, the learning rate of each step, and when to validate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnnlm.config.config_section import TrainingSection


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How many steps, at which rates, and how often to validate.

    `tokens` is about the number of tokens that a step reads, for the progress line. `section` is the config section
    that sets the plan, for error messages.
    """

    config: TrainingSection
    steps: int
    schedule: str
    tokens: int = 1
    label: str = "train"
    section: str = "train"

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0): linear warm-up, then the chosen decay.

        >>> plan = TrainingPlan(config=TrainingSection(lr=1.0, warmup=2), steps=6, schedule="linear")
        >>> [round(plan.learning_rate(step), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        lr, warmup = self.config.lr, self.config.warmup
        if step < warmup:
            return lr * (step + 1) / warmup
        if self.schedule == "inverse-sqrt":
            return lr * math.sqrt(max(1, warmup) / (step + 1))
        done = (step - warmup) / max(1, self.steps - warmup)
        if self.schedule == "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * done))
        return lr * (1 - done if self.schedule == "linear" else 1.0)

    def validates_after(self, step: int) -> bool:
        """Return whether to validate after this many steps."""
        return step % self.config.validate_every == 0 or step == self.steps

    def validations_left(self, step: int) -> int:
        """Return how many validations come after this many steps.

        >>> plan = TrainingPlan(config=TrainingSection(validate_every=4), steps=10, schedule="linear")
        >>> [plan.validations_left(step) for step in (0, 3, 4, 8, 9, 10)]
        [3, 3, 2, 1, 1, 0]
        """
        every = self.config.validate_every
        last = 1 if self.steps % every and step < self.steps else 0
        return self.steps // every - step // every + last
