"""A folder's chat template renders as transformers renders it, or the client is told why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import BatonError, ErrorKind, StartupError
from common.model.chat_template import ChatTemplate

CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "  Hi <b>&  there\n"},
    {"role": "assistant", "content": "Hello.", "tool_calls": None},
    {"role": "user", "content": "日本 😀 <|im_end|>"},
]
TEMPLATES = {
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "blocks": "{% for m in messages %}\n   {% if m.role == 'user' %}\n {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "tools": "{% if tools %}{{ tools | tojson }}{% else %}none{% endif %}{{ 'documents' if documents }}",
    "absent key": "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else '-' }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "prompt": "{{ 'assistant:' if add_generation_prompt else 'end' }}",
}


def with_template(source: Path, target: Path, template: Any, *, file: str | None = None) -> Path:
    target.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    if file is not None:
        (target / "chat_template.jinja").write_text(file)
    return target


def oracle(folder: Path, add_generation_prompt: bool, **kwargs: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_tiny_models_template_renders_as_in_transformers(
    tiny_model_folder: Path, add_generation_prompt: bool
) -> None:
    rendered = ChatTemplate(tiny_model_folder).render(CHAT, add_generation_prompt=add_generation_prompt)
    assert rendered == oracle(tiny_model_folder, add_generation_prompt)
    assert rendered.endswith("<|im_start|>assistant\n") == add_generation_prompt


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_each_feature_renders_as_in_transformers(tiny_model_folder: Path, tmp_path: Path, template: str) -> None:
    folder = with_template(tiny_model_folder, tmp_path / "model", template)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": "<é>"}}}]
    rendered = ChatTemplate(folder).render(CHAT, tools=tools)
    assert rendered == oracle(folder, add_generation_prompt=True, tools=tools)
    assert rendered


def test_the_file_beside_the_config_wins(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_model_folder, tmp_path / "model", "from the config", file="from the file")
    assert ChatTemplate(folder).render(CHAT) == "from the file"


def test_of_named_templates_the_default_is_taken(tiny_model_folder: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert ChatTemplate(with_template(tiny_model_folder, tmp_path / "model", named)).render(CHAT) == "yes"


def test_special_tokens_may_be_objects(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_model_folder, tmp_path / "model", "{{ eos_token }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": {"content": "</s>"}}))
    assert ChatTemplate(folder).render(CHAT) == "</s>"


def test_now_is_a_date(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_model_folder, tmp_path / "model", "{{ strftime_now('%Y') | int > 2000 }}")
    assert ChatTemplate(folder).render(CHAT) == "True"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages.append(1) }}", "safe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range"),
    ],
)
def test_what_a_template_refuses_is_the_users_error(
    tiny_model_folder: Path, tmp_path: Path, template: str, reason: str
) -> None:
    chat_template = ChatTemplate(with_template(tiny_model_folder, tmp_path / "model", template))
    with pytest.raises(BatonError, match=reason) as caught:
        chat_template.render(CHAT)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, "messages")
    assert "\n" not in caught.value.message


def test_a_model_without_template_refuses_chats_only(tiny_model_folder: Path, tmp_path: Path) -> None:
    chat_template = ChatTemplate(with_template(tiny_model_folder, tmp_path / "model", None))
    with pytest.raises(BatonError, match="no chat template"):
        chat_template.render(CHAT)


def test_no_messages_are_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(BatonError, match="empty"):
        ChatTemplate(tiny_model_folder).render([])


@pytest.mark.parametrize("in_file", [True, False])
def test_a_template_that_does_not_parse_is_found_at_the_start(
    tiny_model_folder: Path, tmp_path: Path, in_file: bool
) -> None:
    broken = "{% for m in messages %}"
    folder = with_template(tiny_model_folder, tmp_path / "model", broken, file=broken if in_file else None)
    with pytest.raises(StartupError, match="chat_template.jinja" if in_file else "tokenizer_config.json"):
        ChatTemplate(folder)


def test_messages_are_left_as_they_were(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_model_folder, tmp_path / "model", "{{ messages[0].update({'role': 'x'}) }}")
    before = json.dumps(CHAT)
    with pytest.raises(BatonError):
        ChatTemplate(folder).render(CHAT)
    assert json.dumps(CHAT) == before
