"""The command line: wiring only. Each command imports what it needs, so that `--help` is instant."""

import json
import shlex
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stoker.cli_batch_tune import batch
from stoker.cli_errors import fail
from stoker.errors import DataError, StokerError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Batch control for any PyTorch training, and online RL post-training of language models.\n\n"
    "Batch sizes: `stoker batch fit train.py:make_target`; more under `stoker batch --help`.\n\n"
    "RL: begin with `stoker init run.toml`, look at it with `stoker train run.toml --dry-run`, try one real step with "
    "`--smoke`, then run it.",
)
app.add_typer(batch, name="batch")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"stoker {version('stoker')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `stoker` itself."""


RunFile = Annotated[Path, typer.Argument(help="The run file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to the run file, as key=value: sampling.temperature=0.8 stop.steps=50 (docs/run-file.md has "
        "every key).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for machines.")]


def _rows(data: str, enough: int) -> int:
    """Rows of a data file, counted up to `enough`; 0 for any other data."""
    file = Path(data).expanduser()
    if not file.is_file():
        return 0
    from stoker.rl.tasks.files import RawRow, read_file

    try:
        return sum(isinstance(row, RawRow) for row in islice(read_file(file), enough))
    except (DataError, OSError):  # a run says what is wrong with it
        return 0


