"""A run at a glance, from its record alone: the picture and the held-out answers told apart."""

from stoker.record.curve import Panel, Series, smooth, svg
from stoker.record.read import Run

__all__ = ["held_out_summary", "learning_curve"]

COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea")


def learning_curve(run: Run) -> str:
    """Held-out accuracy with its standard error, the training reward, and the length of answers, by step; an SVG."""
    accuracy = [
        Series(
            name,
            run.series(f"eval/{name}/accuracy"),
            color=COLORS[i % len(COLORS)],
            errors=[error for _, error in run.series(f"eval/{name}/accuracy_error")],
            markers=True,
        )
        for i, name in enumerate(_held_out_sets(run))
    ]
    rewards = run.series("reward/mean")
    reward = [
        Series("each step", rewards, color=COLORS[1], faint=True),
        Series("smoothed", smooth(rewards, 9), color=COLORS[1]),
    ]
    lengths = run.series("sample/length_mean")
    panels = [
        Panel("Held-out accuracy (band: standard error)", accuracy, percent=True),
        Panel("Mean reward of the step's samples", reward),
        Panel("Mean answer length, tokens", [Series("length", smooth(lengths, 9), color=COLORS[2])], least_span=0.3),
    ]
    hours = sum(run.seconds_by_phase().values()) / 3600
    steps = max((record["step"] for record in run.metrics), default=0)
    return svg(run.path.name, panels, subtitle=f"{steps} steps, {hours:.2f} device-hours")


def held_out_summary(run: Run) -> list[str]:
    """Right, wrong, unparsed and truncated answers to each held-out set, at the first and the last evaluation."""
    lines = []
    for name in _held_out_sets(run):
        seen = [record for record in run.metrics if f"eval/{name}/accuracy" in record]
        shares = [
            f"{label} {seen[0][key]:.1%} -> {seen[-1][key]:.1%}"
            for label, key in (
                ("right", f"eval/{name}/accuracy"),
                ("wrong", f"eval/{name}/wrong"),
                ("unparsed", f"eval/{name}/unparsed"),
                ("truncated", f"eval/{name}/truncated"),
            )
        ]
        lines.append(f"held-out answers ({name}): {', '.join(shares)}")
    return lines


def _held_out_sets(run: Run) -> list[str]:
    return sorted({key.split("/")[1] for record in run.metrics for key in record if key.startswith("eval/")})
