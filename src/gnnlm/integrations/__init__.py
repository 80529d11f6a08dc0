"""Open books where plain models go: `transformers.py` and `lm_eval.py`."""
