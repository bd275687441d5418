"""`stoker batch`: what fits, where throughput saturates, where the bytes go, whether accumulation is exact."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli_batch_frame import aside, framed, show
from stoker.cli_progress import parts, trial
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from stoker.batch.target import Maker

__all__ = ["Html", "Json", "TargetPath", "Words", "batch", "in_bytes", "maker", "numbers"]

batch = typer.Typer(
    no_args_is_help=True,
    help="Batch control for any PyTorch training.\n\n"
    "TARGET is a function of yours that makes a training, `train.py:make_target` or `package.module:make_target`: it "
    "returns stoker.batch.Target(model, optimizer, make_batch, loss). Words after it are handed to the function. A "
    "reinforcement-learning run file (`run.toml`, with changes as key=value) is a TARGET too.\n\n"
    "Begin with `stoker batch fit train.py:make_target`.",
)

TargetPath = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="file.py:function, package.module:function or run.toml.", show_default=False),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(help="Handed to the function as they are; of a run file: changes, key=value.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also draw it into this file (one page, no network).", show_default=False)
]


_OF_A_MODEL = ("tokens", "precision", "optimizer", "checkpointing", "lora_rank", "ranks", "sharding")
"""Options of `memory` that say how a known model would be trained."""


@batch.command(
    help="The largest batch that fits in memory, found by running complete steps and certified by running them again."
    "\n\nEach trial is a process of its own, so nothing of your training is touched and out of memory costs nothing. "
    "Sizes double until one fails; the limit is closed in on, headroom is kept, and the size runs once more.",
    epilog="Example: stoker batch fit examples/batch_digits.py:make_target --limit-gib 2 --html fit.html",
)
def fit(
    target: TargetPath,
    words: Words = None,
    limit_gib: Annotated[
        float | None,
        typer.Option(
            help="What training may take, GiB. Without it: the device, or on a CPU what is available.",
            show_default=False,
        ),
    ] = None,
    headroom: Annotated[float, typer.Option(help="Share of the limit to keep free.", min=0.0, max=0.9)] = 0.05,
    start: Annotated[int, typer.Option(help="The first size tried.", min=1)] = 1,
    most: Annotated[int | None, typer.Option(help="No larger size is of interest.", min=1, show_default=False)] = None,
    ranks: Annotated[int, typer.Option(help="Processes side by side that must all run.", min=1)] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds for each trial.", min=1.0)] = 600.0,
    per_update: Annotated[
        int | None,
        typer.Option(
            help="Also say how an update of so many is made of micro-batches that fit.", min=1, show_default=False
        ),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.fit`."""
    with framed(html, as_json):
        from stoker.batch.fitting import fit as run_fit

        limit = in_bytes(limit_gib, "--limit-gib")
        found = run_fit(
            maker(target, words), limit_bytes=limit, headroom=headroom, start=start, most=most, ranks=ranks,
            deadline_seconds=deadline, on_trial=None if as_json else trial,
        )  # fmt: skip
        made = found.to_json()
        text = str(found)
        if per_update is not None:
            made["accumulation"] = found.for_update(per_update).__dict__
            text += f"\n{found.for_update(per_update)}"
        from stoker.report.fit import sections

        show("Fit", target, made, text, lambda: sections(made), html, as_json)


