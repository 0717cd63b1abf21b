"""Several models on the same ranks: a rank's process starts once, and holds a shard of each."""

from functools import partial

from nv_engine.device.start import start_runner
from nv_engine.executor.process import ProcessExecutor


class ModelsWorker:
    """A rank's worker of several models. A step comes with the number of its model."""

    def __init__(self, configs, parallel):
        self.runners = [start_runner(config, parallel) for config in configs]
        self.facts = [runner.facts for runner in self.runners]

    def run(self, step):
        index, batch = step
        return self.runners[index].run(batch)


def start_models(configs, _, parallel):
    return ModelsWorker(configs, parallel)


class OfOneModel:
    """The executor of one model, which leaves the ranks to the others when its engine closes."""

    def __init__(self, ranks, index):
        self.facts, self._ranks, self._index = ranks.facts[index], ranks, index

    def submit(self, batch):
        return self._ranks.submit((self._index, batch))

    def close(self):
        pass


def start_ranks(configs):
    """The ranks of `configs[0]`, which the caller closes, and an executor for each config."""
    ranks = ProcessExecutor(configs[0], partial(start_models, configs))
    return ranks, [OfOneModel(ranks, index) for index in range(len(configs))]
