"""Which batch for the digits of `batch_digits.py`? 16, 32, 64 and 128 at equal samples, three seeds. A minute on a CPU.

    python examples/scan_digits.py            # as in docs/scan.md
    python examples/scan_digits.py --quick    # shorter, two seeds: that it runs

The same from the command line:

    stoker batch scan examples/batch_digits.py:make_target --samples 23000 --base 16 --decay cosine
"""

import sys
from pathlib import Path

from stoker.batch import Maker, Plan, Scan, Setting, scan

TARGET = f"{Path(__file__).resolve().parent}/batch_digits.py:make_target"


def main(*words: str) -> Scan:
    """AdamW's rate of 1e-3 is taken to be right for 16 images per update; it follows by the square root."""
    quick = "--quick" in words
    make = Maker(TARGET, ("8",) if quick else ())
    found = scan(
        make,
        sizes=(16, 32, 64, 128),
        plan=Plan(samples=1_024 if quick else 23_000),
        present=Setting(examples_per_update=16, decay="cosine"),
        seeds=2 if quick else 3,
        on_part=lambda what, left: print(f"{what}; about {left or 0:.0f} s left", file=sys.stderr),
    )
    print(found)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