@batch.command(
    help="Where a larger batch stops being faster: throughput and memory by size, the knee, what limits, what helps."
    "\n\nComplete steps are timed at doubling sizes (warm-up dropped, medians, device synchronised). Nothing else "
    "should compute meanwhile.",
    epilog="Example: stoker batch sweep examples/batch_ctr.py:make_target --present 4096 --html sweep.html",
)
def sweep(
    target: TargetPath,
    words: Words = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes to time, as 16,32,64. Without it: doubling until it ends.", show_default=False),
    ] = None,
    present: Annotated[int | None, typer.Option(help="The size in use.", min=1, show_default=False)] = None,
    largest: Annotated[int | None, typer.Option(help="No larger size is timed.", min=1, show_default=False)] = None,
    scenario: Annotated[
        str | None, typer.Option(help="A kind of training, to hold the size against what is usual.", show_default=False)
    ] = None,
    remedies: Annotated[bool, typer.Option(help="Try what would help, and measure it.")] = True,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.sweep`."""
    with framed(html, as_json):
        from stoker.batch.sweeping import sweep as run_sweep

        with aside():
            found = run_sweep(
                maker(target, words), numbers(sizes, "--sizes"), present=present, largest=largest, scenario=scenario,
                remedies=remedies, on_part=None if as_json else parts(),
            )  # fmt: skip
        from stoker.report.sweep import sections

        made = found.to_json()
        show("Sweep", target, made, str(found), lambda: sections(made), html, as_json)


@batch.command(
    help="Where the bytes of a training step go, moment by moment, what grows with the batch, and what can be done."
    "\n\nOf a function's training: its forward pass is traced at two small sizes, and a twin of its optimizer steps "
    "over shapes without contents. "
    "Of a model's folder or config.json: by formula, without torch and before any weights are downloaded. "
    "Of a run file: policy, reference, critic and cache together, by formula. `stoker batch fit` measures.",
    epilog="Example: stoker batch memory models/smollm2-135m-instruct --size 8 --tokens 1024 --precision autocast",
)
def memory(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="file.py:function, a model's folder or config.json, or run.toml.", show_default=False
        ),
    ],
    words: Words = None,
    size: Annotated[int, typer.Option(help="Examples of one micro-batch.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Of a model: tokens of each example, padding included.", min=1)] = 1024,
    precision: Annotated[str, typer.Option(help="Of a model: fp32, autocast, master or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="Of a model: adamw, adamw_8bit, sgd_momentum, muon, ...")] = "adamw",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Of a model: layers are recomputed.")] = False,
    lora_rank: Annotated[int, typer.Option(help="Of a model: train adapters of this rank; 0: all weights.", min=0)] = 0,
    ranks: Annotated[int, typer.Option(help="Of a model: data-parallel devices.", min=1)] = 1,
    sharding: Annotated[str, typer.Option(help="Of a model: none, zero1, zero2 or zero3.")] = "none",
    capacity_gib: Annotated[
        float | None,
        typer.Option(help="The device's memory: how many examples fit, by these figures.", show_default=False),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.memory` and `stoker.batch.trace`."""
    with framed(html, as_json):
        from stoker.batch.footprint import of_model, of_run, of_target

        capacity = in_bytes(capacity_gib, "--capacity-gib")
        _check_given(context, target)
        if target.endswith(".toml"):
            from stoker.config.load import load

            found = of_run(load(Path(target), words or []), capacity)
        elif ":" in target:
            with aside():
                found = of_target(maker(target, words)(), size, capacity, None if as_json else parts())
        else:
            from stoker.memory import Setup

            setup = Setup(
                examples=size, tokens=tokens, precision=precision, optimizer=optimizer, checkpointing=checkpointing,
                lora_rank=lora_rank, ranks=ranks, sharding=sharding,  # type: ignore[arg-type]  # it checks
            )  # fmt: skip
            found = of_model(Path(target).expanduser(), setup, capacity)
        from stoker.report.memory import sections

        made = found.to_json()
        show("Memory", target, made, str(found), lambda: sections(made), html, as_json)


@batch.command(
    help="Is gradient accumulation exact on your own loss? One real batch under many splits, the guilty part by name."
    "\n\nExit code 1 where a split doesn't give the gradient of the whole batch, so that a test can run it.",
    epilog="Example: stoker batch prove examples/batch_causal_lm.py:make_target --size 32",
)
def prove(
    target: TargetPath,
    words: Words = None,
    size: Annotated[int, typer.Option(help="Examples of the whole batch.", min=2)] = 32,
    splits: Annotated[
        str | None,
        typer.Option(help="Examples of a micro-batch, as 16,5,1. Without it: half, a third, one.", show_default=False),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of data-parallel ranks, as 1,2.")] = "1,2",
    deadline: Annotated[float, typer.Option(help="Seconds for each number of ranks.", min=1.0)] = 300.0,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Wires `stoker.batch.prove`."""
    with framed(html, as_json):
        from stoker.batch.proving import prove as run_prove

        with aside():
            found = run_prove(
                maker(target, words), size=size, splits=numbers(splits, "--splits"), ranks=numbers(ranks, "--ranks"),
                deadline_s=deadline, on_part=None if as_json else parts(),
            )  # fmt: skip
        from stoker.report.prove import sections

        made = found.to_json()
        show("Accumulation", target, made, str(found), lambda: sections(made), html, as_json)
        if not found.equal:
            raise typer.Exit(1)


def _check_given(context: typer.Context, target: str) -> None:
    """An option that says nothing of such a TARGET is a mistake, not to be left aside in silence."""
    run = target.endswith(".toml")
    if not run and ":" not in target:
        return
    idle = [*_OF_A_MODEL, *(["size"] if run else [])]
    given = [name for name in idle if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        what = "a run file has its own (change them as key=value)" if run else "a function's training has its own"
        raise ConfigError(f"--{given[0].replace('_', '-')} is of a model's folder or config.json: {what}")


def in_bytes(gib: float | None, option: str) -> int | None:
    """What an option gives in GiB. ConfigError for what no memory has."""
    if gib is None:
        return None
    if not 0 < gib < 2**33:  # neither NaN nor more than any machine can address
        raise ConfigError(f"{option} = {gib:g}: a size above 0, in GiB")
    return int(gib * 2**30)


def maker(target: str, words: list[str] | None) -> "Maker":
    """What TARGET and its words name. ConfigError where that can't be."""
    from stoker.batch.target import Maker

    if target.endswith(".toml"):
        if not Path(target).expanduser().is_file():
            raise ConfigError(f"run file {target} does not exist: give its path, or a function (file.py:make_target)")
        return Maker("stoker.engine.target:make", (target, *(words or ())))
    if ":" not in target:
        name = f"{target}:make_target" if target.endswith(".py") else "train.py:make_target"
        raise ConfigError(f"TARGET '{target}' is neither a run file (.toml) nor a function: name it as {name}")
    return Maker(target, tuple(words or ()))


def numbers(text: str | None, option: str) -> list[int] | None:
    """Whole ones of an option. ConfigError for others."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"{option} = '{text}': whole numbers are needed, as 1,2,4") from None
