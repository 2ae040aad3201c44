"""The demo: a corpus that every machine has, and the story that proves elastic determinism on it. Nothing here prints."""
