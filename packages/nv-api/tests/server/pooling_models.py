"""Tiny models that pool, and servers over them: embeddings, three labels, one label."""

import json
import time
from contextlib import contextmanager
from copy import deepcopy

import nv_api
import nv_api.async_llm
import pytest
import torch
from nv_engine import StepOutput
from running_server import RunningServer
from scripted_device import HostThread
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForSequenceClassification, Qwen3Config

EOS, MAX_LEN, WIDTH = 256, 48, 64
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": MAX_LEN,
           "num_kvcache_blocks": 40}  # fmt: skip
SIZES = {"vocab_size": 320, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "max_position_embeddings": 128, "initializer_range": 0.15, "eos_token_id": EOS,
         "pad_token_id": 319, "dtype": "float32"}  # fmt: skip
PROMPTS = {"prompts": {"query": "find: ", "document": ""}}
KINDS = {
    "embedder": (AutoModel, {}),
    "classifier": (
        AutoModelForSequenceClassification,
        {"id2label": {0: "joy", 1: "fear", 2: "anger"}},
    ),
    "reranker": (AutoModelForSequenceClassification, {"num_labels": 1}),
}


def save(kind, folder, byte_level):
    """Write a tiny model of a kind, whose tokenizer ends each text with EOS."""
    tokenizer = deepcopy(byte_level)
    end = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, EOS)]
    )
    model, fields = KINDS[kind]
    torch.manual_seed(1)
    model.from_config(Qwen3Config(**SIZES | fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    if kind == "embedder":
        modules = [
            {"type": name, "path": f"{i}_{name}" if i else ""}
            for i, name in enumerate(("Transformer", "Pooling", "Normalize"))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


class PoolingServer(RunningServer):
    """A server over a model that pools.

    Args:
        folder: of the checkpoint.
        **options: as of ServeOptions.
    """

    def __init__(self, folder, **options):
        self.folder = str(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nv_api.async_llm, "HostProcess", self._make_host)
            super().__init__(lambda: nv_api.AsyncLLM(self.folder, **OPTIONS), **options)

    def _make_host(self):
        self.host = HostThread(None)
        return self.host

    @property
    def work(self):
        """The work of the engine: requests taken in, and steps."""
        metrics = self.host.engine.metrics
        return metrics.num_requests, metrics.num_steps

    @contextmanager
    def paused(self):
        """The engine takes requests in and makes no step."""

        def rest():
            time.sleep(0.002)
            return StepOutput([], num_prefill_tokens=0, num_decode_tokens=0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.host.engine, "step_columns", rest)
            yield

    def post(self, path, body, **more):
        return self.client.post(path, json=body, **more)
