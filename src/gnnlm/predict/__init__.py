"""From states to probabilities: the four predictors, in one place."""
