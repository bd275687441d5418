"""`stoker batch`, third part: what searches for the learning rate too, at each batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from stoker.cli_batch import Html, Json, TargetPath, Words, batch, numbers
from stoker.cli_batch_decide import Clip, RateBase, RateDecay, RateRule, WarmUp, decimals, trained
from stoker.cli_batch_frame import aside, framed, show
from stoker.cli_progress import parts
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from stoker.batch.searching.space import Space

__all__ = ["batch", "critical", "search"]

Number = TypeVar("Number", int, float)
SearchedSizes = Annotated[
    str | None,
    typer.Option(
        help="Examples per update, ascending. Without it: powers of two from a fourth of the present ones to four "
        "times them.",
        show_default=False,
    ),
]
SearchedWarmUps = Annotated[
    str | None,
    typer.Option(help="Samples of warm-up, least and most. Without it: --warmup in all.", show_default=False),
]
SearchedMicrobatch = Annotated[
    int | None,
    typer.Option(
        help="Examples at once at most; larger updates accumulate. Without it: the whole update.",
        min=1,
        show_default=False,
    ),
]


@batch.command(
    help="The batch and learning rate with the lowest held-out loss at equal samples, by Bayesian search."
    "\n\nEach training decides what the next one tries (Optuna's TPE); one whose held-out losses are all worse than "
    "the median's ends early. The present setting is the first trial. The study is an SQLite file: the same command "
    "again goes on where it was, and more --trials make it longer. TARGET's `load` and `validate` are needed, and "
    "Optuna: `pip install 'stoker\\[search]'`."
    "\n\nIt takes --trials trainings, less what ending early saves.",
    epilog="Example: stoker batch search examples/batch_digits.py:make_target 8 --samples 8000 --present 128 "
    "--html search.html",
)
def search(
    target: TargetPath,
    samples: Annotated[int, typer.Option(help="That each training sees.", min=1)],
    present: Annotated[int, typer.Option(help="Examples per update now.", min=1)],
    words: Words = None,
    sizes: SearchedSizes = None,
    rate_factors: Annotated[
        str, typer.Option(help="Least and most, beyond the rule by which the rate follows the batch.")
    ] = "0.1,10",
    warmups: SearchedWarmUps = None,
    trials: Annotated[int, typer.Option(help="In all, those already in the file counted.", min=1)] = 30,
    storage: Annotated[Path, typer.Option(help="The study's file.")] = Path("study.db"),
    base: RateBase = None,
    microbatch: SearchedMicrobatch = None,
    rule: RateRule = None,
    warmup: WarmUp = 0,
    decay: RateDecay = "constant",
    clip: Clip = None,
    evaluations: Annotated[int, typer.Option(help="Of held-out data in each training.", min=1)] = 8,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.searching.search`."""
    with framed(html, as_json):
        made_by = trained(target, words, "search")
        from stoker.batch.searching.running import search as run_search
        from stoker.batch.trainings.setting import Setting
        from stoker.batch.trainings.training import Plan

        own = Setting(
            present,
            base_examples=base,
            examples_per_microbatch=None if microbatch is None else min(microbatch, present),
            rule=rule,  # type: ignore[arg-type]  # it checks
            warmup_samples=warmup,
            decay=decay,  # type: ignore[arg-type]
            clip_norm=clip,
        )
        with aside():
            found = run_search(
                made_by, own, Plan(samples, evaluations), _space(present, sizes, rate_factors, warmups), trials=trials,
                storage=storage, on_part=None if as_json else parts(),
            )  # fmt: skip
        from stoker.report.search import sections

        made = found.to_json()
        show("Search", target, made, str(found), lambda: sections(made), html, as_json)


@batch.command(
    help="How far the batch can grow before quality pays: the critical batch, measured."
    "\n\nBranches from one state see the same examples in larger and larger batches, the learning rate searched for "
    "anew at each; critical is the largest batch whose loss stays within --tolerance of every smaller one's. With "
    "--before, the noise scale on the way to that state is told beside it. With --loss, trainings from the start to "
    "that held-out loss tell what a doubling costs in samples and saves in time. TARGET's `load` is needed, for --loss "
    "its `validate` too; without it branches are judged by their training loss, smoothed."
    "\n\nIt takes some forty branches; --loss adds some thirty trainings.",
    epilog="Example: stoker batch critical examples/batch_digits.py:make_target --base 16 --before 4096 "
    "--samples 4096 --html critical.html",
)
def critical(
    target: TargetPath,
    samples: Annotated[int, typer.Option(help="That each branch sees.", min=1)],
    base: Annotated[
        int,
        typer.Option(
            help="Examples per update that TARGET's learning rate is right for: the smallest batch compared.", min=1
        ),
    ],
    words: Words = None,
    before: Annotated[int, typer.Option(help="Samples trained at --base before the branches.", min=0)] = 0,
    multiples: Annotated[str, typer.Option(help="Of --base, ascending from 1.")] = "1,2,4,8,16",
    tolerance: Annotated[float, typer.Option(help="Of the loss.")] = 0.01,
    orders: Annotated[int, typer.Option(help="Orders of the data, for each batch.", min=1)] = 3,
    loss: Annotated[
        float | None, typer.Option(help="Also train from the start to this held-out loss.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings to --loss at each batch.", min=1)] = 3,
    rule: RateRule = None,
    warmup: WarmUp = 0,
    clip: Clip = None,
    evaluations: Annotated[int, typer.Option(help="Of held-out data in each branch.", min=1)] = 4,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.critical_batch`."""
    with framed(html, as_json):
        made_by = trained(target, words, "critical")
        from stoker.batch.critical.measuring import critical_batch
        from stoker.batch.trainings.setting import Setting
        from stoker.batch.trainings.training import Plan

        setting = Setting(base, rule=rule, warmup_samples=warmup, clip_norm=clip)  # type: ignore[arg-type]
        with aside():
            found = critical_batch(
                made_by, setting, Plan(samples, evaluations), before=before, tolerance=tolerance, orders=orders,
                multiples=numbers(multiples, "--multiples") or [], loss=loss, seeds=seeds,
                tell=_silent if as_json else parts(),
            )  # fmt: skip
        from stoker.report.critical import sections

        made = found.to_json()
        show("Critical batch", target, made, str(found), lambda: sections(made), html, as_json)


def _space(present: int, sizes: str | None, rate_factors: str, warmups: str | None) -> "Space":
    from stoker.batch.searching.space import Space, around

    warmed = numbers(warmups, "--warmups")
    return Space(
        around(present) if sizes is None else tuple(numbers(sizes, "--sizes") or ()),
        _pair(decimals(rate_factors, "--rate-factors") or [], "--rate-factors"),
        None if warmed is None else _pair(warmed, "--warmups"),
    )


def _silent(what: str, left: float | None) -> None:
    """With --json nothing is told on the way."""


def _pair(found: list[Number], option: str) -> tuple[Number, Number]:
    if len(found) != 2:
        raise ConfigError(f"{option}: two numbers are needed, the least and the most, as 0.1,10")
    return found[0], found[1]
