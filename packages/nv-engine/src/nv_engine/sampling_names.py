"""Sampling names: what parameters of vLLM, OpenAI and other libraries are here.

Owns the table for `SamplingParams`; `names` has the rule. Never knows a field's bounds.
"""

from nv_engine.names import ForeignNames

BEAM_SEARCH = "beam search is not there; draw n completions and keep the likeliest"
STRUCTURED = "pass structured_outputs=StructuredOutputsParams(%s)"
ANY_STRUCTURE = STRUCTURED % "json=…" + ", or its regex, choice or grammar"
STEPS = "nv does not have this step: use temperature, top_p, top_k, min_p or the penalties"
PROCESSORS = "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
TO_CHAT = "pass it to chat"
NOT_NEEDED = "it would change nothing here: leave it out"
THINKING = "pass chat_template_kwargs={'enable_thinking': …} to chat"

INSTEAD = {
    "best_of": "set n and logprobs, and keep the outputs with the largest cumulative_logprob",
    "early_stopping": BEAM_SEARCH,
    "extra_args": "no plugin reads them: leave them out",
    "flat_logprobs": "logprobs are a list of dicts, made when they are read",
    "guided_decoding": ANY_STRUCTURE,
    "length_penalty": BEAM_SEARCH,
    "logits_processors": PROCESSORS,
    "logprob_token_ids": "logprobs=-1 gives the log-probability of every token",
    "prompt_logprob_start": "prompt_logprobs gives those of the whole prompt",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 gives that of every token",
    "repetition_detection": "use repetition_penalty or frequency_penalty, and max_tokens",
    "skip_reading_prefix_cache": "pass enable_prefix_caching=False to LLM",
    "thinking_token_budget": "max_tokens bounds thoughts and answer together",
    "trace_decode_token_ids": "put these tokens in the prompt and ask for prompt_logprobs",
    "truncate_prompt_tokens": "cut the prompt's token ids yourself, as ids[-k:]",
    "use_beam_search": BEAM_SEARCH,
}
"""Advice on fields of vLLM that are not built."""
RENAMED = {
    "bad_words_ids": "bad_words_token_ids",
    "max_completion_tokens": "max_tokens",
    "max_gen_len": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "stop_sequence": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "temp": "temperature",
    "top_logprobs": "logprobs",
}
"""Names of OpenAI, transformers, llama.cpp and others, and ours."""
ADVICE = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "use_cache"), NOT_NEEDED),
    **dict.fromkeys(("metadata", "service_tier", "store", "user"), NOT_NEEDED),
    **dict.fromkeys(("dry_multiplier", "epsilon_cutoff", "eta_cutoff", "mirostat"), STEPS),
    **dict.fromkeys(("penalty_alpha", "tfs_z", "top_a", "typical_p", "xtc_probability"), STEPS),
    **dict.fromkeys(("ebnf", "grammar", "guided_grammar"), STRUCTURED % "grammar=…"),
    **dict.fromkeys(("guided_choice", "choice"), STRUCTURED % "choice=…"),
    **dict.fromkeys(("guided_json", "json", "json_schema"), STRUCTURED % "json=…"),
    **dict.fromkeys(("guided_regex", "regex"), STRUCTURED % "regex=…"),
    **dict.fromkeys(("json_mode", "json_object"), STRUCTURED % "json_object=True"),
    **dict.fromkeys(("guided_decoding_backend", "structural_tag"), ANY_STRUCTURE),
    **dict.fromkeys(("logit_processors", "logits_processor"), PROCESSORS),
    **dict.fromkeys(("num_beams", "num_beam_groups", "beam_width"), BEAM_SEARCH),
    "do_sample": "temperature=0 is greedy, and any other temperature draws",
    "eos_token_id": "the checkpoint's EOS ends a text already; pass more ids as stop_token_ids",
    "guided_whitespace_pattern": STRUCTURED % "json=…, disable_any_whitespace=True",
    "max_length": "pass max_tokens, which counts the completion alone",
    "max_time": "there is no limit of time: pass max_tokens, or abort the request",
    "min_length": "pass min_tokens, which counts the completion alone",
    "no_repeat_ngram_size": "use repetition_penalty, frequency_penalty or bad_words",
    "prefix_allowed_tokens_fn": PROCESSORS,
    "response_format": STRUCTURED % "json=…" + ", or its json_object=True for any object",
    "stop_regex": "pass stop, a list of texts, or search the text of LLM.stream",
    "stop_token": "pass stop for a text, or stop_token_ids for ids",
    "suppress_tokens": "pass logit_bias={id: -100, …}",
}
"""Advice on names that mean something else than a field."""
OF_CALLS = {
    **dict.fromkeys(("add_generation_prompt", "chat_template", "tools"), TO_CHAT),
    **dict.fromkeys(("chat_template_kwargs", "continue_final_message"), TO_CHAT),
    **dict.fromkeys(("parallel_tool_calls", "tool_choice"), "pass tools=… to chat"),
    **dict.fromkeys(("enable_thinking", "reasoning_effort"), THINKING),
    **dict.fromkeys(("stream", "streaming"), "call stream of LLM, or generate of AsyncLLM"),
    "cache_salt": "put it into the prompt: {'prompt': …, 'cache_salt': …}",
    "echo": "the prompt's text is in RequestOutput.prompt",
    "suffix": "put it into the prompt, in the form that the model was trained with",
}
"""The same for names that are about the prompt, or about the whole call."""
TO_PROMPT = ("lora_request", "messages", "prompt", "prompts")
"""Arguments of `generate` and `chat`."""

SAMPLING_NAMES = ForeignNames(
    no_difference=frozenset(
        {
            "output_kind",
            "output_text_buffer_length",
            "routed_experts_prompt_start",
            "skip_clone",
            "stream_interval",
        }
    ),
    unbuilt={
        "best_of": (1,),
        "early_stopping": (False,),
        "extra_args": ({},),
        "flat_logprobs": (False,),
        "guided_decoding": (),
        "length_penalty": (1.0,),
        "logits_processors": (),
        "logprob_token_ids": (),
        "prompt_logprob_start": (0,),
        "prompt_logprob_token_ids": (),
        "repetition_detection": (),
        "skip_reading_prefix_cache": (False,),
        "thinking_token_budget": (-1,),
        "trace_decode_token_ids": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    },
    renamed=RENAMED,
    instead=INSTEAD,
    advice=ADVICE | OF_CALLS | dict.fromkeys(TO_PROMPT, "pass it to generate or chat"),
)
"""Names that `SamplingParams` does not have."""
