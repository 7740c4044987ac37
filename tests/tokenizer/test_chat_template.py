from __future__ import annotations

import re
from typing import Any

import pytest
from tiny_tokenizers import byte_level

from minisgl.core import SamplingParams
from minisgl.message import ChatPrompt, TokenizeMsg, UserMsg, unpack_ids
from minisgl.tokenizer import ChatTemplateError, Tokenizer, tokenize_request
from minisgl.tokenizer.chat_template import ChatTemplate, text_of

LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- set ns.last = loop.index0 %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {%- if message.role == 'tool' %}{% continue %}{% endif %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": "Say <b>“hi”</b> & go"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "again"},
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü<"}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<ü>", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("theirs") / "tokenizer.json"
    byte_level().save(str(path))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIAL)


@pytest.mark.parametrize("source", [LLAMA, QWEN, MISTRAL], ids=["llama", "qwen", "mistral"])
@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        (CHAT, {}),
        (CHAT, {"add_generation_prompt": False}),
        (CHAT[:1], {"tools": TOOLS}),
        (CHAT[:1], {"enable_thinking": False}),
    ],
    ids=["chat", "no_generation_prompt", "tools", "thinking_off"],
)
def test_prompts_are_those_of_transformers(
    theirs: Any, source: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    ours = ChatTemplate({"default": source}, SPECIAL).render(messages, **variables)
    wanted = {"add_generation_prompt": True, **variables}
    assert ours == theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **wanted)


def test_an_assistant_message_with_tool_calls_needs_no_content() -> None:
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [CHAT[0], {"role": "assistant", "tool_calls": [CALL], **content}, {"role": "tool", "content": "3"}]
        text = ChatTemplate({"default": QWEN}, SPECIAL).render(messages)
        assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": "ü<"}}\n</tool_call>' in text
    # A template that adds content to strings without asking
    assert "assistant<|end_header_id|>\n\n<|eot_id|>" in ChatTemplate({"default": LLAMA}, SPECIAL).render(messages)


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "1" * 5000, ""])
def test_arguments_that_are_no_json_are_shown_as_they_are(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    text = ChatTemplate({"default": QWEN}, SPECIAL).render([CHAT[0], {"role": "assistant", "tool_calls": [call]}])
    assert f'"arguments": "{arguments}"}}' in text


def test_text_parts_are_all_there_in_order() -> None:
    parts = [{"type": "text", "text": "one "}, "two ", {"type": "text", "text": "three"}]
    assert text_of(parts) == "one two three"
    text = ChatTemplate({"default": LLAMA}, SPECIAL).render([{"role": "user", "content": parts}])
    assert "one two three<|eot_id|>" in text


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], [None], 3, {"text": "x"}]
)
def test_other_content_is_refused(content: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"text parts"):
        ChatTemplate({"default": LLAMA}, SPECIAL).render([{"role": "user", "content": content}])


def test_the_message_of_raise_exception_reaches_the_client() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate({"default": MISTRAL}, SPECIAL).render([CHAT[0], CHAT[0]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ nothing.at.all }}",
        "{% for %}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_any_failure_of_a_template_is_the_one_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template refuses these messages"):
        ChatTemplate({"default": source}, {}).render(CHAT)


def test_the_sandbox_holds() -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate({"default": "{{ messages.__class__.__mro__[1].__subclasses__() }}"}, {}).render(CHAT)


def test_no_template_and_no_messages_say_so() -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplate({}, {}).render(CHAT)
    with pytest.raises(ChatTemplateError, match="messages is empty"):
        ChatTemplate({"default": LLAMA}, {}).render([])


def test_template_variables_cannot_replace_the_messages() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be called messages"):
        ChatTemplate({"default": LLAMA}, {}).render(CHAT, messages=[])
    assert ChatTemplate({"default": "{{ self is defined }}"}, {}).render(CHAT, self=1)


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools | length }}"}, {})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "tools: 1"
    assert template.render(CHAT, tools=[]) == "plain"


def test_blocks_are_trimmed_and_dates_known() -> None:
    source = "{% if true %}\nx\n    {% endif %}\n{{ strftime_now('%Y') }}"
    assert re.fullmatch(r"x\n\d{4}", ChatTemplate({"default": source}, {}).render(CHAT))


@pytest.mark.model
def test_the_default_models_prompts_are_those_of_transformers(
    default_tokenizer: Tokenizer, transformers_default: Any
) -> None:
    for messages in (CHAT, [{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:1]):
        for generate in (True, False):
            wanted = transformers_default.apply_chat_template(
                messages, add_generation_prompt=generate, return_dict=False
            )
            prompt = ChatPrompt(messages=messages, template_kwargs={"add_generation_prompt": generate})
            request = tokenize_request(default_tokenizer, TokenizeMsg(uid=0, prompt=prompt, params=SamplingParams()))
            assert isinstance(request, UserMsg)
            assert unpack_ids(request.input_ids).tolist() == wanted
