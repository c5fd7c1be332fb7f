"""Engines that generate text with a job's newest weights while it trains. Each file needs its engine alone.

vllm.py         vLLM: an engine for its weight transfer
sglang.py       SGLang: a separate process that makes it load each version from disk
folders.py      Directories from which an engine loads versions
huggingface.py  Hugging Face transformers in a small HTTP server
answers.py      ASGI middleware: every answer names its version, and there is no answer before the first one
loaded_versions.py Which version a vLLM has loaded; updates of a vLLM in the same process
"""
