"""`stoker batch`, second half: which batch to take, decided by trainings at equal samples."""

from typing import TYPE_CHECKING, Annotated, get_args

import typer

from stoker.cli_batch import Html, Json, TargetPath, Words, batch, in_bytes, maker, numbers
from stoker.cli_batch_frame import aside, framed, show
from stoker.cli_progress import parts, trial
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from stoker.batch.scaling import Kind
    from stoker.batch.target import Maker

__all__ = ["Clip", "RateBase", "RateDecay", "RateRule", "WarmUp", "batch", "decimals", "explain", "scan", "trained"]

RateRule = Annotated[
    str | None,
    typer.Option(
        help="How the rate follows the batch: linear, sqrt or keep. Without it: the optimizer's own.",
        show_default=False,
    ),
]
RateBase = Annotated[
    int | None,
    typer.Option(
        help="Examples per update that TARGET's learning rate is right for. Without it: the present ones.",
        min=1,
        show_default=False,
    ),
]
ExplainedSamples = Annotated[
    int | None,
    typer.Option(
        help="That each training sees; best is what yours will. Without it: 150 updates of the present batch, or 100 "
        "of the largest compared.",
        min=1,
        show_default=False,
    ),
]
KindOfRule = Annotated[
    str | None,
    typer.Option(
        help="What the optimizer is like, of sgd, adam, adamw and muon. Without it: by its class.", show_default=False
    ),
]
WarmUp = Annotated[int, typer.Option(help="Samples over which the rate rises from 0.", min=0)]
RateDecay = Annotated[str, typer.Option(help="Of the rate after that: constant, linear or cosine.")]
Clip = Annotated[
    float | None, typer.Option(help="The gradient's norm at most. Without it: as it is.", show_default=False)
]


