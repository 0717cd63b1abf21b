"""Pooling: what is made of a prompt's hidden states in place of logits.

`pooler_config` has the record, `read_pooler` makes it of a model's files, and `pooler` computes.
Never sees a request.
"""

from nv_models.pooling.pooler import Pooler
from nv_models.pooling.pooler_config import PoolerConfig
from nv_models.pooling.read_pooler import read_pooler

__all__ = ["Pooler", "PoolerConfig", "read_pooler"]
