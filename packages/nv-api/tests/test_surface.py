"""The public surface, frozen: a change here is a change of the contract."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import nv_api
import pytest

NAMES = [
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLM",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]
METHODS = {
    "abort_request": "request_id",
    "add_lora": "lora_request",
    "add_request": "prompt, sampling_params=None, lora_request=None",
    "chat": (
        "messages, sampling_params=None, use_tqdm=True, lora_request=None, chat_template=None, "
        "add_generation_prompt=True, continue_final_message=False, tools=None, "
        "chat_template_kwargs=None, chat_template_content_format='auto'"
    ),
    "classify": "prompts, pooling_params=None, use_tqdm=True, lora_request=None",
    "close": "",
    "embed": "prompts, pooling_params=None, use_tqdm=True, lora_request=None, prompt_name=None",
    "encode": (
        "prompts, pooling_params=None, use_tqdm=True, lora_request=None, pooling_task=None, "
        "prompt_name=None"
    ),
    "generate": "prompts, sampling_params=None, use_tqdm=True, lora_request=None",
    "get_default_sampling_params": "",
    "get_metrics": "",
    "get_tokenizer": "",
    "is_finished": "",
    "list_loras": "",
    "remove_lora": "lora_id",
    "reset_prefix_cache": "",
    "reward": "prompts, pooling_params=None, use_tqdm=True, lora_request=None",
    "score": (
        "data_1, data_2, use_tqdm=True, pooling_params=None, lora_request=None, chat_template=None"
    ),
    "step": "",
    "stream": "prompt, sampling_params=None, lora_request=None",
    "stream_chat": (
        "messages, sampling_params=None, chat_template=None, add_generation_prompt=True, "
        "continue_final_message=False, tools=None, chat_template_kwargs=None, "
        "chat_template_content_format='auto', lora_request=None"
    ),
}
RESULTS = {
    "CompletionOutput": (
        "index, text, token_ids, cumulative_logprob=None, logprobs=None, finish_reason=None, "
        "stop_reason=None"
    ),
    "Logprob": "logprob, rank=None, decoded_token=None",
    "PoolingRequestOutput": (
        "request_id, outputs, prompt_token_ids, num_cached_tokens, finished, error=None"
    ),
}


def parameters(function):
    """A signature without its annotations."""
    given = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return ", ".join(str(p.replace(annotation=p.empty)) for p in given)


def test_names():
    assert sorted(nv_api.__all__) == sorted(NAMES) == dir(nv_api)
    for name in NAMES:
        assert getattr(nv_api, name).__name__ == name
    with pytest.raises(AttributeError, match="Engine"):
        _ = nv_api.Engine


def test_methods():
    functions = dict(inspect.getmembers(nv_api.LLM, inspect.isfunction))
    public = {name: parameters(f) for name, f in functions.items() if name[0] != "_"}
    assert public == METHODS
    assert parameters(nv_api.LLM.__init__) == "model, **options"


@pytest.mark.parametrize("module", ["cli", "ray"])
def test_front_ends_use_public_names_only(module):
    """An attribute that begins with an underscore is read of `self` alone."""
    path = Path(next(iter(nv_api.__path__))) / f"{module}.py"
    attributes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
    private = {
        ast.unparse(each)
        for each in attributes
        if re.match("_[^_]", each.attr) and ast.unparse(each.value) != "self"
    }
    assert private == set()
    assert len(attributes) > 20


def test_only_the_session_holds_the_engine(scripted, engine):
    llm = scripted()
    assert [name for name, value in vars(llm).items() if value is engine] == []
    llm.close()
    assert engine.closed


def test_results():
    assert {name: parameters(getattr(nv_api, name)) for name in RESULTS} == RESULTS


def test_importing_nv_api_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'nv_engine', 'tqdm', 'typer'}"
    code = f"import sys, nv_api, nv_api.cli; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "{'typer'}"
