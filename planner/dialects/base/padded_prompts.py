"""How many tokens a prompt is filled up to, in a trainer that has no setting for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.dialects.base.bindings import Fields, FunctionPair, InexpressibleError, Settings, UnsupportedValue


def padded_prompts(model_of: Callable[[Settings], Fields], tokens: Mapping[str, int], why: str) -> FunctionPair:
    """A binding of `text_tokens`: a model's usual length, but for models whose prompts the trainer fills up to another.

    ``tokens``: model -> that length. ``why``: where the trainer's code says so.
    """

    def read(settings: Settings) -> Fields:
        return {"text_tokens": tokens.get(model_of(settings)["model"])}

    def write(fields: Fields) -> Settings:
        length = tokens.get(fields["model"])
        if length is not None and fields["text_tokens"] != length:
            raise InexpressibleError(UnsupportedValue("text_tokens", fields["text_tokens"], length, why))
        return {}

    words = "the model's usual length" + "".join(f"; {length} of {model}" for model, length in tokens.items())
    return FunctionPair(("text_tokens",), (), read, write, {"text_tokens": words})
