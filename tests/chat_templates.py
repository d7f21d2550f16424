"""Chat templates of several kinds, some after those of well-known targets, and small tokenizers that carry them."""

from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.chat import RenderedChat
from data.messages import Message

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = CHATML.replace("message['content']", "(message['content'] | trim)")
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The end of a turn is not the end of the text, which the template writes once, after the last answer.
TWO_ENDS = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|eos|>' }}{% endif %}"
)
# The space before an answer is the target's, the one after it the template's.
SPACED = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Q ' + message['content'] + ' A' }}"
    "{% else %}{{ ' ' + message['content'] + ' <|eos|>' }}{% endif %}{% endfor %}"
)
NO_HEADERS = "{% for message in messages %}{{ message['content'] + '<|eot|>' }}{% endfor %}"
NO_ENDS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
# An empty thinking block before the last answer, and none before earlier ones.
THINKING_BLOCK = CHATML.replace(
    "+ message['content']",
    "+ ('<think>\n\n</think>\n\n' if loop.last and message['role'] == 'assistant' and '<think>' not in"
    " message['content'] else '') + message['content']",
)
# The prompt opens a thinking block that no rendered answer has.
THINKING_PROMPT = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")

# History loses its thinking, the last answer gets a block (an empty one if need be), tool results are user turns.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + '# Tools' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if message.reasoning_content is not string and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """
{{- '<|bos|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
GEMMA = """
{{- '<|bos|>' }}
{%- set folded = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- (folded if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
MISTRAL = """
{{- '<|bos|>' }}
{%- set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.last else '') + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
# The header is inside the markers, and so is the newline after the end of turn.
SMOLLM3 = """
{%- set think = enable_thinking is not defined or enable_thinking %}
{%- set block = '' if think else '<think>\n\n</think>\n' %}
{{- '<|im_start|>system\nReasoning Mode: ' + ('/think' if think else '/no_think') + '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {%- generation -%}
        {{- '<|im_start|>assistant\n' + block + message['content'].lstrip('\n') + '<|im_end|>\n' }}
        {%- endgeneration -%}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + block }}{%- endif %}
"""
# The prompt opens a thinking block, which no rendered answer has: not even the last one keeps its thinking.
DEEPSEEK_R1 = """
{{- '<|bos|>' + (messages[0]['content'] if messages[0]['role'] == 'system' else '') }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
"""

# fmt: off
SPECIAL_TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|bos|>", "<|eos|>", "<|eot|>", "<|user|>", "<|assistant|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "[INST]", "[/INST]", "</s>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
]
# fmt: on


def build_tokenizer(template: str | None, *, eos_token: str | None = "<|eos|>") -> PreTrainedTokenizerFast:
    """Byte-level, with few merges ('ok' and a blank line are one token each); puts <|bos|> before texts by itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["ok\n\n\nok\n\n\nok"] * 4, trainer)
    bos = ("<|bos|>", SPECIAL_TOKENS.index("<|bos|>"))
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos_token, additional_special_tokens=SPECIAL_TOKENS
    )
    tokenizer.chat_template = template
    return tokenizer


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def marked(tokenizer: PreTrainedTokenizerFast, chat: RenderedChat) -> str:
    """The chat as text, with square brackets around every supervised run of tokens."""
    return "".join(f"[{text}]" if on else text for on, text in runs_of(tokenizer, chat))


def runs_of(tokenizer: PreTrainedTokenizerFast, chat: RenderedChat) -> list[tuple[bool, str]]:
    """Texts of the runs of tokens that are, or are not, supervised."""
    pairs = zip(chat.loss_mask, chat.input_ids, strict=True)
    runs = [(on, [id for _, id in run]) for on, run in groupby(pairs, key=lambda pair: pair[0])]
    return [(on, tokenizer.decode(ids)) for on, ids in runs]
