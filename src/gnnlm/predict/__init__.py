"""States -> probabilities: the four predictors, in one place."""
