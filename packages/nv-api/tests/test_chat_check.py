"""Faults of a chat template are known at load, before it makes a prompt."""

import json
import shutil
import warnings

import nv_api
import nv_api.start
import pytest
from nv_api.chat_check import check_chat
from nv_api.tokenizer import Tokenizer, load_tokenizer

IN_MESSAGES = "{%% for m in messages %%}%s{%% endfor %%}"
CONTENT = IN_MESSAGES % "{{ m.content }}"


@pytest.fixture
def check(byte_level, monkeypatch):
    """Check a template with the byte-level tokenizer, whose control words are ChatML's."""

    def run(template):
        monkeypatch.setattr(byte_level, "chat_template", template)
        check_chat(Tokenizer(byte_level), "/models/m.gguf")

    return run


@pytest.mark.parametrize(
    "template",
    [
        "hello",
        "{{ bos_token }}",
        "{{ eos_token }}{% if tools %}{{ tools }}{% endif %}",
        IN_MESSAGES % "<|im_start|>{{ m.role }}\n<|im_end|>",
        IN_MESSAGES % "{{ m.content[:0] }}",
        "{{ messages | length }}",
        "   ",
        "{% for m in conversation %}{{ m.content }}{% endfor %}",
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
        IN_MESSAGES % "{% if false %}{{ m.content }}{% endif %}",
        "{% set text = messages[0].content %}",
        {"default": "hello"},
    ],
)
def test_a_template_that_prints_no_message_is_refused(check, template):
    with pytest.raises(ValueError, match="prints the text of no message") as error:
        check(template)
    assert str(error.value) == (
        "the chat template of /models/m.gguf prints the text of no message: correct it there, or "
        "give the place of another tokenizer with tokenizer=…"
    )


def test_a_named_template_that_prints_no_message_is_refused(check):
    with pytest.raises(ValueError, match="the chat template 'tool_use' of /models/m"):
        check({"default": CONTENT, "tool_use": "tools"})


@pytest.mark.parametrize(
    "body",
    [
        "{% if m.role == 'human' %}{{ m.content }}{% endif %}",
        "{{ m.text }}",
        "{{ m.content | length }}",
        "{{ m.content | urlencode }}",
        "{% if m['from'] == 'human' %}{{ m['value'] }}{% endif %}",
        "{% if m.role in ['query', 'document'] %}{{ m.content }}{% endif %}",
        "{% if m.role == 'system' %}{{ m.content }}{% endif %}",
        "{% if m.role != 'user' %}{{ m.content }}{% endif %}",
        "{% if m.role == 'assistant' %}{{ m.content }}{% elif m.role == 'User' %}x{% endif %}",
    ],
)
def test_a_template_of_other_roles_or_fields_is_warned_of(check, body):
    """Such a checkpoint is right for its own messages, and for generate."""
    with pytest.warns(
        UserWarning, match="does not print the content of a message with the role 'u"
    ):
        check(IN_MESSAGES % body)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ messages.first.second }}", "UndefinedError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ raise_exception('I need documents') }}", "TemplateError: I need documents"),
        (IN_MESSAGES % "{{ m.content + 1 }}", "TypeError: "),
        ("{{ messages | sum }}", "TypeError: "),
    ],
)
def test_a_template_that_fails_on_every_conversation_is_warned_of(check, template, error):
    with pytest.warns(UserWarning, match=rf"m\.gguf fails on a user's message \({error}"):
        check(template)


def test_a_template_that_needs_more_than_messages_may_fail(check):
    check({"default": CONTENT, "rag": "{{ documents[0].text }}"})


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ("<|start|>", r"<\|start\|>"),
        ("<|im_start|><|eot_id|><|im_end|>", r"<\|eot_id\|>"),
        ("<start_of_turn>user\n", "<start_of_turn>"),
        ("<|a|><|b|><|c|><|d|>", r"<\|a\|>, <\|b\|>, <\|c\|>, and 1 more"),
        ("<s>[INST] ", "<s>"),
        ("</s>", "</s>"),
        ("<｜User｜>", "<｜User｜>"),  # noqa: RUF001
        ("<|user|><|end|>", r"<\|end\|>"),
    ],
)
def test_control_words_that_are_not_tokens_are_warned_of(check, written, lost):
    message = rf"m\.gguf writes {lost}, which the vocabulary does not have as single tokens: if"
    with pytest.warns(UserWarning, match=message):
        check(IN_MESSAGES % (written + "{{ m.content }}"))


