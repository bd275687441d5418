"""A rank that draws its share of changing batches, decided by what all ranks measured, and tells what it drew: in one
go, and in two with all that was saved in between.
"""

import json
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from stoker.batch.changing import ChangingBatches
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.ranks import Job, run_rank
from tests.batch.places import Places


def drawn(job: Job, case: dict[str, Any], updates: int, state: str = "") -> tuple[list[list[int]], str]:
    sizes = ByPlateau(4, 16, patience=2)
    batches = ChangingBatches(
        case["examples"], sizes, granularity="step", seed=3, last=case["last"], rank=job.rank, ranks=job.ranks
    )
    if state:
        saved = json.loads(state)
        batches.load_state_dict(saved["batches"])
        sizes.load_state_dict(saved["sizes"])
    loader = DataLoader(Places(case["examples"]), batch_sampler=batches, num_workers=case["workers"])
    found: list[list[int]] = []
    while True:
        for batch in batches.through(loader):
            found.append(batch.tolist())
            loss = batch.double().mean()  # each rank's own, so that only what they share may decide
            dist.all_reduce(loss)
            sizes.observe(float(loss), batches.undrawn)
            if len(found) == updates:
                return found, json.dumps({"batches": batches.state_dict(), "sizes": sizes.state_dict()})


def work(job: Job) -> dict[str, Any]:
    answers = []
    for case in job.numbers["cases"]:
        whole, state = drawn(job, case, 17)
        first, cut = drawn(job, case, 7)
        second, end = drawn(job, case, 10, cut)
        answers.append({"whole": whole, "parts": first + second, "state": state, "end": end})
    return {"answers": answers}


if __name__ == "__main__":
    run_rank(work)
