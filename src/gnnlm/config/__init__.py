"""The one config file: every field typed, documented, checked and overridable.

The fields of a section are in the file named after what they configure. `config_model.py` joins the sections,
`config_file.py` reads a file with `plain_yaml.py`, and `messages.py` words the errors. Knows nothing of what the stages
do with the values.
"""

from gnnlm.config.config_file import changed, dump_config, load_config, parse_config
from gnnlm.config.config_model import Config, field_names, flat
from gnnlm.config.config_section import ConfigSection, TrainingSection
from gnnlm.config.corpus_config import CorpusConfig
from gnnlm.config.evaluation_config import ContextRetrievalConfig, EvalConfig, TuneConfig
from gnnlm.config.lm_config import SCRATCH, ArchitectureConfig, FinetuneConfig, FitConfig, LMConfig, LMTrainConfig
from gnnlm.config.network_config import CacheConfig, GnnConfig, Phase, TrainConfig
from gnnlm.config.retrieval_config import CodecConfig, IndexConfig, SearchConfig, StoreConfig

__all__ = [
    "SCRATCH",
    "ArchitectureConfig",
    "CacheConfig",
    "CodecConfig",
    "Config",
    "ConfigSection",
    "ContextRetrievalConfig",
    "CorpusConfig",
    "EvalConfig",
    "FinetuneConfig",
    "FitConfig",
    "GnnConfig",
    "IndexConfig",
    "LMConfig",
    "LMTrainConfig",
    "Phase",
    "SearchConfig",
    "StoreConfig",
    "TrainConfig",
    "TrainingSection",
    "TuneConfig",
    "changed",
    "dump_config",
    "field_names",
    "flat",
    "load_config",
    "parse_config",
]
