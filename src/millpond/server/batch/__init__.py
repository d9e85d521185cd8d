"""Files of many requests in OpenAI's batch format, answered by one engine with what they have in common read once."""
