"""Checkpoints in and out: Hugging Face folders, GGUF files, packaged models, hub ids.

`checkpoint` holds `load_target` and `save_hf`. Nothing is re-exported here: the tokenizer module uses
readers of this package and is itself used by `checkpoint`.
"""
