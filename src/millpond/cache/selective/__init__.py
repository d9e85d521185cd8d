"""Selective attention: everything is stored, and each query reads part of it (InfLLM, MInference)."""
