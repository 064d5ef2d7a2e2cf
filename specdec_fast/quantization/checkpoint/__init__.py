"""Checkpoints that hold their own codes: each format's fields and tensors, read bit for bit.

``config.py`` reads ``quantization_config``, ``files.py`` lists and reads tensors; each other file has one format.
"""
