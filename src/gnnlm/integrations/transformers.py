"""An open book as a model of transformers: `from_pretrained(run)`, `forward`, `generate`, pipelines.

    import gnnlm.integrations.transformers  # registers the classes
    model = AutoModelForCausalLM.from_pretrained("runs/mine")

`logits[b, t]` are the log-probabilities of what follows `input_ids[b, t]`. A book reads the base model's start token
before every text. If `input_ids` begin with it, it is that one; else it is read before them, and has no logits. So ids
with and without the start token give the same predictions: those of the plain model on the ids that begin with it.

Shapes: B rows, T columns of ids, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnlm.book import Book, open_book
from gnnlm.config import load_config
from gnnlm.datastore.filter import Names
from gnnlm.errors import ConfigError
from gnnlm.integrations.drafted import drafted
from gnnlm.integrations.model_inputs import checked_ids, kept, new_columns, own_cache
from gnnlm.integrations.past_cache import Columns, LookupView, OpenBookCache
from gnnlm.lm.hf_loading import load_tokenizer
from gnnlm.lm.model_files import resolve_model
from gnnlm.lm.native_lm import is_native
from gnnlm.predict.predictor import Prediction
from gnnlm.retrieval.index import Allowed
from gnnlm.run import Run

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        Cache,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise ConfigError(f"this needs transformers 5 ({error}): pip install 'transformers>=5'") from error

__all__ = ["OpenBookCache", "OpenBookConfig", "OpenBookForCausalLM", "drafted"]
OWN = ("predictor", "only", "exclude")
WHEREVER = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that name no device
NOT_FOR_BOOKS = {  # options of other models' from_pretrained that change nothing here
    *("adapter_kwargs", "attn_implementation", "cache_dir", "code_revision", "force_download", "local_files_only"),
    *("low_cpu_mem_usage", "proxies", "revision", "token", "trust_remote_code", "use_safetensors"),
    *("weights_only", "_commit_hash", "_from_auto", "_from_pipeline"),
}


class OpenBookConfig(PreTrainedConfig):  # type: ignore[misc]
    """The predictor and the documents that a book is used with; everything else is in the run."""

    model_type = "gnnlm"
    keys_to_ignore_at_inference = ("past_key_values",)

    predictor: str | None = None
    only: str | list[str] | None = None
    exclude: str | list[str] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    use_cache: bool = True


class OpenBookForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A book as a frozen model of transformers. Its tensors stay in the book, so the model has no parameters.

    `predictor` (by default the best that the run has), `only` and `exclude` can be set on the model, or given to
    `forward` and `generate`.
    """

    config_class = OpenBookConfig
    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # whatever the base model does; not chosen here

    def __init__(self, config: OpenBookConfig, book: Book | None = None) -> None:
        if book is None:
            raise ConfigError("an open book is more than its config; use OpenBookForCausalLM.from_pretrained(RUN)")
        config.vocab_size, config.hidden_size = book.model.lm.vocab_size, book.model.lm.width
        super().__init__(config)
        self.book = book
        self._allowed: dict[LookupView, Allowed | None] = {}
        self.generation_config = _generation_config(book)
        self.view()  # refuses what the run does not have
        self.post_init()
        self.eval()

    # -- opening and saving --------------------------------------------------------------------------------

    @classmethod
    def from_book(cls, book: Book, **options: Any) -> OpenBookForCausalLM:
        """Return a model for a book that is already open; options are `predictor`, `only` and `exclude`."""
        return cls(OpenBookConfig(**_own(options), architectures=[cls.__name__]), book)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *_: Any, config: Any = None, **options: Any
    ) -> Any:
        """Open a finished run, or what `save_pretrained` wrote."""
        path = Path(pretrained_model_name_or_path)
        with_info = options.pop("output_loading_info", False)
        device = options.pop("device_map", None)
        dtypes = (options.pop("torch_dtype", None), options.pop("dtype", None))
        own = {name: options.pop(name) for name in OWN if name in options}
        rest = sorted(name for name in options if options[name] and name not in NOT_FOR_BOOKS)
        if rest:
            raise ConfigError(f"from_pretrained: no option named {rest[0]!r}; an open book has {', '.join(OWN)}")
        for kind in dtypes:
            if str(kind).removeprefix("torch.") not in ("None", "auto", "float32"):
                raise ConfigError(f"dtype: an open book's log-probabilities are float32 (got {kind}); leave it out")
        book = open_book(path)
        if not isinstance(config, OpenBookConfig):
            config = OpenBookConfig.from_pretrained(path) if (path / "config.json").is_file() else OpenBookConfig()
        for name, value in own.items():
            setattr(config, name, value)
        config.name_or_path, config.architectures = str(path), [cls.__name__]
        model = cls(config, book)
        model._refuse_other_device(device)
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
        if with_info:
            return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        return model

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write a run directory that opens again: here, with `gnnlm.open` and with transformers' Auto classes.

        The files of the run are linked where the file system can, else copied. A base model that the run did not train
        stays where it is. `save_directory` is new, empty, or the run itself.
        """
        if options.pop("push_to_hub", False):
            raise ConfigError("push_to_hub: an open book's store is not for the hub; copy the directory instead")
        place = Path(save_directory)
        origin = Path(self.book.origin)
        if not (origin / "config.yaml").is_file():
            raise ConfigError("a book that was not opened from a run cannot be saved; build a run first")
        if not place.exists() or not place.samefile(origin):
            Run(load_config(origin), reading=True).copy(place)
        self.config.save_pretrained(place)
        self.generation_config.save_pretrained(place)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(place)

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def predictor(self) -> str:
        return str(self.config.predictor or self.book.predictors[-1])

    @predictor.setter
    def predictor(self, name: str | None) -> None:
        self.config.predictor = name
        self.view()

    @property
    def only(self) -> Names:
        return self.config.only  # type: ignore[no-any-return]

    @only.setter
    def only(self, names: Names) -> None:
        self.config.only = names

    @property
    def exclude(self) -> Names:
        return self.config.exclude  # type: ignore[no-any-return]

    @exclude.setter
    def exclude(self, names: Names) -> None:
        self.config.exclude = names

    def view(self, predictor: str | None = None, only: Names = None, exclude: Names = None) -> LookupView:
        """Return the predictor and the documents of a call, by default the model's own."""
        name = predictor or self.predictor
        self.book.model.predictor.check((name,))
        only = self.only if only is None else only
        exclude = self.exclude if exclude is None else exclude
        return LookupView(name, _names(only), _names(exclude))

    def allowed(self, view: LookupView) -> Allowed | None:
        """Return the positions that a view may look up."""
        if view not in self._allowed:
            self._allowed.clear()
            self._allowed[view] = self.book.allowed(view.only, view.exclude)
        return self._allowed[view]

    @property
    def _tokenizer(self) -> Any:
        return getattr(self.book.model.lm, "tokenizer", None)

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer."""
        if self._tokenizer is None:
            raise ConfigError("this base model has no tokenizer of transformers; use book.model.lm.tokenize")
        return self._tokenizer

    @property
    def device(self) -> torch.device:
        return self.book.model.predictor.head.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def to(self, *places: Any, **options: Any) -> OpenBookForCausalLM:
        """Move nothing: lm.device and train.device of the run's config choose the device. Refuse another one."""
        for place in (*places, *options.values()):
            if isinstance(place, torch.dtype) and place != torch.float32:
                raise ConfigError(f"an open book's log-probabilities are float32 (got {place})")
            if isinstance(place, str | int | torch.device):
                self._refuse_other_device(place)
        return self

    def _refuse_other_device(self, place: Any) -> None:
        place = place.get("") if isinstance(place, dict) else place
        if place not in (None, *WHEREVER) and torch.device(place).type != self.device.type:
            raise ConfigError(
                f"this book is on {self.device} (got {place}); lm.device and train.device of its run say where it goes"
            )

    def get_input_embeddings(self) -> None:
        return None

    def get_output_embeddings(self) -> None:
        return None

    # -- reading -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        predictor: str | None = None,
        only: Names = None,
        exclude: Names = None,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return log-probabilities after every id (or the last `logits_to_keep`), the loss for labels, and a cache.

        Padding is where the mask is 0; without a mask there is none. At padding, every token is equally likely, except
        that a row of padding alone is an empty text, with a prediction of its first token.
        """
        given = sorted(name for name, value in others.items() if value is not None and value is not False)
        if given:
            raise ConfigError(f"forward: an open book takes no {given[0]}; it takes input_ids, and has no inner states")
        ids_BT = checked_ids(input_ids)
        view = self.view(predictor, only, exclude)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = own_cache(past_key_values) if past_key_values is not None or use_cache else OpenBookCache()
        cache.check(len(ids_BT), view)
        before = cache.columns or Columns.none(len(ids_BT))
        real_BT = new_columns(attention_mask, ids_BT, before.real_BS)
        after = before.grown(ids_BT, real_BT, self.book.model.lm.start_token)
        keep_T = kept(logits_to_keep, ids_BT.shape[1])
        vocab = self.book.model.lm.vocab_size
        logits_BTV = torch.full((len(ids_BT), len(keep_T), vocab), -torch.tensor(float(vocab)).log().item())
        logits_BTV = logits_BTV.to(self.device)
        # the prediction after a column is numbered by the tokens of the text up to there
        offsets_BS = after.real_BS.long().cumsum(1) - after.given_B[:, None].long()
        offsets_BS = offsets_BS.masked_fill(~after.real_BS & ~after.fresh_B[:, None], -1)
        wanted_BT = offsets_BS[:, before.real_BS.shape[1] :][:, keep_T]
        texts = [ids[real].tolist() for ids, real in zip(ids_BT, real_BT, strict=True)]
        begun_B = before.fresh_B & after.given_B
        texts = [text[1:] if begun else text for text, begun in zip(texts, begun_B.tolist(), strict=True)]
        past = cache.past
        if past is not None and bool((before.fresh_B & ~after.fresh_B).any()):  # a text begins while others continue
            texts = [[*old.tolist(), *new] for old, new in zip(past.lm.texts, texts, strict=True)]
            past = None
        allowed = self.allowed(view)
        for prediction, read in self.book.model.read_blocks(texts, past, (view.predictor,), allowed):
            self._fill(logits_BTV, wanted_BT, prediction, view.predictor)
            cache.put(read, after, view)
        loss = None
        if labels is not None:
            if labels.shape != logits_BTV.shape[:2]:
                raise ConfigError(f"labels: expected {list(logits_BTV.shape[:2])}, got {list(labels.shape)}")
            loss = self.loss_function(
                logits_BTV, labels.to(self.device), vocab_size=vocab, num_items_in_batch=num_items_in_batch
            )
        out = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache if use_cache else None)
        return out.to_tuple() if return_dict is False else out

    def _fill(self, logits_BTV: Tensor, wanted_BT: Tensor, prediction: Prediction, name: str) -> None:
        """Copy the predictions of a block to the columns that are asked for."""
        offsets_BS = prediction.read.cpu().masked_fill(~prediction.real.cpu(), -2)
        rows, columns, places = (wanted_BT[:, :, None] == offsets_BS[:, None, :]).nonzero(as_tuple=True)
        if len(rows):
            logits_BTV[rows, columns] = prediction[rows, places].log_probs((name,))[name]

    # -- generating ----------------------------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Provide an `OpenBookCache`; transformers calls this hook."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ConfigError(
                f"cache_implementation: an open book has a cache of its own (got "
                f"{generation_config.cache_implementation}); leave it out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = OpenBookCache()
        elif model_kwargs.get("past_key_values") is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *others)


class OpenBookTokenizer(PreTrainedTokenizerBase):  # type: ignore[misc]
    """Loads the tokenizer of a run's base model for `AutoTokenizer`; it returns a tokenizer of transformers."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *_: Any, **__: Any) -> Any:
        path = Path(pretrained_model_name_or_path)
        run = Run(load_config(path), reading=True)
        place = run.artifact("lm").path if "lm" in run.stages else resolve_model(run.config.lm.model)
        if place.is_dir() and is_native(place):
            raise ConfigError(f"{path}: its base model has no tokenizer of transformers; use book.model.lm.tokenize")
        return load_tokenizer(place)


AutoConfig.register(OpenBookConfig.model_type, OpenBookConfig, exist_ok=True)
AutoModelForCausalLM.register(OpenBookConfig, OpenBookForCausalLM, exist_ok=True)
AutoTokenizer.register(OpenBookConfig, OpenBookTokenizer, exist_ok=True)


def _own(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in OWN:
            raise ConfigError(f"no option named {name!r}; an open book has {', '.join(OWN)}")
    return options


def _names(names: Names) -> tuple[str, ...] | None:
    if names is None:
        return None
    return (names,) if isinstance(names, str) else tuple(names)


def _generation_config(book: Book) -> GenerationConfig:
    """Return the base model's own config, with the tokens that begin and end a text."""
    lm = book.model.lm
    theirs = getattr(getattr(lm, "model", None), "generation_config", None)
    config = GenerationConfig() if theirs is None else copy.deepcopy(theirs)
    config.bos_token_id, config.eos_token_id = lm.start_token, sorted(lm.end_tokens) or None
    return config
