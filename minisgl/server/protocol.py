"""The bodies that clients send, and what of them is not built.

Fields that take several shapes (``prompt``, ``content``, ``stop``) are checked in translate.py, which can say what is
wrong with them better than a union can. Unknown fields are ignored, null means the default.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

MAX_CHOICES = 128
"""Upper limit of n."""

MAX_PROMPTS = 2048
"""Upper limit of the prompts in one request."""

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    # what other servers add to them and clients send in extra_body
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "ebnf": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1,),
    "lora_path": (),
    "min_tokens": (0,),
    "prompt_logprobs": (0,),
    "regex": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that would change the answer and are not built: a 400 unless null or one of the values that change nothing."""


class Body(BaseModel):
    """What all bodies share."""

    # Extra fields are kept only to look for those of NOT_BUILT.
    model_config = ConfigDict(strict=True, extra="allow")

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class OpenAIBody(Body):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions"""

    prompt: Any = Field(None, description="A string, a list of strings, a list of token ids, or a list of such lists.")


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class GenerateSampling(Body):
    max_tokens: int | None = Field(None, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))


class GenerateBody(GenerateSampling):
    """POST /generate: ``prompt``, ``text`` or ``input_ids``; parameters beside it or in ``sampling_params``."""

    prompt: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
