"""The memory of a training set-up by arithmetic."""

from collections.abc import Callable, Mapping

from stoker.errors import ConfigError
from stoker.memory.activations import embedded, ending, kept, residual, working
from stoker.memory.breakdown import MOMENTS, Breakdown, Margin, Row
from stoker.memory.setup import LOSSES, UNGRADED, Setup
from stoker.memory.shape import Block, ModelShape
from stoker.memory.states import States, states_of

__all__ = ["predict", "state_rows", "together"]

LOSS, BEGINS, ENDS, TABLES, STEP = MOMENTS
FORWARD = (LOSS,)
BACKWARD = (BEGINS, ENDS)


def predict(shape: ModelShape, setup: Setup, margin: Margin | None = None) -> Breakdown:
    """Bytes of one training step of `shape` on one device, from its second step on.

    Weights, gradients and states are exact; so is what layers keep, for the families and kernels that
    `stoker.memory.activations` names. What a backward pass holds beyond that is an estimate, and `margin` (what the
    allocator adds) is fitted. With `optimizer = "none"` the model only scores: a forward pass without gradients.
    """
    states = states_of(shape.weights(setup.lora_rank), setup)
    rows = [
        *state_rows(states, setup),
        *(_trained(shape, setup) if setup.trains else _scored(shape, setup)),
        *_cache(shape, setup),
    ]
    return Breakdown(f"{shape.name}, {_words(setup)}", setup.examples, tuple(rows), _margin(margin, setup))


def together(roles: Mapping[str, tuple[ModelShape, Setup]], margin: Margin | None = None) -> Breakdown:
    """Several models on one device, one at work at a time: policy, reference, reward model, critic.

    All weights, gradients and states stay; of what only a pass or a step needs, there is one role's at a time: that of
    the role with the largest peak. Rows are named `role: row`. Raises ConfigError where there is no role.
    """
    if not roles:
        raise ConfigError("memory of roles: name at least one")
    found = {role: predict(shape, setup) for role, (shape, setup) in roles.items()}
    passing = {role: {m: one.at(m) - _staying(one) for m in MOMENTS} for role, one in found.items()}
    largest = max(found, key=lambda role: max(passing[role].values()))
    rows = [
        Row(f"{role}: {row.name}", row.nbytes, row.moments, row.per_example, row.host, row.note)
        for role, one in found.items()
        for row in one.rows
        if role == largest or _stays(row)
    ]
    name, at_work = " + ".join(roles), roles[largest][1]
    return Breakdown(name, found[largest].examples, tuple(rows), _margin(margin, at_work))


def _margin(margin: Margin | None, setup: Setup) -> Margin:
    return (margin or Margin()).resolved(setup.checkpointing)


def state_rows(states: States, setup: Setup) -> list[Row]:
    """What is there whatever the batch; also for a model known by a trace alone."""
    resting = setup.accumulating  # gradients wait through the forward passes of the next micro-batches
    rows = [
        Row("context", setup.context, note="before anything is in memory" if setup.context else ""),
        Row("weights", states.weights),
        Row("optimizer states", states.optimizer, host=setup.offload, note="offloaded" if setup.offload else ""),
        Row("gradients", states.gradients, MOMENTS if resting else (TABLES, STEP)),
    ]
    if not resting:
        rows += [
            Row("head's gradient", states.head_gradient, (BEGINS,), note="the first to be made"),
            Row("gradients but the input tables'", states.gradients - states.input_gradient, (ENDS,)),
        ]
    return [
        *rows,
        Row("second gradient of the tied table", states.table_gradient, (TABLES,)),
        Row("16-bit copies of weights", states.cast, (LOSS, BEGINS), note="made by autocast"),
        Row("gathered layers", states.gathered, (LOSS, *BACKWARD), note="two whole ones at a time"),
        Row("optimizer's temporaries", 0 if setup.offload else states.stepping, (STEP,), note=setup.stepping),
    ]


def _trained(shape: ModelShape, setup: Setup) -> list[Row]:
    row = _per_example(setup)
    whole = {block: kept(block, shape, setup) for block in shape.blocks}
    inputs = {block: float(shape.hidden * residual(setup)) for block in shape.blocks}
    held = inputs if setup.checkpointing else whole
    total = sum(block.layers * held[block] for block in shape.blocks)
    again = max(whole.values()) if setup.checkpointing else 0.0
    largest = max(working(block, shape, setup) for block in shape.blocks)
    logits = LOSSES[setup.loss]
    size = setup.bytes_of.compute
    edges = embedded(shape, setup)
    layers = "each layer's input" if setup.checkpointing else "what layers keep"
    return [
        row("batch and embeddings", edges, MOMENTS, "ids stay"),
        row("activations", total, (LOSS, BEGINS), layers),
        row("the first layer's activations", held[shape.blocks[0]], (ENDS,), ""),
        row("one layer computed again", again, BACKWARD, "checkpointing"),
        row("one layer's backward pass", largest, BACKWARD, "gradients of its activations"),
        row("final norm and head", ending(shape, setup), FORWARD, ""),
        _logits_row(shape, setup, logits.peak[size]),
    ]


def _scored(shape: ModelShape, setup: Setup) -> list[Row]:
    """Without gradients a layer's tensors are dropped as soon as the next operation has them."""
    row = _per_example(setup)
    size = setup.bytes_of.compute
    wide = max(_wide(block) for block in shape.blocks) * size
    return [
        row("one layer's forward pass", wide + 3 * shape.hidden * residual(setup), FORWARD, "without gradients"),
        _logits_row(shape, setup, UNGRADED[size] if setup.loss != "none" else 0),
    ]


def _wide(block: Block) -> int:
    attention = block.attention
    return max((3 if block.mlp.gated else 2) * block.mlp.active, attention.query * 2 + attention.keys * 2)


def _logits_row(shape: ModelShape, setup: Setup, nbytes: float) -> Row:
    everything = setup.examples * setup.tokens
    if setup.logits_chunk and setup.logits_chunk < everything:
        chunk = setup.logits_chunk * shape.logits * nbytes
        return Row("logits", chunk, FORWARD, note=f"{setup.logits_chunk} tokens at a time")
    return _per_example(setup)("logits", shape.logits * nbytes, FORWARD, "with their gradients")


def _cache(shape: ModelShape, setup: Setup) -> list[Row]:
    if not setup.cache_tokens:
        return []
    nbytes = setup.cache_tokens * shape.cache_elements() * setup.cache_bytes
    return [Row("key-value cache", nbytes, note=f"{setup.cache_tokens:,} tokens")]


def _per_example(setup: Setup) -> Callable[[str, float, tuple[str, ...], str], Row]:
    def row(name: str, per_token: float, moments: tuple[str, ...], note: str) -> Row:
        one = per_token * setup.tokens
        return Row(name, one * setup.examples, moments, one, note=note)

    return row


def _stays(row: Row) -> bool:
    """Gradients and states outlive the passes of other models."""
    return row.name in {"context", "weights", "optimizer states", "gradients", "key-value cache"}


def _staying(found: Breakdown) -> float:
    return sum(row.nbytes for row in found.rows if _stays(row) and not row.host)


def _words(setup: Setup) -> str:
    words = [setup.precision, setup.optimizer] if setup.trains else [setup.precision, "scoring"]
    words += [setup.quantised] if setup.quantised else []
    words += [f"LoRA of rank {setup.lora_rank}"] if setup.lora_rank else []
    words += ["checkpointing"] if setup.checkpointing else []
    words += [f"{setup.sharding} over {setup.ranks} ranks"] if setup.sharding != "none" else []
    return ", ".join(words)
