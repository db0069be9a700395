"""Our tokenizer in Hugging Face's files: the same ids, without a library to write them.

`tokenizer.json` is what the tokenizers library reads, `tokenizer_config.json` what transformers adds to it.
"""

from pathlib import Path
from typing import Any

from nanochat_gka.data.tokenizer import SPLIT_PATTERN, Tokenizer
from trainkit_gka.files import write_json

# GPT-2's letters for bytes: printable ones stand for themselves, the others follow from U+0100 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_NOT_PRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {byte: chr(byte if byte in _PRINTABLE else 0x100 + _NOT_PRINTABLE.index(byte)) for byte in range(256)}


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that config.json states.

    BOS begins every document, so it ends the one before. The last special token pads: collators take what pads out of
    the labels, and this one, <|output_end|>, is never a label. In nanochat's chats it ends what a tool wrote.
    """
    ids = list(tokenizer.special.values())
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.bos_id, "pad_token_id": ids[-1]}


def save(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write both files to `folder`. longest: tokens of context, from which on transformers warns.

    Special tokens inside a text are ordinary text, as for `Tokenizer.encode`, unless the caller passes
    split_special_tokens=False.
    """
    named = {use.removesuffix("_id"): tokenizer.decode([number]) for use, number in special_ids(tokenizer).items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "extra_special_tokens": [token for token in tokenizer.special if token not in named.values()],
        "split_special_tokens": True,
        "padding_side": "left",
        "truncation_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
    }
    write_json(Path(folder) / "tokenizer.json", backend(tokenizer))
    write_json(Path(folder) / "tokenizer_config.json", settings)


def backend(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE, and BOS before every text."""
    bos = tokenizer.decode([tokenizer.bos_id])
    literal = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    first, second = (
        [{"SpecialToken": {"id": bos, "type_id": number}}, {"Sequence": {"id": name, "type_id": number}}]
        for number, name in enumerate("AB")
    )
    cuts = ((token[:cut], token[cut:]) for token in tokenizer.tokens for cut in range(1, len(token)))
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer")),
        "added_tokens": [{"id": number, "content": token, **literal} for token, number in tokenizer.special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytewise]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": first + second,
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
        },
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as tiktoken: a chunk that is a token is that token, whatever its merges are
            "vocab": {_letters(token): rank for token, rank in tokenizer.ranks.items()},
            # All pairs of tokens that are a token together, in the order of its rank: tiktoken merges any of them.
            "merges": [[*map(_letters, pair)] for pair in cuts if tokenizer.ranks.keys() >= {*pair}],
        },
    }


def _letters(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)
