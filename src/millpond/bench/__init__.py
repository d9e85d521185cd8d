"""Speed and memory, measured beside what they are compared with."""
