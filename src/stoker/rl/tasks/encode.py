"""Rows to token ids: chat template where there are messages, never two BOS, never a trailing EOS."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker.config.schema import RunConfig, Task
from stoker.errors import ConfigError, DataError, ModelError
from stoker.rl.tasks.columns import Row
from stoker.rl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["context_limit", "conversation", "encode_rows", "special_token_notes"]


def conversation(row: Row, task: Task) -> list[Message] | None:
    """The messages to put through the chat template; None where the prompt is plain text."""
    if isinstance(row.content, str):
        if task.chat == "never" or (task.chat == "auto" and not task.system_prompt):
            return None
        messages: list[Message] = [{"role": "user", "content": row.content}]
    elif task.chat == "never":
        raise DataError(
            f"{row.id} ({row.place}) is a list of messages, and task.chat = 'never': set task.chat = 'auto'"
        )
    else:
        messages = list(row.content)
    if task.system_prompt and messages[0]["role"] != "system":  # a row's own system prompt wins
        messages.insert(0, {"role": "system", "content": task.system_prompt})
    return messages


def encode_rows(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", task: Task, model: str
) -> list[tuple[int, ...]]:
    """Token ids of every row's prompt, in order. Raises DataError where a chat template is needed and missing."""
    if task.system_prompt and task.chat == "never":
        raise DataError("task.system_prompt needs a chat template, and task.chat = 'never': set 'auto', or drop it")
    if not rows:
        return []
    prefix = _special_prefix(tokenizer)
    texts: list[str] = []
    plain: list[bool] = []
    for row in rows:
        messages = conversation(row, task)
        plain.append(messages is None)
        texts.append(str(row.content) if messages is None else _render(row, messages, tokenizer, task, model))
    # the chat template writes the special tokens itself: asking for them again would double the BOS
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [
        (*prefix, *ids) if is_plain and tuple(ids[: len(prefix)]) != prefix else tuple(ids)
        for ids, is_plain in zip(encoded, plain, strict=True)
    ]


def _special_prefix(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """What the tokenizer puts before plain text (a BOS, often). What it puts after would end the prompt."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
    return tuple(full[: starts[0]]) if starts else ()


def _render(row: Row, messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", task: Task, model: str) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"model {model} has no chat template, and {row.id} ({row.place}) needs one "
            f"({'messages' if not isinstance(row.content, str) else 'task.chat or task.system_prompt'}): "
            "take an instruction-tuned model, put a chat_template.jinja into the model's folder, "
            "or use string prompts with task.chat = 'never' and no system prompt"
        )
    goes_on = messages[-1]["role"] == "assistant"  # the row begins the answer itself
    mode: Mapping[str, Any] = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **mode, **task.chat_template_kwargs
        )
    except Exception as error:  # templates raise what they like
        raise DataError(
            f"{row.id} ({row.place}): the chat template of {model} refuses it ({type(error).__name__}: {error})"
        ) from error
    return str(text)


def special_token_notes(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """What stands for missing pad and EOS tokens. Raises ModelError where nothing would end an answer."""
    model = config.model.path
    if tokenizer.eos_token_id is None and not config.sampling.stop:
        raise ModelError(
            f"the tokenizer of {model} has no EOS token, so every answer would run to sampling.max_new_tokens: "
            "set sampling.stop (strings that end an answer), or give the tokenizer an eos_token"
        )
    notes = []
    if tokenizer.eos_token_id is None:
        notes.append(f"{model} has no EOS token: answers end only at sampling.stop = {list(config.sampling.stop)}")
    elif tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        notes.append(f"{model} has no pad token: padded with EOS {tokenizer.eos_token!r}; real EOS tokens still count")
    return notes


def context_limit(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, str]:
    """Most tokens a prompt may have, and which setting says so. Raises ConfigError where no prompt fits."""
    context = int(tokenizer.model_max_length)
    room = context - config.sampling.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens} leaves no room for a prompt in the context of "
            f"{context} tokens of {config.model.path}: lower it"
        )
    if room < config.task.max_prompt_tokens:
        return room, f"the context of {context} less sampling.max_new_tokens = {config.sampling.max_new_tokens}"
    return config.task.max_prompt_tokens, "task.max_prompt_tokens"
