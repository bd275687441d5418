"""A rank that fails or hangs, as its job says; it joins nobody, so it is quick."""

import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    what = json.loads((folder / "job.json").read_text("utf-8"))["what"][rank]
    if what == "lost":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    if what == "late":
        time.sleep(0.3)
    if what in ("raise", "late"):
        raise LookupError("no such table")
    if what == "hang":
        print("waiting for godot", flush=True)  # noqa: T201
        time.sleep(60)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank}), encoding="utf-8")
