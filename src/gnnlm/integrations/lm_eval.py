"""An open book as a model of lm-evaluation-harness: `simple_evaluate(model="gnnlm", model_args="run=runs/mine")`.

Requests go through `Book.score` and `Book.generate`, in batches. Texts of any length are read whole, by the window rule
of the run: nothing is cut off, and a rolling log-likelihood is what `gnnlm eval` gives for the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gnnlm.book import Book, open_book
from gnnlm.datastore.filter import Names
from gnnlm.errors import ConfigError, GnnlmError
from gnnlm.predict.scoring import Text, tokenized
from gnnlm.progress import Track

try:
    import lm_eval.models  # first: it registers its own models, and would put them in the place of ours
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(f"lm-evaluation-harness is missing ({error}): pip install 'gnnlm[eval-harness]'") from error

MAX_TOKENS = 256  # written for a request that does not say
PROMPTS = 8  # written at once, if no batch_size is given
SCORED = 64  # requests that are scored between two steps of the progress bar
Encoded = tuple[tuple[str, str], list[int], list[int]]  # the texts, the context, the continuation


@register_model("gnnlm")
class OpenBookLM(TemplateLM):  # type: ignore[misc]
    """A book that answers lm-eval's three kinds of requests."""

    def __init__(
        self,
        run: str | Path | Book | None = None,
        predictor: str | None = None,
        only: Names = None,
        exclude: Names = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if run is None:
            raise ConfigError('name a finished run: model_args="run=runs/mine"')
        self.prompts = _batch_size(batch_size, max_batch_size)
        self.book = run if isinstance(run, Book) else open_book(str(run))
        self.predictor = predictor or self.book.predictors[-1]
        self.book.model.predictor.check((self.predictor,))
        self.filter: dict[str, Any] = {"only": only, "exclude": exclude}
        self.book.allowed(**self.filter)  # refuses names that no document has
        self._device = self.book.model.predictor.head.device
        if device is not None and device.split(":")[0] != self._device.type:
            raise ConfigError(f"this book is on {self._device} (got {device}); its run's config says where it goes")

    # -- tokens --------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return f"gnnlm:{self.book.origin}"

    @property
    def prefix_token_id(self) -> int:
        return self.book.model.lm.start_token

    @property
    def eot_token_id(self) -> int:
        return min(self.book.model.lm.end_tokens, default=self.book.model.lm.start_token)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids without the start token, which a book reads by itself."""
        return self._text(tokenized(self.book.model, string)[0])

    def _text(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:1] == [self.prefix_token_id] else ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return str(self._template()) if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self._template()
        text: str = self.book.model.lm.tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _template(self) -> Any:
        found = getattr(getattr(self.book.model.lm, "tokenizer", None), "chat_template", None)
        if not found:
            raise ConfigError("this model's tokenizer has no chat template; evaluate without one")
        return found

    # -- requests ------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Encoded], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether all of its tokens are the likeliest."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number][1]) - len(requests[number][2]))
        for some in _parts(order, SCORED, "loglikelihood"):
            texts: list[Text] = [(self._text(requests[number][1]), requests[number][2]) for number in some]
            for number, scores in zip(some, self.book.score(texts, **self._asked()), strict=True):
                sum_ = float(scores.log_probs[self.predictor].sum(dtype="float64"))
                found[number] = sum_, bool(scores.top1[self.predictor].all())
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, every token scored once, in one pass of the book's own reader."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        found = [0.0] * len(texts)  # a text without tokens is certain
        real = sorted((number for number, ids in enumerate(texts) if ids), key=lambda number: -len(texts[number]))
        for some in _parts(real, PROMPTS, "loglikelihood_rolling"):
            pairs: list[Text] = [([], texts[number]) for number in some]
            for number, scores in zip(some, self.book.score(pairs, **self._asked()), strict=True):
                found[number] = float(scores.log_probs[self.predictor].sum(dtype="float64"))
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, found[number])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to a stop string or an end token."""
        groups: dict[str, list[int]] = {}
        seen: dict[str, int] = {}
        for number, request in enumerate(requests):
            context, options = request.args
            asked = self._options(options)
            key = json.dumps([context, asked], sort_keys=True)
            seen[key] = seen.get(key, -1) + 1
            if asked["temperature"]:  # asked for again, a sample is another sample
                asked["seed"] = asked.get("seed", 0) + seen[key]
            groups.setdefault(json.dumps(asked, sort_keys=True), []).append(number)
        found = [""] * len(requests)
        for options, numbers in groups.items():
            for some in _parts(numbers, self.prompts, "generate_until"):
                prompts = [self.tok_encode(requests[number].args[0]) for number in some]
                written = self.book.generate(prompts, predictor=self.predictor, **self.filter, **json.loads(options))
                for number, one in zip(some, written, strict=True):
                    found[number] = one.text
                    self.cache_hook.add_partial("generate_until", requests[number].args, one.text)
        return found

    def _asked(self) -> dict[str, Any]:
        return {"predictors": [self.predictor], **self.filter}

    def _options(self, options: Any) -> dict[str, Any]:
        """Return the options of a request as options of `Book.generate`."""
        if not isinstance(options, dict):
            raise ConfigError(f"generation_kwargs: expected a mapping, got {type(options).__name__}")
        asked = dict(normalize_gen_kwargs(options, MAX_TOKENS))
        sampled = asked.pop("do_sample", False)
        asked["temperature"] = float(asked.get("temperature") or (1.0 if sampled else 0.0))
        if asked.pop("num_beams", 1) != 1:
            raise ConfigError(f"num_beams: a book writes without beams (got {options['num_beams']}); leave it out")
        asked["max_tokens"] = asked.pop("max_gen_toks")
        until = asked.pop("until", None) or []
        asked["stop"] = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        return asked


def evaluate(
    lm: OpenBookLM,
    tasks: Sequence[str],
    include_path: Path | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Return the results of tasks: `results` and `n-samples` by task, and what they depend on; without the samples."""
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        use_cache=None if cache is None else str(cache),
        log_samples=False,
        task_manager=_manager(tasks, include_path),
    )
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    about = {"run": lm.book.origin, "predictor": lm.predictor, **lm.filter}
    return {**about, **{name: found[name] for name in kept if name in found}}


class Tasks(TaskManager):  # type: ignore[misc]
    """lm-eval's tasks; an error in loading one becomes one line."""

    def load(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().load(*arguments, **options)
        except GnnlmError:
            raise
        except Exception as error:  # tasks download data and run code of their own, and raise what they like
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"lm-eval cannot load the task ({type(error).__name__}: {reason})") from error


def _manager(tasks: Sequence[str], include_path: Path | None) -> Tasks:
    """Return a manager that has these tasks; list lm-eval's own, which takes long, only if they are needed."""
    if include_path is not None:
        if not include_path.is_dir():
            raise ConfigError(f"{include_path}: expected a folder with YAML tasks, found none; check the path")
        manager = Tasks(include_path=str(include_path), include_defaults=False)
        if all(name in manager.all_tasks for name in tasks):
            return manager
    manager = Tasks(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        raise ConfigError(
            f"lm-eval has no task named {', '.join(unknown) or '(none given)'}; `lm-eval ls tasks` lists its own, "
            "--include-path names a folder with more"
        )
    return manager


def _parts(items: Sequence[int], size: int, label: str) -> Iterator[list[int]]:
    """A few at a time, with progress."""
    with Track(label, len(items), "requests") as track:
        for start in range(0, len(items), size):
            yield list(items[start : start + size])
            track.advance(min(size, len(items) - start))


def _batch_size(size: int | str | None, most: int | None) -> int:
    """How many prompts are written at once."""
    if size is None or str(size).startswith("auto"):
        size = PROMPTS
    if not str(size).isdigit() or int(size) < 1:
        raise ConfigError(f"batch_size: expected a whole number from 1 on, or auto; got {size}")
    return int(size) if most is None else min(int(size), most)
