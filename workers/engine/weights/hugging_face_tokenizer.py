"""The tokenizer of a Hugging Face directory as the fields that GGUF files carry: byte-level BPE of the kinds that are known."""

from typing import Any

from workers.engine.tokenizer import CONTROL, NORMAL, USER_DEFINED, pre_tokenizer_name
from workers.engine.weights.gguf_file import TokenizerFields


def fields_of(tokenizer: dict[str, Any], settings: dict[str, Any], template: str | None, end_ids: list[int]) -> TokenizerFields:
    """From tokenizer.json, tokenizer_config.json, the chat template and generation_config.json's end tokens.

    ValueError: a kind of tokenizer that is not read. KeyError, TypeError: the files are not what they should be.
    """
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "SentencePiece" if model.get("byte_fallback") else model.get("type")
        raise ValueError(f"tokenizer {kind!r} is not supported; supported: byte-level BPE")
    texts: dict[int, str] = {number: text for text, number in model["vocab"].items()}
    types = dict.fromkeys(texts, NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if set(texts) != set(range(len(texts))):
        raise ValueError(f"the token ids are not 0 to {len(texts) - 1}")
    bos = _id_of(texts, settings.get("bos_token"))
    return TokenizerFields(
        tokens=[texts[number] for number in range(len(texts))],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        token_types=[types[number] for number in range(len(texts))],
        pre=pre_tokenizer_name(tokenizer.get("pre_tokenizer"), bool(model.get("ignore_merges"))),
        chat_template=template,
        bos_id=bos,
        eos_id=_id_of(texts, settings.get("eos_token")),
        add_bos=bos is not None and _begins_with(tokenizer.get("post_processor"), texts[bos]),
        end_ids=end_ids,
    )


def template_of(settings: dict[str, Any]) -> str | None:
    """The template of tokenizer_config.json; of several, the one named default."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template


def _id_of(texts: dict[int, str], token: Any) -> int | None:
    text = token["content"] if isinstance(token, dict) else token
    return next((number for number, other in texts.items() if other == text), None)


def _begins_with(processor: dict[str, Any] | None, text: str) -> bool:
    # What is put around a single text: a template, or several processors of which one is a template.
    if processor is None:
        return False
    if processor["type"] == "Sequence":
        return any(_begins_with(each, text) for each in processor["processors"])
    first = (processor.get("single") or [{}])[0]
    return bool(first.get("SpecialToken", {}).get("id") == text)
