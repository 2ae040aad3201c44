"""Pure order: which pieces of which documents come when, and in which row. Integers in, integers out; no text, no I/O."""
