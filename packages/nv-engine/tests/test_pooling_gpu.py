"""Pooling in bf16 on a card, in CUDA graphs, against its definition in fp32."""

import pytest
import torch
from nv_engine.device.graphs import Graphs
from test_pooling import ASKED, MODES, PROMPTS, folders, pool, start, states, truth, values

__all__ = ["folders", "states"]  # fixtures

LEAST_COSINE = 0.9995


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_bf16_in_graphs_points_the_same_way(folders, states, mode, monkeypatch):
    replays, replay = [], Graphs.replay

    def counted(self, *args, **more):
        replays.append(1)
        return replay(self, *args, **more)

    monkeypatch.setattr(Graphs, "replay", counted)
    options = {"device": "cuda", "dtype": "bfloat16", "enable_prefix_caching": False}
    engine = start(folders[mode], **options)
    for _ in range(4):
        found = pool(engine, PROMPTS, ASKED)
        for update, prompt, params in zip(found, PROMPTS, ASKED, strict=True):
            want = truth(states, mode, prompt, params)
            cosine = torch.cosine_similarity(values(update), want, dim=-1)
            assert cosine.min() >= LEAST_COSINE
    assert replays
