"""One rank of test_tensor_parallel.py: `rank size port folder…`; writes logits.RANK into each."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nv_models import AdapterFiles, AdapterPool, TensorParallel, load_model

from conftest import PagedRunner


def main(rank: int, size: int, port: str, folders: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    own = torch.full((2, 3), float(rank + 1))
    assert torch.equal(TensorParallel(rank, size).sum_in_order(own), torch.full((2, 3), 3.0))
    for index, folder in enumerate(folders):
        parallel = TensorParallel(rank, size)
        arithmetic = "batch_invariant" if index == 2 else "fast"
        model = load_model(folder, dtype="float32", parallel=parallel, arithmetic=arithmetic)
        runner, adapter = PagedRunner(model, size=size), None
        if (Path(folder) / "adapter").exists():
            pool, adapter = AdapterPool(model, 2, 8), 1
            pool.fill(image := pool.image(), AdapterFiles.open(Path(folder) / "adapter"))
            pool.load(adapter, image)
        steps = range(3, 43), [5], [6]
        logits = torch.cat([runner.step(tokens, adapter) for tokens in steps])
        torch.save(logits, Path(folder) / f"logits.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
