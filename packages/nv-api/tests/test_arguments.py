"""vLLM's names for arguments of the methods that ours do not have."""

import inspect

import numpy as np
import pytest
from nv_api import LLM, AsyncLLM, PoolingParams, SamplingParams, StructuredOutputsParams
from nv_api.arguments import VLLM_NAMES
from nv_api.members import OF_LLM

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"prompt_token_ids": [[1, 2]]}, "pass the ids as prompts"),
        ({"priority": [1]}, "requests start in their order"),
        ({"tokenization_kwargs": {"truncation": True}}, "call llm.tokenizer yourself"),
        ({"mm_processor_kwargs": {"a": 1}}, "prompts are text or token ids"),
        ({"prompt_adapter_request": object()}, "put the adapter's text in front"),
        ({"guided_options_request": {"json": {}}}, "pass SamplingParams.structured_outputs="),
    ],
)
@pytest.mark.parametrize("method", ["generate", "chat", "encode", "embed", "classify", "score"])
def test_what_is_not_built_names_what_there_is_instead(scripted, engine, method, given, instead):
    (name,) = given
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not built yet: {instead}"):
        getattr(scripted(), method)(**given)
    assert engine.num_added == 0


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_token_ids": None, "priority": [0, 0], "mm_processor_kwargs": {}},
        {"tokenization_kwargs": None, "prompt_adapter_request": None},
    ],
)
def test_what_asks_for_nothing_is_accepted_with_one_warning(scripted, given):
    llm, params = scripted(), SamplingParams(max_tokens=1)
    for method, prompts in (llm.generate, "hi"), (llm.chat, USER):
        plain = method(prompts, params, use_tqdm=False)
        with pytest.warns(UserWarning, match="without effect") as seen:
            assert method(prompts, params, use_tqdm=False, **given) == plain
        (warning,) = seen
        assert str(warning.message) == f"accepted without effect: {', '.join(sorted(given))}"
        assert warning.filename == __file__


@pytest.mark.parametrize(
    ("method", "given", "match"),
    [
        ("generate", {"prompt": "hi"}, "generate has no option 'prompt': did you mean 'prompts'"),
        ("generate", {"sampling_param": None}, "no option .*: did you mean 'sampling_params'"),
        ("chat", {"message": USER}, "chat has no option 'message': did you mean 'messages'"),
        ("encode", {"zzzz": 1}, "encode has no option 'zzzz': there are lora_request, pooling_"),
    ],
)
def test_unknown_names_are_type_errors(scripted, method, given, match):
    with pytest.raises(TypeError, match=match):
        getattr(scripted(), method)(**given)


@pytest.mark.parametrize(
    ("method", "args", "error", "match"),
    [
        ("generate", ("hi", None, [[1, 2]]), TypeError, "use_tqdm is .*: it must be True, False"),
        ("chat", (USER, None, "{{ a }}"), TypeError, "use_tqdm is '{{ a }}': it must be True"),
        ("chat", (USER, None, False, None, None, "auto"), ValueError, "add_generation_prompt is"),
        ("chat", (USER, None, False, None, None, False, "x"), ValueError, "continue_final_message"),
        ("generate", (SamplingParams(), "hi"), TypeError, "prompts is a SamplingParams"),
        ("generate", ("hi", 0.5), TypeError, "sampling_params must be a SamplingParams"),
    ],
)
def test_an_argument_in_the_wrong_place_is_refused(scripted, engine, method, args, error, match):
    with pytest.raises(error, match=match):
        getattr(scripted(), method)(*args)
    assert engine.num_added == 0


@pytest.mark.parametrize("given", [{"max_tokens": 3}, {"temperature": 0}, {"stop": "a"}])
def test_values_of_sampling_params_are_hinted_at(scripted, given):
    ((name, value),) = given.items()
    hint = f"no option '{name}': pass SamplingParams\\({name}={value!r}\\)"
    for call in scripted().generate, scripted().chat, scripted().stream, scripted().add_request:
        with pytest.raises(TypeError, match=hint):
            call("hi", SamplingParams(), **given)
    with pytest.raises(TypeError, match=hint):
        scripted(**given)


def test_add_request_knows_vllm_s_arguments(scripted, engine):
    llm = scripted()
    with pytest.raises(NotImplementedError, match="priority=1 is not built yet: requests start"):
        llm.add_request([5], SamplingParams(), priority=1)
    assert engine.num_added == 0


@pytest.mark.parametrize("name", OF_LLM)
def test_a_member_of_vllm_s_llm_names_what_there_is_instead(scripted, name):
    llm = scripted()
    with pytest.raises(AttributeError, match=rf"^LLM.{name} is not built yet: [\w(]"):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_an_unknown_member_is_a_plain_attribute_error(scripted):
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        _ = scripted().generat


