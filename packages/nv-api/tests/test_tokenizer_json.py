"""tokenizer.json is the tokenizer, whatever the files beside it say."""

import json

import pytest
from nv_api.tokenizer import Tokenizer, load_tokenizer
from tokenizers import Tokenizer as Words
from tokenizers import decoders, models, pre_tokenizers, processors

TEXTS = [
    "hello world, this is",
    " hello  hello\n\n\tworld ",
    "1234567890 3.14",
    "don't DON'T naïve café",
    "日本語 👩‍👩‍👧 \u0301e",
    "<|im_start|>user\nhello<|im_end|>\n",
    "a <|im_end|> b<think>c<|endoftext|>",
    "def f(x):\n    return {'a': x}\n",
    "</s><s> [INST] ▁hello",
    "",
]
LABELS = [
    None,
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "T5Tokenizer",
    "BertTokenizerFast",
    "PreTrainedTokenizerFast",
    "PythonBackend",
    "SomebodysTokenizer",
]


@pytest.fixture
def written(tmp_path):
    """A folder with a tokenizer.json, and the files beside it as given."""

    def write(backend, labels=None, **files):
        backend.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
        files = {"tokenizer_config": labels, **files}
        for name, values in files.items():
            if values is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(values))
        return tmp_path

    return write


def assert_is_its_json(folder):
    """The tokenizer of a folder makes the same ids and texts as its tokenizer.json alone."""
    backend, words = load_tokenizer(folder), Words.from_file(str(folder / "tokenizer.json"))
    words.no_truncation()
    words.no_padding()
    ids = [encoding.ids for encoding in words.encode_batch(TEXTS)]
    assert Tokenizer(backend).encode(TEXTS) == ids
    assert backend.get_vocab() == words.get_vocab()
    for each in ids:
        assert backend.decode(each) == words.decode(each, skip_special_tokens=False)
    return backend


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_b01_no_label_changes_a_word(written, request, kind, label, model_type):
    config = {} if label is None else {"tokenizer_class": label}
    files = {"config": {"model_type": model_type, "tokenizer_class": label}}
    assert_is_its_json(written(request.getfixturevalue(kind), config, **files))


@pytest.mark.parametrize(
    "values",
    [
        {"add_prefix_space": True},
        {"legacy": True},
        {"legacy": False, "tokenizer_class": "LlamaTokenizer"},
        {"split_special_tokens": True},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"add_eos_token": True, "eos_token": "<|im_end|>"},
        {"clean_up_tokenization_spaces": False},
        {"eos_token": "hello"},
        {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}},
        {"fast_tokenizer_files": ["tokenizer.0.0.1.json"]},
        {"added_tokens_decoder": {"258": {"content": "<|im_end|>", "rstrip": True}}},
    ],
)
def test_b01_no_value_of_the_config_changes_a_word(written, byte_level, values):
    assert_is_its_json(written(byte_level, values))


def test_b01_another_id_of_a_token_is_warned_of(written, byte_level):
    added = {"added_tokens_decoder": {"7": {"content": "<|im_end|>", "special": True}}}
    with pytest.warns(UserWarning, match=r"'<\|im_end\|>' the id 7, .* 258: 258 is used"):
        assert_is_its_json(written(byte_level, added))


def test_b01_without_a_tokenizer_config(written, byte_level):
    assert_is_its_json(written(byte_level))