@pytest.mark.parametrize(
    "body",
    [
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>",
        "{{ bos_token }}[INST] {{ m.content | trim }} [/INST]{{ eos_token }}",
        "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n",  # Zephyr
        "### {{ m.role | upper }}: {{ m.content }} <b>x < y</b> <|| |> <tool_call>",
        "{% for c in m.content %}{{ c.text }}{% endfor %}",
        "{{ m | tojson }}",
        "{{ m.content | trim }}",
        "{% if m.role == 'user' %}{{ m.content }}{% else %}{{ raise_exception('no') }}{% endif %}",
        "{% if tools is not none %}<|tools|>{% endif %}{{ m.content }}",
        "{% if m.role != 'tool' %}{{ m.content }}{% else %}{{ raise_exception('no') }}{% endif %}",
    ],
)
def test_a_template_that_is_right_gives_no_warning(check, body):
    check(IN_MESSAGES % body)
    check(None)


@pytest.fixture
def model(folder, tmp_path, monkeypatch, engine):
    """Load a model whose template is given, of a folder or of a GGUF file's cache folder."""
    monkeypatch.setattr(nv_api.start, "Engine", lambda config: engine)

    def load(template, gguf=None, **options):
        place = tmp_path / "model"
        shutil.copytree(folder, place)
        for file in place.glob("*.jinja"):
            file.unlink()
        values = json.loads((place / "tokenizer_config.json").read_text())
        values["chat_template"] = template
        (place / "tokenizer_config.json").write_text(json.dumps(values))
        if gguf:
            record = {"file": gguf, "warnings": []}
            (place / "from_gguf.json").write_text(json.dumps(record))
        return nv_api.LLM(str(place), **options)

    return load


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("hello", "prints the text of no message"),
        ("{% for m in messages %}", "is not a Jinja template"),
        ([{"name": "rag", "template": "{% endif %}"}], "is not a Jinja template"),
    ],
)
@pytest.mark.parametrize("gguf", [None, "/models/m.gguf"])
def test_a_model_with_a_wrong_template_names_the_user_s_file(
    model, tmp_path, template, message, gguf
):
    with pytest.raises(ValueError, match=message) as error:
        model(template, gguf)
    assert (gguf or str(tmp_path / "model")) in str(error.value)
    assert (str(tmp_path) in str(error.value)) == (gguf is None)


def test_a_warning_shows_the_user_s_line(model):
    with pytest.warns(UserWarning, match=r"m\.gguf writes <\|eot_id\|>") as caught:
        model(IN_MESSAGES % "{{ m.content }}<|eot_id|>", "/models/m.gguf")
    assert caught[0].filename == __file__


def test_a_model_without_tokenizer_has_no_template_to_check(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model("hello", skip_tokenizer_init=True)


def test_a_token_of_the_vocabulary_that_no_text_matches_is_not_single(byte_level, tmp_path):
    """A GGUF file may give <|im_start|> the type of a plain word."""
    byte_level.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    values["added_tokens"] = [
        token for token in values["added_tokens"] if token["content"] != "<|im_start|>"
    ]
    file.write_text(json.dumps(values))
    config = tmp_path / "tokenizer_config.json"
    labels = json.loads(config.read_text())
    labels.pop("added_tokens_decoder", None)
    config.write_text(json.dumps(labels))
    with pytest.warns(UserWarning, match=r"writes <\|im_start\|>, which the vocabulary"):
        check_chat(Tokenizer(load_tokenizer(tmp_path)), tmp_path)
