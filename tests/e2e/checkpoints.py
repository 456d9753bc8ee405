"""Tiny real checkpoints with fixed seeds. Runs inside the vLLM environment: `python checkpoints.py TARGET_DIR`.

Random weights of the usual small scale give a model that repeats one token, and a wrong cache would go
unseen. A wide initialisation makes every token depend on the whole prompt.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SEED = 20240817
INITIALIZER_RANGE = 0.15
VOCABULARY = 320  # 256 bytes, the special tokens, and room to a round number
BEGIN, END, PAD = 256, 257, 258
POSITIONS = 4096


def qwen3_next() -> PreTrainedModel:
    """Gated DeltaNet and attention in turns: three recurrent cache groups and one of attention, block 640."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return Qwen3NextForCausalLM(config)


def lfm2() -> PreTrainedModel:
    """Short convolutions and attention in turns, block 128."""
    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        conv_dim=128,  # published checkpoints carry conv_dim and block_dim, and vLLM reads them
        block_dim=128,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return Lfm2ForCausalLM(config)


def llama() -> PreTrainedModel:
    """Attention only, one cache group."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


MODELS = {"qwen3_next": qwen3_next, "lfm2": lfm2, "llama": llama}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a text of n ASCII characters is a prompt of n tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|pad|>"])
    assert tokenizer.token_to_id("<|begin|>") == BEGIN, (
        "the model's special token ids would name other tokens"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def write_checkpoint(name: str, target: Path) -> None:
    """Write one checkpoint with its tokenizer, in bfloat16 safetensors."""
    torch.manual_seed(SEED)
    model = MODELS[name]().to(torch.bfloat16)
    config: PreTrainedConfig = model.config
    config.architectures = [type(model).__name__]
    model.save_pretrained(target, safe_serialization=True)
    byte_tokenizer().save_pretrained(target)
    generation = target / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": END, "bos_token_id": BEGIN}))


def main(target: Path) -> None:
    """Write every checkpoint below `target`."""
    for name in MODELS:
        write_checkpoint(name, target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
