"""What the whole procedure found, for people and as plain JSON. No torch here."""

from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch.certificate import Fit
from stoker.batch.explaining.verdict import Verdict
from stoker.batch.noise import NoiseEstimate
from stoker.batch.scanning.rate_scan import RateScan
from stoker.batch.scanning.scanned import Scan
from stoker.batch.swept import Account, Sweep

__all__ = ["Explained"]


@dataclass(frozen=True)
class Explained:
    """The result of `explain`: four steps and what each one showed."""

    examples: int | None
    """In the data set; None: the target doesn't tell."""
    usual: tuple[str, ...]
    """Where the batch lies far outside what is usual for the scenario."""
    fit: Fit
    sweep: Sweep
    rates: RateScan
    """Of the present batch, so that no learning rate is taken for a batch."""
    scan: Scan
    noise: NoiseEstimate | None
    verdict: Verdict
    accounts: tuple[Account, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "examples": self.examples,
            "usual": list(self.usual),
            "fit": self.fit.to_json(),
            "sweep": self.sweep.to_json(),
            "rates": self.rates.to_json(),
            "scan": self.scan.to_json(),
            "noise": None if self.noise is None else self.noise.to_json(),
            "verdict": self.verdict.to_json(),
            "accounts": [asdict(each) for each in self.accounts],
        }

    def __str__(self) -> str:
        target, fitted = self.scan.equal.target, self.fit
        of = "" if self.examples is None else f" of a data set of {self.examples:,}"
        blocks = [
            str(self.verdict),
            "raise the batch?\n" + "\n".join(f"  {each}" for each in self.accounts),
            f"from: {target.parameters:,} parameters, {target.optimizer}, {target.device}, one rank, "
            f"{self.verdict.present:,} {target.unit} per update{of}",
            f"1. what fits: {fitted.size:,} {fitted.unit} at once, certified"
            + ("" if fitted.bound != "data" else "; no more were tried"),
            f"2. what is fast\n{self.sweep}",
            f"3. what trains well\nlearning rates at {self.verdict.present:,}: {self.rates}",
            str(self.scan),
            "the gradient's noise: " + ("not measured" if self.noise is None else str(self.noise)),
        ]
        return "\n\n".join([*blocks, *(f"warning: {each}" for each in self.usual)])
