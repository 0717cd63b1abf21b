"""Protocol: OpenAI's shapes, and vLLM's where OpenAI has none.

Owns names and kinds of fields. Never checks a value's range: `SamplingParams` does.
"""