@batch.command(
    help="Which batch keeps quality: trainings at several sizes with the same seeds, order and number of samples."
    "\n\nThe held-out loss, mean and spread over seeds, says which sizes are kept (quality candidates), the time of an "
    "update from where a larger one stops being faster (efficiency candidate); the two are reconciled by accumulation "
    "or by a small scan of the learning rate, or it says why they can't be. TARGET's `load` and `validate` are needed."
    "\n\nIt takes sizes x seeds whole trainings.",
    epilog="Example: stoker batch scan examples/batch_digits.py:make_target --samples 23000 --base 16 --html scan.html",
)
def scan(
    target: TargetPath,
    samples: Annotated[int, typer.Option(help="That each training sees.", min=1)],
    base: Annotated[int, typer.Option(help="Examples per update that TARGET's learning rate is right for.", min=1)],
    words: Words = None,
    sizes: Annotated[str, typer.Option(help="Examples per update.")] = "16,32,64,128",
    seeds: Annotated[int, typer.Option(help="Trainings at each size; one tells nothing apart.", min=1)] = 3,
    rule: RateRule = None,
    kind: KindOfRule = None,
    fits: Annotated[
        int | None,
        typer.Option(
            help="The largest micro-batch that fits in memory; larger updates accumulate.", min=1, show_default=False
        ),
    ] = None,
    factors: Annotated[
        str | None,
        typer.Option(help="Of the rate, where it is scanned, as 0.5,1,2. Without it: as suits.", show_default=False),
    ] = None,
    warmup: WarmUp = 0,
    decay: RateDecay = "constant",
    clip: Clip = None,
    evaluations: Annotated[int, typer.Option(help="Of held-out data in each training.", min=1)] = 8,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.scan`."""
    with framed(html, as_json):
        made_by = trained(target, words, "scan")
        from stoker.batch.scanning.sizes import scan as run_scan
        from stoker.batch.trainings.setting import Setting
        from stoker.batch.trainings.training import Plan

        present = Setting(base, rule=rule, warmup_samples=warmup, decay=decay, clip_norm=clip)  # type: ignore[arg-type]
        with aside():
            found = run_scan(
                made_by, numbers(sizes, "--sizes") or [], Plan(samples, evaluations, kind=_kind(kind)), present,
                seeds=seeds, fits=fits, factors=decimals(factors, "--factors"), on_part=None if as_json else parts(),
            )  # fmt: skip
        from stoker.report.scan import sections

        made = found.to_json()
        show("Scan", target, made, str(found), lambda: sections(made), html, as_json)


@batch.command(
    help="Larger, stay or smaller: the whole procedure in one command, and the page with all its curves."
    "\n\n1. What fits: complete steps in processes of their own. 2. What is fast: step times at doublings to either "
    "side of the present batch. 3. What trains well: a scan of the learning rate at the present batch, the gradient's "
    "noise, then trainings at the batches that are worth it, at equal samples, with the same seeds. 4. The verdict, by "
    "throughput, memory and validation, and the three accounts of raising the batch."
    "\n\nTARGET's `load` and `validate` are needed. It takes some twenty to forty trainings.",
    epilog="Example: stoker batch explain examples/batch_digits.py:make_target --present 512 --html explain.html",
)
def explain(
    target: TargetPath,
    present: Annotated[int, typer.Option(help="Examples per update now.", min=1)],
    words: Words = None,
    samples: ExplainedSamples = None,
    seeds: Annotated[int, typer.Option(help="Trainings at each batch.", min=2)] = 3,
    base: RateBase = None,
    microbatch: Annotated[
        int | None,
        typer.Option(help="Examples at once now. Without it: the whole update.", min=1, show_default=False),
    ] = None,
    rule: RateRule = None,
    kind: KindOfRule = None,
    warmup: WarmUp = 0,
    decay: RateDecay = "constant",
    clip: Clip = None,
    limit_gib: Annotated[
        float | None,
        typer.Option(
            help="What training may take, GiB. Without it: the device, or on a CPU what is available.",
            show_default=False,
        ),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(help="A kind of training, to hold the batch against what is usual.", show_default=False),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.explain`."""
    with framed(html, as_json):
        made_by = trained(target, words, "explain")
        from stoker.batch.explaining.procedure import explain as run_explain
        from stoker.batch.trainings.setting import Setting

        setting = Setting(
            present,
            base_examples=base,
            examples_per_microbatch=microbatch,
            rule=rule,  # type: ignore[arg-type]  # it checks
            warmup_samples=warmup,
            decay=decay,  # type: ignore[arg-type]
            clip_norm=clip,
        )
        with aside():
            found = run_explain(
                made_by, setting, samples=samples, seeds=seeds, limit_bytes=in_bytes(limit_gib, "--limit-gib"),
                scenario=scenario, kind=_kind(kind), on_trial=None if as_json else trial,
                on_part=None if as_json else parts(),
            )  # fmt: skip
        from stoker.report.explain import sections

        made = found.to_json()
        show("Batch", target, made, str(found), lambda: sections(made), html, as_json)


def trained(target: str, words: list[str] | None, command: str) -> "Maker":
    """A function that makes a training. ConfigError for a run file: it has no held-out loss at equal samples."""
    if target.endswith(".toml"):
        raise ConfigError(
            f"`stoker batch {command}` compares trainings by their held-out loss, which a reinforcement-learning run "
            f"doesn't have: train {target} at a few sizes (`stoker train {target} sampling.prompts_per_step=64`) and "
            "compare their held-out accuracy at equal samples, or name a function (file.py:make_target)"
        )
    return maker(target, words)


def _kind(name: str | None) -> "Kind | None":
    from stoker.batch.scaling import Kind

    known = get_args(Kind)
    if name is not None and name not in known:
        raise ConfigError(f"--kind = '{name}': one of {', '.join(known)}")
    return name  # type: ignore[return-value]


def decimals(text: str | None, option: str) -> list[float] | None:
    """Numbers of an option. ConfigError for what is none."""
    if text is None:
        return None
    try:
        return [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"{option} = '{text}': numbers are needed, as 0.5,1,2") from None
