"""The feed: one stream on a Ray cluster for any number of training ranks."""
