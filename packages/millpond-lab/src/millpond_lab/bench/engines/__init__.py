"""`millpond bench engines`: our engine, OpenVINO GenAI and llama.cpp, every engine in a process of its own."""
