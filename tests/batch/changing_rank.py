"""A rank that draws its share of changing batches, decided by what all ranks measured, and tells what it drew."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from stoker.batch.changing import ChangingBatches
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.ranks import Job, run_rank
from tests.batch.places import Places


def work(job: Job) -> dict[str, Any]:
    examples, workers, updates = (job.numbers[name] for name in ("examples", "workers", "updates"))
    sizes = ByPlateau(4, 16, patience=2)
    batches = ChangingBatches(
        examples, sizes, granularity="step", seed=3, last=job.numbers["last"], rank=job.rank, ranks=job.ranks
    )
    if job.numbers["state"]:
        batches.load_state_dict(job.numbers["state"]["batches"])
        sizes.load_state_dict(job.numbers["state"]["sizes"])
    loader = DataLoader(Places(examples), batch_sampler=batches, num_workers=workers)
    drawn: list[list[int]] = []
    while True:
        for batch in batches.through(loader):
            drawn.append(batch.tolist())
            loss = batch.double().mean()  # each rank's own, so that only what they share may decide
            dist.all_reduce(loss)
            sizes.observe(float(loss), batches.undrawn)
            if len(drawn) == updates:
                state = {"batches": batches.state_dict(), "sizes": sizes.state_dict()}
                return {"drawn": drawn, "state": state}


if __name__ == "__main__":
    run_rank(work)
