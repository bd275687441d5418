"""A transformer as its memory sees it: which matrices it has, and what its layers keep for the backward pass.

Letters as in the formulas of `activations`: h hidden size, q query heads x head dim, k key-value heads x head dim,
f width of the MLP, a query heads, V vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.errors import ConfigError

__all__ = ["Attention", "Block", "Matrix", "Mlp", "ModelShape", "Norm", "Weights"]

Norm = Literal["rms", "gemma", "layer"]
"""RMSNorm as Llama computes it, as Gemma does (fp32 throughout), or LayerNorm."""


@dataclass(frozen=True)
class Matrix:
    """A linear map, or as many alike as `count`."""

    name: str
    inputs: int
    outputs: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class Attention:
    """One layer's attention. Widths are of all heads together."""

    heads: int
    query: int
    keys: int
    values: int
    output: int
    """Of what goes into the last of its matrices."""
    normed: bool = False
    """Queries and keys are normalised per head."""
    rotary: bool = True
    softcap: bool = False
    latent: bool = False
    """Keys and values are computed from a latent (MLA)."""
    cached: int = 0
    """Elements that a token adds to the cache: keys and values, or the latent of MLA."""


@dataclass(frozen=True)
class Mlp:
    """One layer's MLP. With experts, `width` is one expert's."""

    width: int
    gated: bool
    activation: str
    experts: int = 0
    visited: int = 1
    """Experts that a token visits, shared ones included."""

    @property
    def active(self) -> int:
        """Width that a token meets."""
        return self.width * self.visited


@dataclass(frozen=True)
class Block:
    """Layers that are alike."""

    layers: int
    matrices: tuple[Matrix, ...]
    vectors: int
    """Parameters of one layer that are in no matrix: biases and norms."""
    attention: Attention
    mlp: Mlp
    norm: Norm
    norms: int = 2
    """4: the outputs of attention and MLP are normalised too."""
    post_norm: bool = False
    """The norm follows the residual sum (BERT)."""

    @property
    def linear(self) -> int:
        """Parameters of one layer's matrices."""
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def parameters(self) -> int:
        """Of one layer."""
        return self.linear + self.vectors


@dataclass(frozen=True)
class Weights:
    """Parameters counted by what memory does with them."""

    parameters: int
    linear: int
    """In the layers' matrices: what is quantised, adapted, and what Muon moves."""
    trained: int
    """With adapters: theirs alone."""
    largest: int
    """Of the largest single tensor that is trained: an optimizer's loop makes temporaries of its size."""
    table: int
    """Of the table that is both embedding and head; 0 where they are two."""
    input_tables: int
    """Of input tables that are no head too (positions, or an untied embedding)."""
    head_table: int
    """Of the matrix onto the vocabulary, tied or not; 0: there is none."""
    layer: int
    """Of the largest layer: the unit that sharded training gathers."""

    factored: int
    """Rows and columns of all trained matrices, and elements of all else: what Adafactor keeps."""

    @property
    def unquantised(self) -> int:
        """Parameters that quantisation leaves as they are: embeddings, head, norms, biases."""
        return self.parameters - self.linear


@dataclass(frozen=True)
class ModelShape:
    """A transformer's sizes, from its config (`shape_of`); counts are exact, tied tables counted once."""

    name: str
    """Model type and architecture."""
    causal: bool
    hidden: int
    vocabulary: int
    blocks: tuple[Block, ...]
    embeddings: int
    """Parameters of the input tables."""
    head: int
    """Parameters after the last layer beyond its norm; of a tied table only what the head adds (its bias)."""
    final: int
    """Parameters of the norms before and after the layers."""
    tied: bool
    logits: int
    """Outputs at each token: the vocabulary, labels, or 0."""
    dropout: float = 0.0
    """Of the residual stream, by the config."""
    attention_dropout: float = 0.0

    @property
    def layers(self) -> int:
        return sum(block.layers for block in self.blocks)

    @property
    def parameters(self) -> int:
        """Exactly those of the transformers model of this config."""
        return self.embeddings + sum(block.layers * block.parameters for block in self.blocks) + self.final + self.head

    @property
    def linear(self) -> int:
        """Parameters in the layers' matrices."""
        return sum(block.layers * block.linear for block in self.blocks)

    def adapters(self, rank: int) -> int:
        """Trainable parameters of LoRA on every linear map of the layers; joint tensors of experts get none."""
        return sum(
            block.layers * matrix.count * rank * (matrix.inputs + matrix.outputs)
            for block in self.blocks
            for matrix in block.matrices
            if "expert" not in matrix.name
        )

    def weights(self, lora_rank: int = 0) -> Weights:
        """Counts for `states`. `lora_rank` 0: every parameter is trained."""
        table = self.hidden * self.vocabulary
        matrices = [matrix for block in self.blocks for matrix in block.matrices]
        on_vocabulary = self.logits == self.vocabulary
        if lora_rank:
            largest = lora_rank * max(max(matrix.inputs, matrix.outputs) for matrix in matrices)
        else:
            largest = max(table, *(matrix.parameters for matrix in matrices))
        return Weights(
            parameters=self.parameters,
            linear=self.linear,
            trained=self.adapters(lora_rank) if lora_rank else self.parameters,
            largest=largest,
            table=table if self.tied and on_vocabulary else 0,
            input_tables=self.embeddings - (table if self.tied and on_vocabulary else 0),
            head_table=table if on_vocabulary else self.hidden * self.logits,
            layer=max(block.parameters for block in self.blocks),
            factored=self._factored(lora_rank),
        )

    def _factored(self, lora_rank: int) -> int:
        def edges(matrix: Matrix) -> int:
            if lora_rank:
                return (2 * lora_rank + matrix.inputs + matrix.outputs) * ("expert" not in matrix.name)
            return matrix.inputs + matrix.outputs

        layers = sum(
            block.layers
            * (sum(matrix.count * edges(matrix) for matrix in block.matrices) + block.vectors * (not lora_rank))
            for block in self.blocks
        )
        tables = 1 + (self.logits == self.vocabulary and not self.tied)
        return layers + (0 if lora_rank else tables * (self.hidden + self.vocabulary))

    def cache_elements(self) -> int:
        """Elements of the key-value cache for each token."""
        if not self.causal:
            raise ConfigError(f"{self.name} is an encoder: it has no key-value cache")
        return sum(block.layers * block.attention.cached for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return asdict(self) | {"parameters": self.parameters, "layers": self.layers}

    def __str__(self) -> str:
        tied = ", head tied to the embeddings" if self.tied and self.logits else ""
        return f"{self.name}: {self.parameters:,} parameters, {self.layers} layers of width {self.hidden}{tied}"