def test_b01_what_is_put_around_a_text_stands_in_tokenizer_json(written, byte_level, tmp_path):
    folder = written(byte_level, {"add_bos_token": False, "bos_token": "<|im_start|>"})
    words = Words.from_file(str(tmp_path / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    assert assert_is_its_json(folder)("hello").input_ids[0] == 257


@pytest.mark.parametrize("form", ["$A <s>:0", "$A"])
def test_16_a_post_processor_with_an_id_that_no_token_has_is_refused(
    written, byte_level, tmp_path, form
):
    folder = written(byte_level)
    words = Words.from_file(str(tmp_path / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing(
        single=form, pair="$A $B:0 <s>:0", special_tokens=[("<s>", 9999)]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"post_processor of .*tokenizer.json adds .* id 9999"):
        load_tokenizer(folder)


def test_b01_a_prompt_is_neither_cut_nor_filled_up(written, byte_level, tmp_path):
    folder = written(byte_level)
    words = Words.from_file(str(tmp_path / "tokenizer.json"))
    words.enable_truncation(4)
    words.enable_padding(pad_id=9, pad_token="[PAD]", length=300)
    words.save(str(tmp_path / "tokenizer.json"))
    backend = assert_is_its_json(folder)
    assert [len(ids) for ids in Tokenizer(backend).encode(["abcdefgh", "a"])] == [8, 1]


@pytest.mark.parametrize(
    "token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": True, "__type": "AddedToken"}]
)
@pytest.mark.parametrize("place", ["tokenizer_config", "special_tokens_map"])
def test_special_tokens_have_names(written, byte_level, token, place):
    named = {"eos_token": token, "pad_token": "<|endoftext|>", "bos_token": None}
    more = {"additional_special_tokens": ["<|im_start|>", {"content": "日本"}]}
    backend = load_tokenizer(
        written(byte_level, **{place: named | more, "config": {"model_type": "llama"}})
    )
    assert (backend.eos_token, backend.eos_token_id) == ("<|im_end|>", 258)
    assert (backend.pad_token_id, backend.bos_token) == (256, None)
    assert backend.extra_special_tokens == ["<|im_start|>", "日本"]
    assert set(backend.all_special_tokens) == {
        "<|im_end|>", "<|endoftext|>", "<|im_start|>", "日本",
    }  # fmt: skip


def test_an_older_special_tokens_map_wins_over_the_config(written, byte_level):
    config, names = {"eos_token": "<|endoftext|>"}, {"eos_token": "<|im_end|>"}
    older = load_tokenizer(written(byte_level, config, special_tokens_map=names))
    assert older.eos_token == "<|im_end|>"
    config["added_tokens_decoder"] = {"256": {"content": "<|endoftext|>", "special": True}}
    newer = load_tokenizer(written(byte_level, config, special_tokens_map=names))
    assert newer.eos_token == "<|endoftext|>"


def test_other_values_of_the_config_are_kept(written, byte_level):
    values = {"model_max_length": 77, "clean_up_tokenization_spaces": True, "padding_side": "left"}
    backend = load_tokenizer(written(byte_level, values))
    assert {name: getattr(backend, name) for name in values} == values


def test_a_model_s_own_special_token_reaches_its_template(written, byte_level):
    values = {"image_token": "<think>", "chat_template": "{{ image_token }}{{ eos_token }}"}
    backend = load_tokenizer(written(byte_level, values | {"eos_token": "<|im_end|>"}))
    assert backend.apply_chat_template([{"role": "user"}], tokenize=False) == "<think><|im_end|>"


def test_a_name_of_a_token_that_is_not_there_is_left_out(written, byte_level):
    folder = written(byte_level, {"eos_token": "<|im_end|>", "pad_token": "[PAD]"})
    with pytest.warns(UserWarning, match=r"names pad_token '\[PAD\]', which tokenizer.json does"):
        backend = assert_is_its_json(folder)
    assert (backend.eos_token, backend.pad_token) == ("<|im_end|>", None)


@pytest.mark.parametrize("place", ["tokenizer_config", "added_tokens"])
def test_tokens_added_later_keep_their_ids(written, byte_level, place):
    size = len(byte_level)
    added = {
        "tokenizer_config": {"added_tokens_decoder": {str(size): {"content": "<tool>"}}},
        "added_tokens": {"<tool>": size},
    }
    backend = load_tokenizer(
        written(byte_level, **{place: added[place], "config": {"model_type": "llama"}})
    )
    assert backend("hello<tool>").input_ids == [*byte_level("hello").input_ids, size]


def test_a_token_added_later_at_another_id_is_refused(written, byte_level):
    folder = written(byte_level, added_tokens={"<tool>": 9})
    with pytest.raises(ValueError, match="gives '<tool>' the id 9, and the next id of"):
        load_tokenizer(folder)


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
ADDED = [{"id": 0, "content": "<s>", "special": True, **dict.fromkeys(FLAGS, False)}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "tokenizer.json is empty"),
        (
            "version https://git-lfs.github.com/spec/v1\noid",
            "is a Git LFS pointer.*`git lfs pull`",
        ),
        (json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}), "has no tokens"),
        *(
            (
                json.dumps({"added_tokens": ADDED, "model": model}),
                "has no tokens, or only added ones",
            )
            for model in (
                {"type": "BPE", "vocab": {}, "merges": []},
                {"type": "BPE", "vocab": {"<s>": 0}, "merges": []},
                {"type": "WordLevel", "vocab": {}, "unk_token": "<s>"},
                {
                    "type": "WordPiece",
                    "vocab": {},
                    "unk_token": "<s>",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                },
            )
        ),
        ('{"model": {', "are not a tokenizer .*EOF while parsing"),
    ],
)
def test_b23_a_tokenizer_json_that_is_none(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path)
    assert "download them again" in str(error.value)


