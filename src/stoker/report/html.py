"""A page in one file: no network, no script; light and dark as the reader's system says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from stoker.errors import RunError
from stoker.record.printable import printable

__all__ = ["Section", "Table", "page", "save"]


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: Sequence[int] = ()
    """Rows to set off, by number."""
    words: Sequence[int] = (0,)
    """Columns of words, by number: left-aligned, and broken where they are long. The others are numbers."""


@dataclass(frozen=True)
class Section:
    """A heading, words, a picture (SVG), a table and small print, each where there is one."""

    title: str
    lead: str = ""
    picture: str = ""
    table: Table | None = None
    notes: Sequence[str] = field(default=())
    warnings: Sequence[str] = field(default=())


def page(title: str, subtitle: str, sections: Sequence[Section], text: str = "") -> str:
    """The HTML document. `text`: what was printed for people, folded at the end."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["clean"] = printable
    environment.filters["svg"] = Markup  # made by stoker.report's own functions, which escape what they are given
    return environment.from_string(_PAGE).render(
        title=title, subtitle=subtitle, sections=sections, text=text, style=Markup(_STYLE)
    )


def save(path: Path, document: str) -> None:
    """Write it. RunError where that isn't possible."""
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} can't be written ({error.strerror}): choose another place") from None


_STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --ground: #f4f6f9; --ink: #0f172a; --text: #334155; --faint: #64748b; --rule: #e2e8f0;
  --blue: #2563eb; --amber: #d97706; --green: #059669; --purple: #9333ea; --rose: #e11d48; --cyan: #0891b2;
  --slate: #64748b; --warm: #fff7ed; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131c2e; --ground: #0b1220; --ink: #f1f5f9; --text: #cbd5e1; --faint: #94a3b8; --rule: #253149;
  --blue: #60a5fa; --amber: #f59e0b; --green: #34d399; --purple: #c084fc; --rose: #fb7185; --cyan: #22d3ee;
  --slate: #94a3b8; --warm: #2a2013; } }
* { box-sizing: border-box }
body { margin: 0; padding: 40px 20px 64px; background: var(--ground); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Arial, "DejaVu Sans", sans-serif }
main { max-width: 956px; margin: 0 auto }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; color: var(--ink) }
h2 { font-size: 17px; margin: 0 0 6px; color: var(--ink) }
header p, .lead { margin: 0 0 14px } header { margin: 0 0 24px } header p { color: var(--faint) }
section { background: var(--page); border: 1px solid var(--rule); border-radius: 12px; padding: 24px 28px 20px;
  margin: 0 0 20px }
svg { display: block; width: 100%; height: auto; margin: 14px 0 6px; overflow: visible }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Arial, "DejaVu Sans", sans-serif; fill: var(--faint) }
svg .panel { font-size: 13px; font-weight: 600; fill: var(--text) } svg .note { font-size: 11.5px }
svg .strong, svg .value { fill: var(--text) }
svg .value, svg .note { paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round }
svg .inside { fill: var(--page); font-weight: 600; font-size: 11.5px }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round }
.grid { stroke: var(--rule) } .axis { stroke: var(--faint) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13.5px; margin: 12px 0 6px; font-variant-numeric: tabular-nums }
th, td { padding: 5px 14px 5px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule) }
th { color: var(--faint); font-weight: 500 } th.words, td.words { text-align: left }
td.long { white-space: normal; min-width: 240px } td { vertical-align: top }
tr.strong td { color: var(--ink); font-weight: 650 }
ul { margin: 10px 0 4px; padding-left: 20px; font-size: 14px } li { margin: 2px 0 }
.warning { background: var(--warm); border-left: 3px solid var(--amber); padding: 8px 14px; margin: 10px 0;
  border-radius: 0 6px 6px 0; font-size: 14px }
details summary { cursor: pointer; color: var(--faint) } pre { overflow-x: auto; font-size: 12.5px; line-height: 1.45 }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title | clean }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header><h1>{{ title | clean }}</h1><p>{{ subtitle | clean }}</p></header>
{% for section in sections %}
<section>
<h2>{{ section.title | clean }}</h2>
{% if section.lead %}<p class="lead">{{ section.lead | clean }}</p>{% endif %}
{% for warning in section.warnings %}<div class="warning">{{ warning | clean }}</div>{% endfor %}
{{ section.picture | svg }}
{% if section.table %}
<div class="scroll"><table>
<tr>{% for cell in section.table.head -%}
<th{% if loop.index0 in section.table.words %} class="words"{% endif %}>{{ cell | clean }}</th>
{%- endfor %}</tr>
{% for row in section.table.rows %}
<tr{% if loop.index0 in section.table.strong %} class="strong"{% endif %}>
{%- for cell in row -%}
<td{% if loop.index0 in section.table.words %} class="words{% if cell | length > 40 %} long{% endif %}"{% endif %}>
{{- cell | clean }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}
{% if section.notes %}<ul>{% for note in section.notes %}<li>{{ note | clean }}</li>{% endfor %}</ul>{% endif %}
</section>
{% endfor %}
{% if text %}<section><details><summary>as printed</summary><pre>{{ text | clean }}</pre></details></section>{% endif %}
</main>
</body>
</html>
"""
