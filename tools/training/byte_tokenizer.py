"""The tokenizer files of a byte-level model: each byte of the text is a token, and its value the token's id."""

from __future__ import annotations

from worker_agent.model.config import BYTES, ModelConfig


def tokenizer_files(config: ModelConfig) -> dict[str, dict[str, object]]:
    """The contents of a checkpoint's tokenizer files, by name; the library ``tokenizers`` reads them as they are.

    It is byte-pair encoding without any pairs: what remains are the bytes, in the characters that GPT-2 gave them.
    """
    spelling = byte_characters()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(spelling)},
        "merges": [],
    }
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.context,
            "clean_up_tokenization_spaces": False,
        },
    }


def byte_characters() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else the next free one from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(spare)) for byte in range(BYTES)]
