"""The stages in the order in which they are built; the one list of all of them."""

from __future__ import annotations

from gnnlm.corpus.corpus_stage import CORPUS
from gnnlm.datastore.codec_stage import CODEC
from gnnlm.datastore.encode_stage import ENCODE
from gnnlm.evaluate.eval_stage import EVAL
from gnnlm.evaluate.passages_stage import PASSAGES
from gnnlm.evaluate.tune_stage import TUNE
from gnnlm.predict.cache_stage import CACHE
from gnnlm.retrieval.index_stage import INDEX
from gnnlm.retrieval.search_stage import SEARCH
from gnnlm.stage import Stage
from gnnlm.train.lm_stage import LM
from gnnlm.train.train_stage import TRAIN

STAGES: dict[str, Stage] = {
    stage.name: stage for stage in (CORPUS, LM, ENCODE, CODEC, INDEX, SEARCH, TRAIN, CACHE, TUNE, PASSAGES, EVAL)
}