GUIDED = "in SamplingParams, pass structured_outputs=StructuredOutputsParams(json=…)"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "pass SamplingParams(max_tokens=…)"),
        ("max_completion_tokens", "pass SamplingParams(max_tokens=…)"),
        ("stop_sequences", "pass SamplingParams(stop=…)"),
        ("guided_json", GUIDED),
        ("response_format", f"{GUIDED}, or its json_object=True for any object"),
        (
            "do_sample",
            "in SamplingParams, temperature=0 is greedy, and any other temperature draws",
        ),
        (
            "best_of",
            "in SamplingParams, set n and logprobs, and keep the outputs with the largest "
            "cumulative_logprob",
        ),
        ("stream", "call stream of LLM, or generate of AsyncLLM"),
        ("max_model_len", "pass LLM(max_model_len=3)"),
        ("seed", "pass SamplingParams(seed=3)"),
        ("tool_choice", "pass tools=… to chat"),
    ],
)
def test_16_a_name_of_another_library_gets_the_right_hint(scripted, name, hint):
    llm = scripted()
    for method in "generate", "chat", "stream", "add_request":
        with pytest.raises(TypeError) as error:
            getattr(llm, method)("hi", **{name: 3})
        assert str(error.value) == f"{method} has no option {name!r}: {hint}"


@pytest.mark.parametrize(
    ("method", "name", "hint"),
    [
        ("generate", "messages", "call chat(messages)"),
        ("generate", "tools", "pass it to chat"),
        ("generate", "texts", "did you mean 'prompts'?"),
        ("chat", "prompts", "did you mean 'messages'?"),
        ("chat", "conversation", "did you mean 'messages'?"),
        ("get_metrics", "zzz", "it takes no arguments"),
    ],
)
def test_16_an_argument_of_another_method_is_hinted_at(scripted, method, name, hint):
    with pytest.raises(TypeError) as error:
        getattr(scripted(), method)(**{name: "hi"})
    assert str(error.value) == f"{method} has no option {name!r}: {hint}"


def public_methods(kind):
    """The methods of a class, its constructor among them."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return [function for name, function in found if name == "__init__" or name[0] != "_"]


def begun(call):
    """Run what a method returned as far as its first wait, if it is asynchronous."""
    if inspect.iscoroutine(call):
        call.send(None)
    elif inspect.isasyncgen(call):
        call.asend(None).send(None)


@pytest.mark.parametrize(
    "method", [*public_methods(LLM), *public_methods(AsyncLLM)], ids=lambda each: each.__qualname__
)
def test_16_a_call_that_does_not_fit_is_one_sentence(method):
    """An object that is not made yet will do: nothing runs before the check."""
    owner = method.__qualname__.removesuffix(".__init__").split(".")[-1]
    with pytest.raises(TypeError, match=rf"^{owner} takes (no arguments|at most \d+) by position"):
        begun(method(object(), *range(20)))
    parameters = [*inspect.signature(method).parameters.values()][1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needed:
        call = rf"call {owner}\({', '.join(needed)}\)$"
        with pytest.raises(TypeError, match=rf"^{owner} lacks {' and '.join(needed)}: {call}"):
            begun(method(object()))


def test_16_score_needs_two_texts(scripted):
    with pytest.raises(TypeError, match=r"^score lacks data_2: call score\(data_1, data_2\)$"):
        scripted().score("x")


def test_every_name_has_its_advice():
    assert VLLM_NAMES.unbuilt.keys() == VLLM_NAMES.instead.keys()


PARTS = [{"role": "user", "content": [{"type": ["text"], "text": "hi"}]}]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate([None]), TypeError, "the prompt is a NoneType"),
        (lambda llm: llm.generate([1, None]), TypeError, "holds None among its token ids"),
        (
            lambda llm: llm.generate({"prompt_token_ids": [None]}),
            TypeError,
            "the prompt holds None among its token ids",
        ),
        (
            lambda llm: llm.generate({"prompt": "a", "multi_modal_data": np.ones(2)}),
            NotImplementedError,
            "'multi_modal_data', which is not built yet",
        ),
        (lambda llm: llm.chat(USER, tools=np.ones(2)), TypeError, "tools is array.*must be a list"),
        (
            lambda llm: llm.chat(USER, chat_template_content_format=np.ones(2)),
            ValueError,
            "chat_template_content_format is array.*: it must be one of 'auto', 'string', 'openai'",
        ),
        (lambda llm: llm.chat(PARTS), NotImplementedError, r"type \['text'\] is not built"),
        (lambda llm: llm.abort_request([1, 2]), TypeError, r"request_id is \[1, 2\]: .* one id"),
        (lambda llm: LLM(None), ValueError, "model is None: it must be a name that is not empty"),
        (lambda llm: LLM(["a"]), ValueError, r"model is \['a'\]: it must be a name"),
        (
            lambda llm: SamplingParams(bad_words=["\ud800"]),
            ValueError,
            "bad_words has a character that is not valid Unicode at position 0",
        ),
        (
            lambda llm: SamplingParams(stop="a\ud800"),
            ValueError,
            "stop has .* at position 1",
        ),
        (
            lambda llm: StructuredOutputsParams(json=np.ones(2)),
            ValueError,
            "structured_outputs.json is array.*, which is not JSON",
        ),
        (lambda llm: PoolingParams(task=np.ones(2)), ValueError, "task is array.*must be one of"),
    ],
)
def test_16_a_value_of_a_wrong_type_is_one_sentence(scripted, call, error, message):
    with pytest.raises(error, match=message):
        call(scripted())
