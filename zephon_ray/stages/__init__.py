"""Stages: read and tokenise, the pure and costly work of one unit. Nothing here knows the order of units."""