def _recipe(name: str) -> str:
    """The name of an algorithm, if it is one. Raises typer.BadParameter."""
    from stoker.config.algorithm import RECIPES
    from stoker.dotted import nearest

    if name not in RECIPES:
        raise typer.BadParameter(f"algorithm '{name}' is not known{nearest(name, list(RECIPES))}")
    return name


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.toml"),
    model: Annotated[str | None, typer.Option(help="Folder, GGUF file or Hugging Face name.")] = None,
    data: Annotated[
        str | None, typer.Option(help="JSONL, parquet, CSV, dataset name, or generator pkg.mod:fn.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="`math`, `exact`, or your function: file.py:fn.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="`grpo`, `ppo` or another (docs/algorithms.md).")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; defaults for what no option gives.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented run file; asks for what the options leave open."""
    from stoker.config.algorithm import RECIPES
    from stoker.config.init import ENOUGH_ROWS, Answers, default_reward, name_of, template

    if path.exists() and not force:
        fail(f"{path} exists already: choose another name, or --force to replace it")
    given = {"model": model, "data": data, "reward": reward, "algorithm": algorithm}
    questions = {
        "model": "Model (folder, GGUF file, Hugging Face name; embedded:tiny is a small one, from scratch)",
        "data": "Data (JSONL, parquet, CSV, dataset name, pkg.mod:fn)",
        "reward": "Reward (math: the final answer; exact: the whole answer; or your file.py:fn)",
        "algorithm": f"Algorithm ({', '.join(RECIPES)})",
    }
    for key, question in questions.items():
        if given[key] is None:
            default = default_reward(str(given["model"])) if key == "reward" else getattr(Answers, key)
            check = _recipe if key == "algorithm" else None  # a wrong answer is asked again
            given[key] = default if yes else typer.prompt(question, default=default, value_proc=check)
    try:
        _recipe(str(given["algorithm"]))
    except typer.BadParameter as error:
        fail(error.message)
    answers = Answers(name=name_of(path.name), rows=_rows(str(given["data"]), ENOUGH_ROWS), **given)  # type: ignore[arg-type]
    try:
        path.write_text(template(answers), encoding="utf-8")
    except OSError as error:
        fail(f"{path} can't be written ({error.strerror}): choose another place")
    name = shlex.quote(str(path))
    typer.echo(f"wrote {path}\nnext: stoker train {name} --dry-run    (what it means, nothing runs)")
    typer.echo(f"then: stoker train {name} --smoke      (one real step, everything checked)")


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume: accept changes of the run file that alter the run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the batch plan; run nothing.")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="One real step with small sizes: what each phase did, and an audit of the reward."
        ),
    ] = False,
    profile: Annotated[
        int,
        typer.Option(
            help="Profile this many steps, after a first one that isn't: seconds, tokens/s and the share of the "
            "machine's matmul peak by phase, the longest operators, and a trace for https://ui.perfetto.dev in the run "
            "folder. Training is the same to the bit; 2 or 3 steps are plenty (for a short look add stop.steps=4).",
            min=0,
            show_default=False,
            metavar="N",
        ),
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the final words.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model as the run file says. Ctrl-C stops it cleanly; --resume goes on."""
    from stoker.config.load import load

    if profile and (dry_run or smoke):
        fail("--profile measures steps of a real run: leave out --dry-run and --smoke")
    mode = "json" if as_json else "quiet" if quiet else "table"
    try:
        config = load(run_file, overrides or [])
        if dry_run:
            _dry_run(config, as_json)
        elif smoke:
            _smoke(config, as_json)
        else:
            from stoker.runner import train as run_train

            result = run_train(
                config,
                resume=resume,
                allow_changes=allow_changes,
                mode=mode,  # type: ignore[arg-type]
                profile_steps=profile,
            )
            if profile:
                _print_profile(result.folder, as_json)
            raise typer.Exit(result.exit_code)
    except StokerError as error:
        if as_json:
            typer.echo(json.dumps({"event": "error", "text": str(error)}))
        fail(error)


def _dry_run(config: Any, as_json: bool) -> None:
    from stoker.batch.plan import make, render
    from stoker.config import leash
    from stoker.config.algorithm import describe
    from stoker.config.load import to_toml
    from stoker.config.paths import missing_files

    plan, unknown = make(config), ""
    if config.lora.rank:  # what adapters train hangs on the model's shape, which needs torch
        from stoker.wiring import planned

        plan, unknown = planned(config)
    if as_json:
        facts = {"config": config.model_dump(mode="json"), "batch_plan": json.loads(plan.to_json())}
        typer.echo(json.dumps({**facts, "missing_files": missing_files(config)}))
    else:
        typer.echo(to_toml(config))
        typer.echo(f"{describe(config.algorithm)}\n{leash.describe(config)}\n")
        typer.echo(render(plan))
        if unknown:
            typer.echo(f"trained parameters: not known yet: {unknown}")
        for missing in missing_files(config):
            typer.echo(f"warning: {missing}")


def _smoke(config: Any, as_json: bool) -> NoReturn:
    from stoker.smoke import smoke

    report = smoke(config)
    typer.echo(json.dumps(report.to_json()) if as_json else str(report))
    raise typer.Exit(0 if report.ok else 1)


def _print_profile(folder: Path, as_json: bool) -> None:
    from stoker.report.profile import read_profile, render

    if not (folder / "profile.json").exists():
        return  # the run said why
    found = read_profile(folder)
    typer.echo(json.dumps({"event": "profile", **found}) if as_json else f"\n{render(found, folder)}")


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run folder, checkpoint, model folder or Hugging Face name.")],
    run_file: Annotated[
        str | None, typer.Argument(help="The run file (TOML). Without it: the run folder's own.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="1: greedy. More: also pass@k and the mean over samples.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Measure a model on the run file's held-out prompts."""
    from stoker.config.load import load

    changes, own = overrides or [], Path(model) / "config.toml"
    if run_file is not None and "=" in run_file and not Path(run_file).exists():
        changes, run_file = [run_file, *changes], None  # an override where the run file may stand
    if run_file is None and not own.is_file():
        fail(f"{model} is no run folder, so its run file isn't known: stoker eval {shlex.quote(model)} RUN_FILE")
    try:
        from stoker.evaluating import evaluate_model, table

        found = evaluate_model(model, load(run_file or own, changes), samples)
        typer.echo(json.dumps(found) if as_json else table(found, samples))
    except StokerError as error:
        if as_json:
            typer.echo(json.dumps({"event": "error", "text": str(error)}))
        fail(error)


@app.command("try")
def try_out(
    run: Annotated[Path, typer.Argument(help="A run folder, checkpoint or model folder.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="Ask this once instead of talking.")] = None,
    samples: Annotated[int, typer.Option(help="Answers to each question.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0: the most likely answer.", min=0.0)] = 0.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens. Without it: the run's.", min=1, show_default=False)
    ] = None,
) -> None:
    """Talk to a checkpoint. An empty line or Ctrl-D ends it."""
    from stoker.trying import open_conversation

    try:
        ask = open_conversation(run, samples=samples, temperature=temperature, max_new_tokens=max_new_tokens)
        if prompt is not None:
            typer.echo("\n".join(ask(prompt)))
            return
        while question := _read_line():
            typer.echo("\n".join(ask(question)))
    except StokerError as error:
        fail(error)


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def main() -> None:
    """`python -m stoker.cli`, under the name that users know."""
    app(prog_name="stoker")


if __name__ == "__main__":
    main()
