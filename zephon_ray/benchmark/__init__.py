"""Benchmark: what a recipe's batches cost, against what its tokenizer alone costs on the same texts, and beside other loaders.

Everything is measured in a fresh process (`child`), of which this one sees to the memory (`processes`). `whole` and `parts` are what such
a process does, `peers` are the others, `figures` puts it together. It decides no byte of anything.
"""
