"""Loading and saving transformers models, without running a model's own code and without making up weights.

transformers fills weights that a file lacks with random numbers, and offers to run code that comes with a model. Here
only safetensors and GGUF files are read, custom code is never run, and a model whose weights do not fit its config
exactly is refused with the names of the tensors.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gnnlm.artifact import disk
from gnnlm.config import LMConfig
from gnnlm.errors import ModelError
from gnnlm.lm.hf_model import HFModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAFE = {"trust_remote_code": False, "local_files_only": True}
UNREADABLE = "the file cannot be read; is it whole, and of a kind that transformers supports?"
NAMED = 3  # tensors that a message names
REASONS = {  # short words for long messages of transformers, which speak of its own parameters
    "custom code": "it needs Python code from its own files, which is never run here",
    "instantiate the backend tokenizer": "there are none",
    "above report": "transformers cannot convert its tensors",
}


def load_hf(path: Path, config: LMConfig, device: str) -> HFModel:
    """Load a model directory or a .gguf file with transformers."""
    with _quiet_transformers() as transformers:
        load = _load_gguf if path.is_file() else _load_folder
        try:
            model, tokenizer = load(transformers, path)
            limit = getattr(model.config, "max_position_embeddings", None)
            if limit is not None and config.window > limit:
                raise ModelError(f"it reads at most {limit} tokens, lm.window is {config.window}; lower lm.window")
            with _refusing(f"it cannot be put on lm.device {device}"):
                model = model.to(device)
            return HFModel(model, tokenizer, config.start, config.dtype)
        except ModelError as error:
            raise ModelError(f"lm.model {config.model}: {error}") from error


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a model directory or a .gguf file, without the model."""
    with _quiet_transformers() as transformers:
        return _gguf_tokenizer(transformers, path) if path.is_file() else _folder_tokenizer(transformers, path)


