import math, time, sys
from dataclasses import dataclass, field
import torch
from torch import nn
from torch.nn import functional as F
from pydoc_data import topics

from stoker.batch import ChangingBatches, Horizon, RateFollower, NoiseScale, accumulate
from stoker.batch.controllers.by_noise import ByNoise

CONTEXT = 12
text = "\n".join(t for _, t in sorted(topics.topics.items())).encode()
raw = torch.tensor(list(text))
kinds, coded = torch.unique(raw, return_inverse=True)
held = coded[-40_000:]
coded = coded[:-40_000]


def windows(s, at):
    return s[at[:, None] + torch.arange(CONTEXT)], s[at + CONTEXT]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(len(kinds), 16)
        self.a = nn.Linear(16 * CONTEXT, 128)
        self.b = nn.Linear(128, len(kinds))

    def forward(self, x):
        return self.b(F.gelu(self.a(self.e(x).flatten(1))))


def loss_of(model, piece):
    return F.cross_entropy(model(piece[0]), piece[1])


HELD = windows(held, torch.arange(0, 40_000 - CONTEXT, 5))


def train(seed, sizes, lr, base, samples, rule=None, every=0, evals=60, decay="cosine"):
    torch.manual_seed(seed)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), fused=True, weight_decay=0.0)
    batches = ChangingBatches(len(coded) - CONTEXT, sizes, granularity="step", seed=seed)
    rate = RateFollower(opt, Horizon(samples, 0.03 * samples, decay), base, rule=rule)
    noise = NoiseScale(smoothing=0.97, independent=True) if every else None
    curve = []
    start = time.perf_counter()
    out = 0.0
    n = 0
    while batches.samples < samples:
        for idx in batches.through(batches):
            x, y = windows(coded, torch.tensor(idx))
            opt.zero_grad()
            if noise is not None and n % every == 0:
                k = 4
                c = len(idx) // k
                pieces = list(zip(x.split(c), y.split(c)))
                accumulate(model, loss_of, pieces, noise=noise)
                if n % (5 * every) == 0 and hasattr(sizes, "observe"):
                    sizes.observe(noise.estimate(), batches.undrawn)
            else:
                loss_of(model, (x, y)).backward()
            rate.set(batches.samples, batches.handed)
            opt.step()
            n += 1
            if (
                batches.samples * evals // samples > (batches.samples - batches.handed) * evals // samples
                or batches.samples >= samples
            ):
                t = time.perf_counter()
                with torch.no_grad():
                    l = float(loss_of(model, HELD))
                out += time.perf_counter() - t
                curve.append((n, batches.samples, time.perf_counter() - start - out, l))
            if batches.samples >= samples:
                break
    return curve, noise.estimate() if noise else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    S = 300_000
    print(len(coded), len(kinds))
    for b in (16, 32, 64, 128, 256, 512):
        row = []
        for base_lr in (1e-3, 2e-3, 4e-3, 8e-3):
            lr = base_lr * math.sqrt(b / 64)
            c, _ = train(0, b, lr, b, S, evals=3)
            row.append(f"{lr:.4f}:{c[-1][3]:.4f}")
        print(b, c[-1][0], f"{c[-1][2]:.1f}s", *row, flush=True)
    for b in (32,):
        c, e = train(0, b, 2e-3 * math.sqrt(b / 64), b, S, every=8)
        print(e)