@pytest.mark.parametrize(
    ("lost", "named"),
    [("a", "0x61"), ("Ã", "0xC3"), ("Ċ", "0x0A"), ("xyz!", "0x21, 0x78, 0x79, and 1 more")],
)
def test_a_byte_level_vocabulary_without_a_byte_of_text_is_warned_of(
    written, byte_level, lost, named
):
    folder = written(byte_level)
    values = json.loads((folder / "tokenizer.json").read_text())
    for letter in lost:
        values["model"]["vocab"][f"gone {letter}"] = values["model"]["vocab"].pop(letter)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.warns(
        UserWarning, match=rf"{folder}/tokenizer\.json: .* no token for the byte {named}"
    ):
        load_tokenizer(folder)


def test_a_byte_level_vocabulary_may_lack_bytes_that_no_plain_text_holds(written, byte_level):
    """As SmolLM2's, whose tokenizer was trained on text without 21 of them."""
    folder = written(byte_level)
    values = json.loads((folder / "tokenizer.json").read_text())
    for letter in "ÀÁñòõöÿĄĆēĔĖĝ":
        values["model"]["vocab"][f"gone {letter}"] = values["model"]["vocab"].pop(letter)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert_is_its_json(folder)


JINJA = "{{ messages[0].content }}"


@pytest.mark.parametrize("place", ["tokenizer_config", "chat_template"])
def test_a_chat_template_in_json(written, byte_level, place):
    backend = load_tokenizer(
        written(byte_level, **{place: {"chat_template": JINJA}, "config": {"model_type": "llama"}})
    )
    assert backend.chat_template == JINJA


def test_f9_a_tokenizer_config_may_begin_with_a_byte_order_mark(written, byte_level):
    labels = {"chat_template": JINJA}
    folder = written(byte_level, labels, config={"model_type": "llama"})
    (folder / "tokenizer_config.json").write_text(json.dumps(labels), encoding="utf-8-sig")
    assert load_tokenizer(folder).chat_template == JINJA


def test_named_chat_templates(written, byte_level):
    listed = [{"name": "default", "template": JINJA}, {"name": "tool_use", "template": "tools"}]
    backend = load_tokenizer(written(byte_level, {"chat_template": listed}))
    assert backend.chat_template == {"default": JINJA, "tool_use": "tools"}


def test_template_files_win_over_the_config(written, byte_level, tmp_path):
    folder = written(byte_level, {"chat_template": "old"}, chat_template={"chat_template": "older"})
    (tmp_path / "chat_template.jinja").write_text(JINJA)
    assert load_tokenizer(folder).chat_template == JINJA
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    assert load_tokenizer(folder).chat_template == {"default": JINJA, "tool_use": "tools"}


@pytest.mark.parametrize("given", [5, [5], [{"name": "default"}], {"default": 5}])
def test_a_chat_template_that_is_no_text(written, byte_level, given):
    with pytest.raises(ValueError, match=r"tokenizer_config.json: chat_template is .* must be a"):
        load_tokenizer(written(byte_level, {"chat_template": given}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }", r"template of .*line 1: .*\): correct it there"),
        ("\n{{ messages | martian }}", r"line 2: No filter named 'martian'"),
        ([{"name": "rag", "template": "{% endif %}"}], r"the chat template 'rag' of "),
    ],
)
def test_a_chat_template_that_is_not_jinja_is_refused_at_load(
    written, byte_level, template, message
):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(written(byte_level, {"chat_template": template}))


def test_a_template_may_mark_what_it_generates(written, byte_level):
    body = "{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
    text = f"{{% for m in messages %}}{body}{{% endfor %}}"
    assert load_tokenizer(written(byte_level, {"chat_template": text})).chat_template == text


