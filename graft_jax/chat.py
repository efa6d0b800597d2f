"""Chat templates: Jinja text from a checkpoint, rendered as transformers renders it."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Templates by name, for checkpoints that carry none.
NAMED_TEMPLATES = {
    # FastChat's vicuna_v1.1: a space after the system text and after each user turn, the end token after
    # each assistant turn.
    "vicuna": """\
{%- if messages[0]['role'] == 'system' -%}
  {%- set system = messages[0]['content'] -%}
  {%- set turns = messages[1:] -%}
{%- else -%}
  {%- set system = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." -%}
  {%- set turns = messages -%}
{%- endif -%}
{{- bos_token + system + ' ' -}}
{%- for message in turns -%}
  {%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
    {{- raise_exception('user and assistant must take turns, the user first') -}}
  {%- endif -%}
  {%- if message['role'] == 'user' -%}
    {{- 'USER: ' + message['content'] + ' ' -}}
  {%- else -%}
    {{- 'ASSISTANT: ' + message['content'] + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'ASSISTANT:' -}}
{%- endif -%}
""",
}


class ChatTemplate:
    """A compiled template.

    Args:
        text: Jinja source, or a name from `NAMED_TEMPLATES`.
        where: the file it comes from, for messages.

    Raises:
        ValueError: the source is no valid Jinja.
    """

    def __init__(self, text: str, where: str):
        self.where = where
        try:
            self._template = _environment().from_string(NAMED_TEMPLATES.get(text, text))
        except jinja2.TemplateError as error:
            raise ValueError(f"{where}: the chat template is broken: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """The prompt text.

        Args:
            messages: each with at least a "role".
            arguments: further template variables, e.g. `enable_thinking=False`.

        Raises:
            ValueError: the messages are malformed, or the template refuses them.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
            raise ValueError(f"messages={messages!r} must be a list of at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{i}]={message!r} must be an object with 'role' and 'content'")
        variables = {"tools": None, "documents": None} | arguments
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # template code raises whatever its operations raise
            raise ValueError(f"{self.where}: the chat template failed: {error}") from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for loss masks; rendering passes over it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    # The sandbox matters: templates come with downloaded checkpoints.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
