"""`millpond bench engines`: our engine beside OpenVINO GenAI and llama.cpp, every engine in a process of its own."""