@pytest.fixture
def older(byte_level, tmp_path):
    """A folder with vocab.json and merges.txt, and no tokenizer.json."""
    model = json.loads(byte_level.backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return tmp_path


@pytest.mark.parametrize("label", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_b23_vocab_json_under_a_byte_level_class(older, label):
    (older / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": label}))
    backend = load_tokenizer(older)
    assert backend.decode(backend("hello world 日本").input_ids) == "hello world 日本"


@pytest.mark.parametrize("label", ["LlamaTokenizer", "LlamaTokenizerFast", "Unknown", None])
def test_b23_vocab_json_under_another_class_is_refused(older, label):
    """LlamaTokenizer makes an empty prompt of "hello world"."""
    (older / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (older / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": label}))
    with pytest.raises(ValueError, match=r"put the model's tokenizer\.json beside"):
        load_tokenizer(older)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_beside_older_files(older, content):
    (older / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"are not a tokenizer .*: download them again"):
        load_tokenizer(older)


def test_b23_tokenizer_model_needs_sentencepiece(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    monkeypatch.setattr("nv_api.tokenizer._is_installed", lambda module: False)
    with pytest.raises(ValueError, match="is a SentencePiece model") as error:
        load_tokenizer(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/tokenizer.model is a SentencePiece model, which takes sentencepiece and "
        "protobuf to read: pip install sentencepiece protobuf, or put a tokenizer.json beside it"
    )


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_b23_a_file_of_tiktoken_leaves_open_how_a_text_is_cut(tmp_path, name):
    (tmp_path / name).write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match=f"{name} is a file of tiktoken, .*put the model's token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": None}, "must both be byte-level"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "byte-level"),
        ({"pre_tokenizer": None}, "must both be byte-level"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "must both be byte-level"),
    ],
)
def test_a_byte_level_vocabulary_without_its_steps_is_refused(written, byte_level, change, message):
    folder = written(byte_level)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


def test_two_tokens_with_one_id_are_refused(written, byte_level):
    folder = written(byte_level)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["a"] = values["model"]["vocab"]["b"]
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="two tokens one id"):
        load_tokenizer(folder)


def test_a_dropout_of_training_is_off(written, byte_level):
    folder = written(byte_level)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["dropout"] = 0.5
    file.write_text(json.dumps(values))
    tokenizer = Tokenizer(load_tokenizer(folder))
    assert tokenizer.encode(["hello hello"] * 50) == tokenizer.encode(["hello hello"]) * 50


@pytest.fixture
def merged(tmp_path):
    """Write a byte-level tokenizer of 8 groups of letters, abcd: words ab, cd, abcd and bc.

    Its 32 merges come in this order: with (b, c) before the others, abcd is cut into a, bc and d.
    """

    def write(merges, **model):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        groups = [letters[start : start + 4] for start in range(0, 32, 4)]
        made = [pair for a, b, c, d in groups for pair in ((a, b), (c, d))]
        made += [(a + b, c + d) for a, b, c, d in groups]
        made += [(b, c) for _, b, c, _ in groups]
        words = [*letters, *map("".join, made), "<unused0>"]
        vocabulary = {word: index for index, word in enumerate(words)}
        tokenizer = Words(models.BPE(vocabulary, merges(made), **model))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write


@pytest.mark.parametrize("kept", [28, 16, 1])
def test_16_merges_that_are_lost_are_warned_of(merged, kept):
    folder = merged(lambda merges: merges[:kept])
    with pytest.warns(
        UserWarning, match=rf"make {kept} of 32 words of its .* download the file ag"
    ):
        load_tokenizer(folder)


def test_16_merges_in_another_order_are_warned_of(merged):
    folder = merged(lambda merges: merges[::-1])
    with pytest.warns(UserWarning, match=r"make 24 of 32 words .*in another order"):
        load_tokenizer(folder)


def test_16_a_bpe_without_merges_is_refused(merged):
    with pytest.raises(ValueError, match=r"tokenizer\.json: its merges make 0 of 32 words"):
        load_tokenizer(merged(lambda _: []))


@pytest.mark.parametrize(
    ("merges", "model"),
    [
        (lambda merges: merges, {}),
        (lambda merges: merges, {"dropout": 0.9}),
        (lambda merges: merges[:32], {}),
        (lambda _: [], {"ignore_merges": True}),
    ],
)
def test_16_merges_that_make_the_words_give_no_warning(merged, merges, model, recwarn):
    load_tokenizer(merged(merges, **model))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (
            "tokenizer_config",
            {"added_tokens_decoder": [{"content": "<a>"}]},
            r"tokenizer_config\.json: added_tokens_decoder is \[.*: it must be an object, from ids",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"300": {"content": "<a>", "lstrip": "yes"}}},
            r"tokenizer_config\.json: .*lstrip of added token 300 is 'yes': it must be true or f",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"x": {"content": "<a>"}}},
            r"tokenizer_config\.json: .*an added token has the id 'x': it must be an integer",
        ),
        ("added_tokens", {"<a>": None}, r"added_tokens\.json: an added token has the id None"),
        ("added_tokens", ["<a>"], r"added_tokens\.json is a JSON list: it must be an object"),
    ],
)
def test_16_added_tokens_that_are_none_are_named_with_their_file(
    written, byte_level, file, values, message
):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(written(byte_level, **{file: values}))


