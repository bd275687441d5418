"""A rank that accumulates a window of its own with a noise meter, and tells what the meter was given."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from stoker.batch import nest
from stoker.batch.accumulation import accumulate
from stoker.batch.ranks import Job, run_rank
from tests.batch import models
from tests.batch.meters import Kept


def work(job: Job) -> dict[str, Any]:
    setup = models.transformer()
    batch = models.ragged(job.numbers["lengths"])
    window = [nest.take(batch, rows) for rows in job.numbers["rows"][job.rank]]
    meter = Kept() if job.rank in job.numbers["watching"] else None
    accumulate(
        DistributedDataParallel(setup.model), setup.loss, window, count=models.labels_after_the_first, noise=meter
    )
    return {"given": meter.given if meter is not None else None}


if __name__ == "__main__":
    run_rank(work)
