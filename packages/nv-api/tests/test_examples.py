"""The examples that nano-vLLM and vLLM publish, on a tiny Qwen3, with only the import changed."""

from random import randint, seed

import pytest
from nv_api import LLM, SamplingParams
from transformers import AutoTokenizer


def test_nano_vllm_example(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    llm = LLM(checkpoint, enforce_eager=True, tensor_parallel_size=1)

    sampling_params = SamplingParams(temperature=0.6, max_tokens=12)
    prompts = [
        "introduce yourself",
        "list all prime numbers within 100",
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    outputs = llm.generate(prompts, sampling_params)

    for prompt, output in zip(prompts, outputs, strict=True):
        assert f"Prompt: {prompt!r}" == f"Prompt: {output.prompt!r}"
        assert output["text"] == tokenizer.decode(output["token_ids"], skip_special_tokens=True)
        assert 1 <= len(output["token_ids"]) <= 12


def test_nano_vllm_bench(checkpoint):
    seed(0)
    num_seqs = 16
    max_input_len = 64
    max_output_len = 24

    with pytest.warns(UserWarning, match="the model's own length is 512"):
        llm = LLM(checkpoint, enforce_eager=False, max_model_len=4096)

    prompt_token_ids = [
        [randint(0, 300) for _ in range(randint(10, max_input_len))] for _ in range(num_seqs)
    ]
    sampling_params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(10, max_output_len))
        for _ in range(num_seqs)
    ]

    llm.generate(["Benchmark: "], SamplingParams())
    outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
    total_tokens = sum(sp.max_tokens for sp in sampling_params)
    assert sum(len(output["token_ids"]) for output in outputs) == total_tokens


def test_nano_vllm_manual_loop(checkpoint):
    llm = LLM(checkpoint)
    prompts = ["one", [5, 6, 7], "three"]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for prompt in prompts:
        llm.add_request(prompt, params)
    outputs, signs = {}, []
    while not llm.is_finished():
        output, num_tokens = llm.step()
        signs.append(num_tokens)
        outputs.update(output)
    outputs = [outputs[seq_id] for seq_id in sorted(outputs)]
    texts = [llm.tokenizer.decode(token_ids) for token_ids in outputs]
    whole = llm.generate(prompts, params, use_tqdm=False)
    assert outputs == [output["token_ids"] for output in whole]
    assert len(texts) == 3
    assert max(signs) > 0 > min(signs)


def test_vllm_basic_example(checkpoint):
    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(model=checkpoint)
    outputs = llm.generate(prompts, sampling_params)
    for given, output in zip(prompts, outputs, strict=True):
        prompt = output.prompt
        generated_text = output.outputs[0].text
        assert prompt == given
        assert isinstance(generated_text, str)
        assert len(output.outputs[0].token_ids) <= 16


def test_vllm_chat_example(checkpoint):
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    llm = LLM(model=checkpoint, seed=1)
    sampling_params = llm.get_default_sampling_params()
    assert (sampling_params.temperature, sampling_params.top_k) == (0.6, 20)
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert outputs[0].prompt.endswith("<|im_start|>assistant\n")
    assert outputs[0].outputs[0].finish_reason in {"stop", "length"}
