"""The OpenAI-compatible server and its page. What it serves it knows only as `llm_protocol.ServedLLM`.

Imports: budget, cache, engine, errors, hf, methods, models, option_files, presets.
"""
