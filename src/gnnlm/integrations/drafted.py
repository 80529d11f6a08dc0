"""Greedy generation with drafts from the book, as a loop of its own for `generate(custom_generate=drafted)`.

The ids equal those of stock greedy generation; only the time differs. The loop appends one column at a time and checks
all stopping criteria, as in transformers; the tokens come from the book's writer, which often checks several in a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from gnnlm.errors import ConfigError
from gnnlm.write.generate_options import GenerateOptions
from gnnlm.write.text_state import TextSettings


@torch.no_grad()
def drafted(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate greedily for `model.generate(..., custom_generate=drafted)`; `model` is an `OpenBookForCausalLM`."""
    lm = model.book.model.lm
    cache = model_kwargs.get("past_key_values")
    _refuse(generation_config, logits_processor)
    ends = generation_config._eos_token_tensor
    if set([] if ends is None else ends.tolist()) != lm.end_tokens:
        raise ConfigError(f"drafted: texts end at the base model's end tokens, eos_token_id={sorted(lm.end_tokens)}")
    if cache is not None and cache.get_seq_length():
        raise ConfigError("drafted: give the whole prompt as input_ids; it does not read on from past_key_values")
    view = model.view(*(model_kwargs.get(name) for name in ("predictor", "only", "exclude")))
    room = int(generation_config.max_length) - input_ids.shape[1]
    settings = TextSettings(GenerateOptions(), view.predictor, room, model.allowed(view))
    writer = model.book.writer(view.predictor)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"), lm.start_token)
    texts = [text for prompt in prompts for text in writer.add(prompt, settings)]
    padded = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)  # else all go to the end
    unfinished = [True] * len(texts)
    pad = generation_config._pad_token_tensor
    written = 0
    while any(unfinished):
        rows = [number for number, open_ in enumerate(unfinished) if open_ or not padded]
        if written == min(len(texts[row].tokens) for row in rows):
            writer.step()
            continue
        column = [text.tokens[written].id if row in rows else int(pad) for row, text in enumerate(texts)]
        input_ids = torch.cat([input_ids, torch.tensor(column, device=input_ids.device)[:, None]], 1)
        written += 1
        for number, stop in enumerate(stopping_criteria(input_ids, None).tolist()):
            if stop and unfinished[number]:
                unfinished[number] = False
                if padded:
                    writer.stop(texts[number], "stop")
    return GenerateDecoderOnlyOutput(sequences=input_ids) if generation_config.return_dict_in_generate else input_ids


def _refuse(config: Any, processors: Any) -> None:
    for name in ("do_sample", "output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ConfigError(f"drafted: generates greedily and gives ids alone; leave out {name}")
    if config.num_beams > 1:
        raise ConfigError(f"drafted: generates greedily; leave out num_beams (got {config.num_beams})")
    if processors:
        raise ConfigError(f"drafted: takes no logits processor (got {type(processors[0]).__name__})")


def _prompts(input_ids: Tensor, mask: Tensor | None, start: int) -> list[list[int]]:
    """Return the tokens of each row, without padding and start token."""
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    prompts = [ids[here].tolist() for ids, here in zip(input_ids, real, strict=True)]
    return [prompt[1:] if prompt[:1] == [start] else prompt for prompt in prompts]