def save_hf(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a directory that transformers loads, with plain float32 weights whatever the model was loaded from."""
    with _quiet_transformers() as transformers:
        fresh = _from_config(transformers, model.config)
        fresh.load_state_dict(model.state_dict())
        with disk.written(folder):
            fresh.save_pretrained(folder)
            tokenizer.save_pretrained(folder)


def _from_config(transformers: Any, config: Any) -> Any:
    """Return a model with initial weights that a config describes, not quantized."""
    config = copy.deepcopy(config)
    for name in ("quantization_config", "_pre_quantization_dtype"):  # a GGUF file counts as quantized
        if hasattr(config, name):
            delattr(config, name)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


# -- a directory --------------------------------------------------------------------------------------------------


def _load_folder(transformers: Any, folder: Path) -> tuple[Any, Any]:
    described = _read_json(folder / "config.json")
    _check_architecture(transformers, described)
    _check_weights(folder, described)
    with _refusing("its config.json cannot be used"):
        config = transformers.AutoConfig.from_pretrained(folder, **SAFE)
    tokenizer = _folder_tokenizer(transformers, folder, config)
    with _refusing("its weights cannot be loaded"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **SAFE,
        )
    shapes = {name: (tuple(theirs), tuple(ours)) for name, theirs, ours in report["mismatched_keys"]}
    _refuse_misfits(report["missing_keys"], report["unexpected_keys"], shapes)
    return model, tokenizer


def _folder_tokenizer(transformers: Any, folder: Path, config: Any = None) -> Any:
    with _refusing("its tokenizer cannot be loaded; expected tokenizer.json, or the files that the model came with"):
        return transformers.AutoTokenizer.from_pretrained(folder, config=config, **SAFE)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"its {file.name} cannot be read ({error}); get the file again") from error
    if not isinstance(found, dict):
        raise ModelError(f"its {file.name} holds no settings (it is a {type(found).__name__}); get the file again")
    return found


def _check_architecture(transformers: Any, described: dict[str, Any]) -> None:
    """Refuse a kind of model that transformers itself does not have, or that does not predict the next token."""
    kind = described.get("model_type")
    if not kind:
        raise ModelError("its config.json names no model_type; expected the config of a transformers model")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if described.get("auto_map"):
        raise ModelError(
            f"model_type {kind} needs Python code from its own files, which is never run here; use a model that "
            "transformers itself supports"
        )
    if kind in transformers.CONFIG_MAPPING:
        raise ModelError(f"model_type {kind} is not a causal language model; use one that predicts the next token")
    raise ModelError(
        f"transformers {transformers.__version__} does not know model_type {kind}; a newer version may "
        "(pip install -U transformers)"
    )


def _check_weights(folder: Path, described: dict[str, Any]) -> None:
    """Refuse weights that are not safetensors, are incomplete, or cannot be read."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            "it holds an adapter (adapter_config.json); merge it into the model first (peft: merge_and_unload, then "
            "save_pretrained)"
        )
    named = str(described.get("transformers_weights") or "")
    names = [named] if named else [WEIGHTS, INDEX]
    first = next((folder / name for name in names if (folder / name).is_file()), None)
    if first is None:
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if not pickled:
            raise ModelError(f"it has no weights: expected {' or '.join(names)}; get them")
        raise ModelError(
            f"its weights are pickled ({pickled[0]}), and loading a pickle can run code; where you trust it, convert "
            f'it with transformers: AutoModelForCausalLM.from_pretrained("{folder}").save_pretrained("{folder}")'
        )
    shards = [first]
    if first.suffix == ".json":
        index = _read_json(first).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(f"its {first.name} lists no weights; get the file again")
        shards = sorted({folder / str(name) for name in index.values()})
    for shard in shards:
        try:
            with safe_open(shard, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise ModelError(f"{shard.name} is missing, which {first.name} lists; get the file") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{shard.name} is damaged or cut short ({_reason(error)}); get the file again") from error


# -- a GGUF file --------------------------------------------------------------------------------------------------


def _load_gguf(transformers: Any, path: Path) -> tuple[Any, Any]:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("a .gguf file needs pip install 'gnnlm[gguf]'")
    tokenizer = _gguf_tokenizer(transformers, path)
    with tempfile.TemporaryDirectory() as empty:  # or transformers would read files that lie beside this one
        file = {"gguf_file": str(path.resolve()), **SAFE}
        with _refusing(UNREADABLE):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                empty, dtype=torch.float32, output_loading_info=True, **file
            )
            lost, unused = _compare_with_gguf(path, model)
            with torch.device("meta"):
                expected = _from_config(transformers, model.config).state_dict()
    shapes = {
        name: (tuple(tensor.shape), tuple(expected[name].shape))
        for name, tensor in model.state_dict().items()
        if name in expected and tensor.shape != expected[name].shape  # transformers takes them as they are
    }
    _refuse_misfits({*report["missing_keys"], *lost}, {*report["unexpected_keys"], *unused}, shapes)
    return model, tokenizer


def _gguf_tokenizer(transformers: Any, path: Path) -> Any:
    with tempfile.TemporaryDirectory() as empty, _refusing(UNREADABLE):
        return transformers.AutoTokenizer.from_pretrained(empty, gguf_file=str(path.resolve()), **SAFE)


def _compare_with_gguf(path: Path, model: Any) -> tuple[list[str], list[str]]:
    """Return tensors that the file lacks, and tensors of the file that transformers ignores; it reports neither."""
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as older

    if getattr(getattr(model, "hf_quantizer", None), "supported", False):  # the newer reader reports them
        return [], []
    reader = GGUFReader(path)
    field = reader.fields["general.architecture"]
    architecture = bytes(field.parts[field.data[0]]).decode()
    names = {tensor.name for tensor in reader.tensors}
    processor = older.TENSOR_PROCESSORS.get(architecture, older.TensorProcessor)(config=model.config.to_dict())
    known = older.get_gguf_hf_weights_map(model, processor)
    # a stack of experts has no suffix in the map; transformers fills it with zeros if the file lacks it
    lost = [f"{name}.weight" for name in known if name.endswith("_exps") and f"{name}.weight" not in names]
    return lost, [name for name in names if name not in known and name.removesuffix(".weight") not in known]


# -- messages -----------------------------------------------------------------------------------------------------


def _refuse_misfits(
    missing: Iterable[str], unexpected: Iterable[str], shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Refuse weights that are not exactly the model's, by name."""
    reshaped = [f"{name} {list(theirs)} instead of {list(ours)}" for name, (theirs, ours) in shapes.items()]
    problems = []
    for what, names in (("missing", missing), ("not in the model", unexpected), ("wrong shape", reshaped)):
        if ordered := sorted(names):
            more = ", ..." if len(ordered) > NAMED else ""
            problems.append(f"{what} ({len(ordered)}): {', '.join(ordered[:NAMED])}{more}")
    if problems:
        raise ModelError(
            f"its tensors are not those that its config describes; {'; '.join(problems)}; get the whole model again, "
            "or in another format"
        )


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn any error inside the block into one line of our own."""
    try:
        yield
    except Exception as error:  # transformers, tokenizers, safetensors and gguf raise errors of many kinds
        raise ModelError(f"{what} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the message of another library's error, without its headings and its advice to programmers."""
    whole = str(error)
    known = next((ours for theirs, ours in REASONS.items() if theirs in whole), None)
    lines = [line.strip().replace("`", "") for line in whole.splitlines()]
    first = next((line for line in lines if line and not line.endswith(":")), type(error).__name__)
    return known or first[:160]


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """Import transformers without its progress bars and advice; errors still come as exceptions."""
    import transformers

    was = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield transformers
    finally:
        transformers.logging.set_verbosity(was)
