"""The commands: `main` names them and says what they take, a module for each does it, `faults` gives exit codes.

Nothing here computes; every module asks those below and shows what they answer. Modules of verbs are imported when their command is
called, so that help comes at once.
"""
