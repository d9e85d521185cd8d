"""The OpenAI-compatible server and its page. What it serves it knows only as `llm_protocol.ServedLLM`."""
