"""Runners: who makes units, and where. The contract is in `base`, the choice in `registry`.

Nothing is imported here: a process imports what it is for, and some are for little.
"""
