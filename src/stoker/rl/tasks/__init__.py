"""Prompts for a run: rows from any source, held-out split, token ids, and a resumable order.

`read_rows` needs no tokenizer, so bad data is found before a model loads; `load` does it all.
"""

from stoker.rl.tasks.columns import Row
from stoker.rl.tasks.data import TaskData, load
from stoker.rl.tasks.read import TaskRows, read_rows
from stoker.rl.tasks.stream import PromptStream

__all__ = ["PromptStream", "Row", "TaskData", "TaskRows", "load", "read_rows"]
