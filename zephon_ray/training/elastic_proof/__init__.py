"""The elastic proof: real training on CPU ranks, resumed on other numbers of them. `python -m zephon_ray.training.elastic_proof`.

Nothing else in the package imports it. It is the only place where TorchTitan is changed so that it trains without an accelerator.
"""