def edit(folder, change):
    """Change the values of a folder's tokenizer.json."""
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_16_an_added_token_at_another_id_than_its_file_gives_is_warned_of(written, byte_level):
    folder = written(byte_level)
    (first, *_) = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]

    def leave_out(values):
        del values["model"]["vocab"][first["content"]]  # the next free id is that of another token

    edit(folder, leave_out)
    with pytest.warns(UserWarning, match="gives added tokens other ids than the file") as warned:
        backend = load_tokenizer(folder)
    assert f"are used: {first['content']!r} ({first['id']}, " in str(warned[0].message)
    assert backend.convert_tokens_to_ids(first["content"]) != first["id"]


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    ],
)
def test_16_a_model_without_its_unknown_token_is_refused(written, byte_level, model):
    folder = written(byte_level)
    edit(folder, lambda values: values.update(model=model, decoder=None, added_tokens=[]))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json has the unk_token '<unk>', which is not"
    ):
        load_tokenizer(folder)


def test_16_a_text_that_the_tokenizer_cannot_cut_is_named(written, byte_level):
    folder = written(byte_level)
    model = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}
    edit(
        folder,
        lambda values: values.update(
            model=model, decoder=None, pre_tokenizer=None, added_tokens=[]
        ),
    )
    tokenizer = Tokenizer(load_tokenizer(folder))
    assert tokenizer.encode(["aa"]) == [[0, 0]]
    with pytest.raises(ValueError, match="the tokenizer cannot cut the text 'ab' into tokens"):
        tokenizer.encode(["ab"])
    with pytest.raises(ValueError, match=r"cannot cut one of the texts into tokens .*unk_id"):
        tokenizer.encode(["a", "ab"])


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"], "x": "##"}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["ab"]}},
    ],
)
def test_16_a_panic_of_the_library_is_an_error_with_the_file_s_name(written, byte_level, change):
    folder = written(byte_level)
    if change.get("model", {}).get("x"):
        change["model"]["continuing_subword_prefix"] = change["model"].pop("x")
    edit(folder, lambda values: values.update(change))
    with pytest.raises(ValueError, match=r"are not a tokenizer .*tokenizer\.json is damaged: "):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_object", "decode", "padding_side", "self", "im_end"])
def test_16_names_of_special_tokens_are_no_arguments_of_transformers(written, byte_level, name):
    named = {name: "<|im_end|>", "image_token": "<|im_end|>"}
    folder = written(byte_level, {"extra_special_tokens": named})
    message = f"extra_special_tokens has the name '{name}', which a chat template does not get"
    with pytest.warns(UserWarning, match=message):
        backend = assert_is_its_json(folder)
    assert backend.image_token == "<|im_end|>"
    assert backend.convert_tokens_to_ids("<|im_end|>") in backend.all_special_ids


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_16_a_dead_link_beside_tokenizer_json_is_named(written, byte_level, name):
    folder = written(byte_level)
    (folder / name).symlink_to(folder / "gone")
    with pytest.raises(FileNotFoundError, match=rf"{name} links to .*gone, which is gone"):
        load_tokenizer(folder)
