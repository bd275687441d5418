"""Write the tokenizer of the embedded tiny model: one token for each character, no BOS.

Run once, by whoever changes the alphabet: `python scripts/make_embedded_tokenizer.py`. The files it
writes into src/stoker/embedded/tiny are package data; the model's vocab_size must match.
"""

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent.parent / "src" / "stoker" / "embedded" / "tiny"
SPECIAL = ("<pad>", "<eos>", "<unk>")
ALPHABET = string.digits + "+-*/=()<>?:., \n" + string.ascii_lowercase
CONTEXT = 64


def build() -> PreTrainedTokenizerFast:
    """Characters of ALPHABET are tokens; any other becomes <unk>."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Save it beside the model's config."""
    build().save_pretrained(FOLDER)
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    size = len(SPECIAL) + len(ALPHABET)
    if config["vocab_size"] != size:
        raise SystemExit(
            f"{FOLDER / 'config.json'} has vocab_size {config['vocab_size']}, the tokenizer {size}: mend it"
        )
    print(f"{size} tokens in {FOLDER}")


if __name__ == "__main__":
    main()
