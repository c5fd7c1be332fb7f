"""Engines that generate text with a job's newest weights while it trains. Each file needs its engine alone.

vllm.py         vLLM: an engine for its weight transfer
sglang.py       SGLang: a process beside it, which has it load each version from disk
folders.py      Directories by which an engine is given versions
huggingface.py  Hugging Face transformers in a small HTTP server
answers.py      ASGI middleware: every answer says its version, and there is none before the first
"""
