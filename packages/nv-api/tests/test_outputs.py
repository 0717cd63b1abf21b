import copy
import dataclasses
import json
import pickle

from nv_api import CompletionOutput, Logprob, RequestOutput


def output():
    completions = [
        CompletionOutput(0, "a", [1], finish_reason="stop"),
        CompletionOutput(1, "b", [2]),
    ]
    return RequestOutput(
        request_id=3, prompt="p", prompt_token_ids=[9], outputs=completions, finished=False
    )


def test_it_is_a_dict_of_the_first_completion():
    assert output() == {"text": "a", "token_ids": [1]}
    assert json.loads(json.dumps(output())) == {"text": "a", "token_ids": [1]}


def test_copies_keep_the_attributes():
    for twin in (pickle.loads(pickle.dumps(output())), copy.deepcopy(output())):
        assert twin == output()
        assert (twin.request_id, twin.prompt, twin.outputs) == (3, "p", output().outputs)


def test_a_completion_knows_whether_it_has_ended():
    assert [completion.finished() for completion in output().outputs] == [True, False]


def test_its_repr_shows_the_request():
    assert repr(output()).startswith("RequestOutput(request_id=3, prompt='p', outputs=[Comp")


def test_log_probabilities_are_made_when_they_are_read_once():
    made = []

    def make():
        made.append(1)
        return [{7: Logprob(-0.5, 1, "a")}]

    output = CompletionOutput(0, "a", [7], -0.5, make)
    assert not made
    assert output.logprobs == [{7: Logprob(-0.5, 1, "a")}]
    assert output.logprobs is output.logprobs
    assert made == [1]
    assert CompletionOutput(0, "a", [7]).logprobs is None
    assert CompletionOutput(0, "a", [7], -0.5, make) == output


def test_a_result_with_unread_log_probabilities_travels():
    output = CompletionOutput(0, "a", [7], -0.5, lambda: [{7: Logprob(-0.5, 1, "a")}])
    other = pickle.loads(pickle.dumps(output))
    assert other == output
    assert copy.deepcopy(output).logprobs == [{7: Logprob(-0.5, 1, "a")}]
    assert "Logprob(logprob=-0.5, rank=1, decoded_token='a')" in repr(output)
    assert dataclasses.replace(output, text="b").logprobs == output.logprobs


def test_what_vllm_reports_and_we_have_not_is_none():
    request = output()
    names = ["lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"]
    assert [getattr(request, name) for name in names] == [None] * 4
    assert request.multi_modal_placeholders == {}
    names = ["lora_request", "routed_experts", "kv_transfer_params"]
    assert [getattr(request.outputs[0], name) for name in names] == [None] * 3
    assert sorted(request) == ["text", "token_ids"]
